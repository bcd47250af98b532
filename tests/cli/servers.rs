//! `serve`, as its user sees it: what it prints, `ps` and `stop`.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStderr, Stdio};

use tempfile::TempDir;

use crate::program::{Program, tinyvllm};

/// A server, killed when dropped.
struct Server {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStderr>>,
    address: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Neither sees other servers of the user that runs the tests, nor is seen.
fn program(home: &TempDir, words: &str) -> Program {
    let runtime = home.path().join("runtime");
    tinyvllm(words).env("XDG_RUNTIME_DIR", runtime).env("XDG_CACHE_HOME", home.path())
}

fn serve(home: &TempDir, words: &str) -> (Server, Vec<String>) {
    let words = format!("serve --port 0 --threads 1 --max-model-len 64 {words}");
    let mut child = program(home, &words).into_command().stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut said = Vec::new();
    let address = loop {
        let line = lines.next().unwrap().unwrap();
        said.push(line.clone());
        if let Some(page) = line.strip_prefix("chat http://") {
            break page.split('/').next().unwrap().to_owned();
        }
    };
    (Server { child, lines, address }, said)
}

#[test]
fn a_server_prints_the_addresses_of_page_and_interface() {
    let home = tempfile::tempdir().unwrap();
    let flags = "--enforce-eager --trust-remote-code --tensor-parallel-size 1 -np 2 -a story";
    let (server, said) = serve(&home, &format!("--host 0.0.0.0 {flags}"));
    assert_eq!(said[0], "ignored: --enforce-eager, --trust-remote-code, --tensor-parallel-size");
    // A server on every network is reached at this machine's own address.
    let port = server.address.strip_prefix("127.0.0.1:").unwrap();
    let last = said.last().unwrap();
    assert_eq!(*last, format!("chat http://127.0.0.1:{port}/ · API http://127.0.0.1:{port}/v1"));
    assert!(said.contains(&format!("ready: http://0.0.0.0:{port}/v1")));
    let json = program(&home, "ps --json").run().json();
    assert_eq!(json[0]["models"], serde_json::json!(["story"]));
}

#[test]
fn no_listening_line_for_a_missing_model() {
    let home = tempfile::tempdir().unwrap();
    for model in ["nosuch", "./nosuch.gguf"] {
        let outcome = program(&home, &format!("serve --port 0 {model}")).run();
        assert!(!outcome.stderr.contains("listening"), "{}", outcome.stderr);
        outcome.error(1, &["nosuch"]);
    }
}

#[cfg(unix)]
#[test]
fn servers_are_listed_and_stopped() {
    let home = tempfile::tempdir().unwrap();
    let none = program(&home, "ps").run();
    assert!(none.stderr.contains("you have no running server"));
    program(&home, "stop").run().error(1, &["you have no running server"]);
    let (mut first, _) = serve(&home, "--served-model-name first");
    let (mut second, _) = serve(&home, "--served-model-name second --served-model-name other");
    let text = program(&home, "ps").run().success();
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["MODEL", "ADDRESS", "STATE", "PID", "UP", "FOR", "MEMORY"]);
    let row = |name: &str, server: &Server| {
        let row = rows.iter().find(|row| row[0] == name).unwrap();
        assert_eq!(row[1..4], [&*server.address, "ready", &*server.child.id().to_string()], "{text}");
        assert!(row.last().is_some_and(|unit| unit.ends_with("iB")), "{text}");
    };
    row("first", &first);
    row("second", &second);
    program(&home, "stop").run().error(1, &["several servers match", "--all"]);
    program(&home, "stop third").run().error(1, &["no server has the name `third`"]);
    let outcome = program(&home, "stop other").run();
    assert!(outcome.stderr.contains("stopped second on "), "{}", outcome.stderr);
    assert!(second.child.wait().unwrap().success());
    // One that is killed is not listed, whatever has its number now.
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    assert_eq!(program(&home, "ps --json").run().success(), "");
    assert_eq!(std::fs::read_dir(home.path().join("runtime/tinyvllm")).unwrap().count(), 0);
}

#[cfg(unix)]
#[test]
fn probes_are_in_the_verbose_log() {
    use std::io::{Read, Write};
    let home = tempfile::tempdir().unwrap();
    for (flag, expected) in [("", false), ("--verbose", true)] {
        let (mut server, _) = serve(&home, flag);
        for path in ["/metrics", "/health", "/version"] {
            let mut stream = std::net::TcpStream::connect(&server.address).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
            stream.read_to_end(&mut Vec::new()).unwrap();
        }
        program(&home, "stop").run().success();
        let log: Vec<String> = server.lines.by_ref().map(Result::unwrap).collect();
        assert_eq!(log.iter().any(|line| line.starts_with("200 GET /metrics")), expected, "{log:?}");
        assert_eq!(log.iter().any(|line| line.starts_with("200 GET /health")), expected, "{log:?}");
        assert!(log.iter().any(|line| line.starts_with("200 GET /version")), "{log:?}");
    }
}

/// A browser is what its name says: here, a program that writes down what it is to open.
#[cfg(target_os = "linux")]
#[test]
fn the_page_is_opened_or_a_notice_gives_the_reason() {
    use std::os::unix::fs::PermissionsExt;
    let home = tempfile::tempdir().unwrap();
    let bin = home.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let run = |words: &str| {
        let words = format!("serve --port 0 --threads 1 {words}");
        let program = program(&home, &words).env("PATH", &bin).env("TINYVLLM_TEST", &bin);
        let mut child = program.into_command().stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        (child, lines)
    };
    let (mut child, mut lines) = run("--open");
    let line = lines.find(|line| line.as_ref().unwrap().contains("cannot open a browser")).unwrap().unwrap();
    assert!(line.contains("xdg-open") && line.contains("the page is http://127.0.0.1:"), "{line}");
    child.kill().unwrap();
    child.wait().unwrap();
    let opened = bin.join("opened");
    std::fs::write(
        bin.join("xdg-open"),
        "#!/bin/sh\necho \"$1\" > \"$TINYVLLM_TEST/opened.new\"\nexec /bin/mv \
                             \"$TINYVLLM_TEST/opened.new\" \"$TINYVLLM_TEST/opened\"\n",
    )
    .unwrap();
    std::fs::set_permissions(bin.join("xdg-open"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let (mut child, mut lines) = run("--open");
    let line = lines.find(|line| line.as_ref().unwrap().starts_with("chat http")).unwrap().unwrap();
    let start = std::time::Instant::now();
    while !opened.exists() {
        assert!(start.elapsed().as_secs() < 60, "nothing was opened");
        std::thread::yield_now();
    }
    let page = std::fs::read_to_string(&opened).unwrap();
    assert!(line.starts_with(&format!("chat {} ", page.trim())), "{line} {page}");
    child.kill().unwrap();
    child.wait().unwrap();
}
