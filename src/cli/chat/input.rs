//! Reads the lines of a chat: from the terminal with line editing, or from a pipe.

use std::cell::RefCell;
use std::io::{self, BufRead, IsTerminal};
use std::path::PathBuf;

use anyhow::Context as _;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{Behavior, Cmd, Config, Editor, EventHandler, Helper, KeyCode, KeyEvent, Modifiers};

use super::super::console::Console;
use super::super::keyboard;

/// Begins and ends an entry of several lines.
const QUOTES: &str = "\"\"\"";

/// The source of entries.
pub(super) enum Input {
    Terminal { editor: Box<Editor<Typed, FileHistory>>, history: Option<PathBuf>, console: Console },
    Pipe(io::StdinLock<'static>),
}

impl Input {
    pub(super) fn open(console: Console) -> anyhow::Result<Self> {
        if !io::stdin().is_terminal() {
            return Ok(Self::Pipe(io::stdin().lock()));
        }
        // If standard output is a file, the prompt is still shown on the terminal.
        let behavior = if io::stdout().is_terminal() { Behavior::Stdio } else { Behavior::PreferTerm };
        let config = Config::builder().behavior(behavior).build();
        let mut editor = Editor::with_config(config).context("cannot use the terminal")?;
        editor.set_helper(Some(Typed::default()));
        let new_line = EventHandler::Simple(Cmd::Newline);
        editor.bind_sequence(KeyEvent(KeyCode::Enter, Modifiers::ALT), new_line);
        let history = history_path();
        if let Some(path) = &history {
            // The history does not exist before the first chat.
            let _ = editor.load_history(path);
        }
        console.note("/help lists the commands, Ctrl-D leaves");
        Ok(Self::Terminal { editor: Box::new(editor), history, console })
    }

    /// The next entry; `None` when the user leaves. From a pipe it is one line; on the terminal it can have
    /// several.
    pub(super) fn next_entry(&mut self) -> anyhow::Result<Option<String>> {
        if let Self::Pipe(pipe) = self {
            return next_of(pipe).context("cannot read standard input");
        }
        let mut entry = Lines::default();
        loop {
            let prompt = if entry.is_empty() { "> " } else { ". " };
            match self.next_line(prompt)? {
                Line::Of(line) => {
                    if let Some(entry) = entry.add(&line) {
                        if let Self::Terminal { editor, .. } = self {
                            // A chat works without its history.
                            let _ = editor.add_history_entry(entry.trim());
                        }
                        return Ok(Some(entry));
                    }
                }
                // The incomplete entry is dropped.
                Line::Interrupted => entry = Lines::default(),
                Line::End => return Ok(None),
            }
        }
    }

    fn next_line(&mut self, prompt: &str) -> anyhow::Result<Line> {
        let Self::Terminal { editor, console, .. } = self else { return Ok(Line::End) };
        loop {
            match editor.readline(prompt) {
                Ok(line) => return Ok(Line::Of(line)),
                Err(ReadlineError::Eof) => return Ok(Line::End),
                Err(ReadlineError::Interrupted) => {
                    console.note("(Ctrl-D or /quit leaves)");
                    return Ok(Line::Interrupted);
                }
                // With such a byte the editor drops all that it has read. The rest of it would be another text, or
                // the lines of a paste as questions.
                Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::InvalidData => {
                    keyboard::drop_input();
                    let typed = editor.helper().map(|typed| typed.0.take()).unwrap_or_default();
                    // A chat works without its history.
                    let _ = editor.add_history_entry(typed.trim());
                    console.note("(not UTF-8, so the line is dropped; the up arrow brings it back)");
                }
                Err(error) => return Err(error).context("cannot read from the terminal"),
            }
        }
    }

    pub(super) fn save_history(&mut self, console: Console) {
        let Self::Terminal { editor, history: Some(path), .. } = self else { return };
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        if let Err(error) = folder.map_err(ReadlineError::from).and_then(|()| editor.save_history(path)) {
            console.detail(format_args!("cannot save the history in `{}`: {error}", path.display()));
        }
    }
}

/// The next line of a pipe, with U+FFFD for what is not UTF-8.
fn next_of(pipe: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    pipe.read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    let line = line.strip_suffix(b"\n").unwrap_or(&line);
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    Ok(Some(String::from_utf8_lossy(line).into_owned()))
}

/// The line in the editor, which outlives an error of the editor. It asks for a hint after each change.
#[derive(Debug, Default)]
pub(super) struct Typed(RefCell<String>);

impl Hinter for Typed {
    type Hint = String;

    fn hint(&self, line: &str, _cursor: usize, _context: &rustyline::Context<'_>) -> Option<String> {
        line.clone_into(&mut self.0.borrow_mut());
        None
    }
}

impl Highlighter for Typed {}

impl Completer for Typed {
    type Candidate = String;
}

impl Validator for Typed {}

impl Helper for Typed {}

enum Line {
    Of(String),
    Interrupted,
    End,
}

/// The lines of an entry so far.
#[derive(Debug, Default)]
struct Lines {
    text: String,
    is_open: bool,
    is_quoted: bool,
}

impl Lines {
    fn is_empty(&self) -> bool {
        !self.is_open
    }

    /// Adds a line; returns the entry if it is complete.
    fn add(&mut self, line: &str) -> Option<String> {
        let mut line = line;
        if !self.is_open
            && let Some(rest) = line.trim_start().strip_prefix(QUOTES)
        {
            (self.is_quoted, line) = (true, rest);
        }
        let ends = match self.is_quoted {
            true => line.trim_end().strip_suffix(QUOTES).inspect(|rest| line = rest).is_some(),
            false => line.strip_suffix('\\').inspect(|rest| line = rest).is_none(),
        };
        if self.is_open {
            self.text.push('\n');
        }
        self.is_open = true;
        self.text.push_str(line);
        ends.then(|| std::mem::take(self).text)
    }
}

/// `$XDG_DATA_HOME/tinyvllm/chat_history`, by default in `~/.local/share`.
fn history_path() -> Option<PathBuf> {
    let data = std::env::var_os("XDG_DATA_HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
    let data = data.or_else(|| std::env::home_dir().map(|home| home.join(".local").join("share")))?;
    Some(data.join("tinyvllm").join("chat_history"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_pipe() {
        let mut pipe = &b"a\r\n\nb\xffc\nd"[..];
        let mut lines = Vec::new();
        while let Some(line) = next_of(&mut pipe).unwrap() {
            lines.push(line);
        }
        assert_eq!(lines, ["a", "", "b\u{fffd}c", "d"]);
    }

    #[test]
    fn lines_are_joined() {
        let check = |lines: &[&str], expected: &str| {
            let mut entry = Lines::default();
            let (last, others) = lines.split_last().unwrap();
            for line in others {
                assert_eq!(entry.add(line), None, "{line:?} of {lines:?}");
                assert!(!entry.is_empty());
            }
            assert_eq!(entry.add(last).as_deref(), Some(expected), "{lines:?}");
            assert!(entry.is_empty() && entry.text.is_empty());
        };
        check(&["one"], "one");
        check(&["one \\", "  two"], "one \n  two");
        check(&["\"\"\"one", "", "two \\", "three\"\"\" "], "one\n\ntwo \\\nthree");
        check(&["\"\"\"", "/quit", "\"\"\""], "\n/quit\n");
        check(&["\"\"\"one line\"\"\""], "one line");
        check(&["a \"\"\" b"], "a \"\"\" b");
    }
}
