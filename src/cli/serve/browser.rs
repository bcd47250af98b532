//! Opens the chat page in the user's browser.

use std::process::{Command, Stdio};

use super::super::console::Console;

/// Opens a page in the browser. A failure is only a notice.
pub(super) fn open(url: &str, console: Console) {
    let (program, args): (&str, &[&str]) = match std::env::consts::OS {
        "macos" => ("open", &[]),
        // `start` is a shell builtin, and takes its first quoted argument as a title.
        "windows" => ("cmd", &["/C", "start", ""]),
        _ => ("xdg-open", &[]),
    };
    let mut command = Command::new(program);
    command.args(args).arg(url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let failed = {
        let (program, url) = (program.to_owned(), url.to_owned());
        move |why: &str| {
            console.note(format_args!("cannot open a browser ({program}: {why}); the page is {url}"))
        }
    };
    match command.spawn() {
        // The browser may run as long as the server.
        Ok(mut child) => drop(std::thread::spawn(move || match child.wait() {
            Ok(status) if status.success() => {}
            Ok(status) => failed(&status.to_string()),
            Err(error) => failed(&error.to_string()),
        })),
        Err(error) => failed(&error.to_string()),
    }
}
