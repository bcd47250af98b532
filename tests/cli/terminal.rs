//! The program on a pseudo-terminal: chat with line editing, colours, Ctrl-C.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use nix::pty::{OpenptyResult, Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{LocalFlags, tcgetattr};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::program::{Program, tinyvllm};

/// A loaded machine may need long; a hanging program needs for ever.
const TIMEOUT: Duration = Duration::from_secs(120);

pub(crate) struct Terminal {
    child: Child,
    keyboard: File,
    screen: Receiver<Vec<u8>>,
    shown: String,
    home: TempDir,
}

impl Terminal {
    pub(crate) fn new(program: Program) -> Self {
        Self::with_columns(program, 200)
    }

    fn with_columns(program: Program, num_columns: u16) -> Self {
        let size = Winsize { ws_row: 50, ws_col: num_columns, ws_xpixel: 0, ws_ypixel: 0 };
        let OpenptyResult { master, slave } = openpty(&size, None).unwrap();
        let home = tempfile::tempdir().unwrap();
        let mut command = program.env("TERM", "xterm").env("XDG_DATA_HOME", home.path()).into_command();
        let end = || Stdio::from(slave.try_clone().unwrap());
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let keyboard = File::from(master.try_clone().unwrap());
        let mut reader = File::from(master);
        let (sender, screen) = mpsc::channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4_096];
            // An error is how a terminal without programs ends.
            while let Ok(length @ 1..) = reader.read(&mut buffer) {
                if sender.send(buffer[..length].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { child, keyboard, screen, shown: String::new(), home }
    }

    /// A chat that waits for the first question.
    fn chat(words: &str) -> Self {
        let mut terminal = Self::new(tinyvllm(words));
        // The progress bar of loading may have a `> ` of its own.
        terminal.wait_for("Ctrl-D leaves");
        terminal.wait_for("> ");
        terminal
    }

    /// Waits until `text` is shown after what was waited for before, and returns all up to there.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, text: &str) -> String {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(at) = self.shown.find(text) {
                let rest = self.shown.split_off(at + text.len());
                return std::mem::replace(&mut self.shown, rest);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.screen.recv_timeout(left) {
                Ok(bytes) => self.shown.push_str(&String::from_utf8_lossy(&bytes)),
                Err(error) => panic!("{error} while waiting for {text:?}; shown: {:?}", self.shown),
            }
        }
    }

    pub(crate) fn type_text(&mut self, text: &str) {
        self.type_bytes(text.as_bytes());
    }

    fn type_bytes(&mut self, bytes: &[u8]) {
        self.keyboard.write_all(bytes).unwrap();
    }

    fn interrupt(&self) {
        self.signal(Signal::SIGINT);
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().try_into().unwrap()), signal).unwrap();
    }

    /// Whether the terminal waits for lines and shows what is typed, as it does before the program.
    fn is_ordinary(&self) -> bool {
        let flags = tcgetattr(&self.keyboard).unwrap().local_flags;
        flags.contains(LocalFlags::ICANON | LocalFlags::ECHO)
    }

    /// Waits for the end; returns the exit code and what was shown since the last wait.
    pub(crate) fn end(mut self) -> (Option<i32>, String, TempDir) {
        let deadline = Instant::now() + TIMEOUT;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > deadline {
                self.child.kill().unwrap();
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        while let Ok(bytes) = self.screen.recv_timeout(Duration::from_millis(500)) {
            self.shown.push_str(&String::from_utf8_lossy(&bytes));
        }
        (status.code(), self.shown, self.home)
    }
}

#[test]
fn a_chat_with_line_editing_and_history() {
    let mut terminal = Terminal::chat("chat demo --temperature 0 --max-tokens 8");
    // A typing mistake, corrected with the line editor: Ctrl-A goes to the beginning, Ctrl-D deletes.
    terminal.type_text("xHello\x01\x04\r");
    // The editor draws the line again and again; this comes after the answer.
    terminal.wait_for("the token limit is reached");
    terminal.wait_for("> ");
    // Ctrl-C at the prompt does not end the program.
    terminal.type_text("half a line\x03");
    terminal.wait_for("/quit leaves");
    terminal.wait_for("> ");
    terminal.type_text("/reset\r");
    terminal.wait_for("the conversation is empty");
    terminal.wait_for("> ");
    terminal.type_text("\x04");
    let (code, _, home) = terminal.end();
    assert_eq!(code, Some(0));
    let history = std::fs::read_to_string(home.path().join("tinyvllm/chat_history")).unwrap();
    assert!(history.lines().any(|line| line == "Hello"), "{history}");
}

#[test]
fn a_chat_has_commands_and_entries_of_several_lines() {
    let mut terminal = Terminal::chat("chat demo --temperature 0 --max-tokens 8 --ignore-eos");
    let folder = terminal.home.path().to_owned();
    let mut enter = |typed: &str, shown: &str| {
        terminal.type_text(typed);
        let all = terminal.wait_for(shown);
        terminal.wait_for("> ");
        all
    };
    enter("/weather in Rome\r", "unknown command /weather");
    enter("/set temperature 9\r", "temperature");
    enter("/set max_tokens 4\r", "max_tokens is 4");
    enter("/system Be brief.\r", "the system prompt is changed");
    std::fs::write(folder.join("note.txt"), "red and green").unwrap();
    enter(&format!("/read {}\r", folder.join("note.txt").display()), "13 bytes");
    // Each of these is one entry.
    enter("Which\\\rcolours?\r", "the token limit is reached");
    enter("\"\"\"two\r/quit\r\"\"\"\r", "the token limit is reached");
    enter("a\x1b\rb\r", "the token limit is reached");
    enter("/regen\r", "the token limit is reached");
    let shown = enter("/show\r", "stop  ");
    assert!(shown.contains("7 messages") && shown.contains("Be brief."), "{shown}");
    assert!(shown.contains("the chat template has no switch"), "{shown}");
    enter("/set stop x\r", "stop is [\"x\"]");
    enter("/set stop none\r", "stop is none");
    enter("/set think none\r", "think is none: the chat template has no switch");
    let file = folder.join("talk.json");
    enter(&format!("/save {}\r", file.display()), "saved the conversation to");
    enter("/clear\r", "the conversation is empty");
    enter(&format!("/load {}\r", file.display()), "loaded 7 messages");
    let talk: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let said = |index: usize| talk["messages"][index]["content"].as_str().unwrap();
    assert_eq!(
        [0, 1, 3, 5].map(said),
        ["Be brief.", "red and green\n\nWhich\ncolours?", "two\n/quit", "a\nb"]
    );
    terminal.type_text("/bye\r");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn bytes_that_are_no_text_end_no_chat() {
    let mut terminal = Terminal::chat("chat demo --temperature 0 --max-tokens 4 --ignore-eos");
    let file = terminal.home.path().join("talk.json");
    // As from a keyboard in Latin-1. The up arrow brings the line back.
    terminal.type_bytes(b"What is a caf\xe9?\r");
    terminal.wait_for("not UTF-8");
    terminal.wait_for("> ");
    terminal.type_text("\x1b[A\x7f\x7f\x7fhouse?\r");
    terminal.wait_for("the token limit is reached");
    terminal.wait_for("> ");
    // A paste: nothing of it is a question of its own.
    let paste = [b"\x1b[200~one\r\xff", "a".repeat(2_000).as_bytes(), b"\rtwo\rthree\r\x1b[201~"].concat();
    terminal.type_bytes(&paste);
    terminal.wait_for("not UTF-8");
    terminal.wait_for("> ");
    terminal.type_text(&format!("/save {}\r", file.display()));
    terminal.wait_for("saved the conversation");
    let talk = std::fs::read_to_string(&file).unwrap();
    assert!(talk.contains("\"What is a house?\"") && talk.matches("\"user\"").count() == 1, "{talk}");
    terminal.type_text("/quit\r");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn every_end_of_a_chat_gives_the_terminal_back() {
    for signal in [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT] {
        let mut terminal = Terminal::chat("chat demo");
        assert!(!terminal.is_ordinary(), "the line editor is at work");
        terminal.signal(signal);
        let status = terminal.child.wait().unwrap();
        assert_eq!(status.signal(), Some(signal as i32));
        assert!(terminal.is_ordinary(), "{signal}");
        terminal.wait_for("\x1b[?2004l");
    }
    // During an answer the line editor is not at work.
    let mut terminal = Terminal::chat("chat demo --ignore-eos --kernels reference");
    terminal.type_text("Tell me a story\r");
    terminal.wait_for("story");
    terminal.wait_for("\r\n");
    terminal.wait_for(" ");
    assert!(!terminal.is_ordinary(), "keys do not show in the answer");
    terminal.signal(Signal::SIGTERM);
    assert_eq!(terminal.child.wait().unwrap().signal(), Some(Signal::SIGTERM as i32));
    assert!(terminal.is_ordinary());
}

#[test]
fn a_long_prompt_shows_its_progress() {
    let mut terminal = Terminal::chat(
        "chat demo --max-tokens 4 --ignore-eos --max-num-seqs 2 --max-num-batched-tokens 16 --kernels reference",
    );
    terminal.type_text(&format!("{}\r", "word ".repeat(150)));
    let shown = terminal.wait_for(" / ");
    assert!(shown.contains("reading the prompt "), "{shown:?}");
    // It is gone when the answer comes.
    let rest = terminal.wait_for("the token limit is reached");
    let last = rest.rsplit("reading the prompt").next().unwrap();
    assert!(last.contains("\x1b[2K"), "{rest:?}");
    terminal.wait_for("> ");
    terminal.type_text("/bye\r");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn keys_that_are_typed_during_an_answer_wait() {
    let mut terminal = Terminal::chat("chat demo --temperature 0 --ignore-eos --max-tokens 200");
    terminal.type_text("Tell me a story\r");
    terminal.wait_for("story");
    terminal.wait_for("\r\n");
    terminal.wait_for(" ");
    terminal.type_text("/set seed 77\r");
    let answer = terminal.wait_for("the token limit is reached");
    assert!(!answer.contains("seed"), "{answer}");
    terminal.wait_for("seed is 77");
    terminal.type_text("/quit\r");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn answers_break_between_words() {
    let mut terminal = Terminal::with_columns(tinyvllm("chat demo --temperature 0 --max-tokens 60"), 30);
    terminal.wait_for("Ctrl-D leaves");
    terminal.wait_for("> ");
    terminal.type_text("Hi\r");
    let shown = terminal.wait_for("know?");
    let lines: Vec<&str> = shown.split("\r\n").filter(|line| !line.contains('\x1b')).collect();
    assert!(lines.len() >= 2, "{shown:?}");
    // The program broke them: none is as long as the terminal would make it.
    assert!(lines.iter().all(|line| line.len() <= 30), "{lines:?}");
    terminal.type_text("/quit\r");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn reasoning_is_dimmed() {
    let template = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tok/chat/glm.jinja");
    let words = format!("chat demo --temperature 0 --max-tokens 8 --ignore-eos --chat-template {template}");
    for (words, is_dimmed) in [(words.clone(), true), (format!("{words} --no-thinking"), false)] {
        let mut terminal = Terminal::chat(&words);
        terminal.type_text("Hello\r");
        let shown = terminal.wait_for("the token limit is reached");
        assert_eq!(shown.contains("\x1b[2m"), is_dimmed, "{words}: {shown:?}");
        assert!(!shown.contains("think>"), "{words}: {shown:?}");
        terminal.type_text("/quit\r");
        assert_eq!(terminal.end().0, Some(0));
    }
}

#[test]
fn ctrl_c_stops_the_answer_and_not_the_chat() {
    let mut terminal = Terminal::chat("chat demo --ignore-eos");
    terminal.type_text("Tell me a story\r");
    // The answer has begun when there is a line of text after the typed one.
    terminal.wait_for("story");
    terminal.wait_for("\r\n");
    terminal.wait_for(" ");
    terminal.interrupt();
    terminal.wait_for("(stopped)");
    terminal.wait_for("> ");
    terminal.type_text("/quit\r");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn a_model_alone_on_a_terminal_chats() {
    let mut terminal = Terminal::chat("--model demo");
    terminal.type_text("\x04");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn nothing_at_all_on_a_terminal_shows_the_built_in_model() {
    let (code, shown, _) = Terminal::new(tinyvllm("")).end();
    assert_eq!(code, Some(0), "{shown}");
    assert!(shown.contains("Once upon a time, in a small village by the sea,"), "{shown}");
    assert!(shown.contains("\x1b[1m"), "the prompt is bold: {shown:?}");
    assert_eq!(shown.matches("tokens/s").count(), 2, "{shown}");
}

#[test]
fn no_color_is_respected() {
    let program = tinyvllm("--raw --prompt Once --prompt Two --max-tokens 4").env("NO_COLOR", "1");
    let (code, shown, _) = Terminal::new(program).end();
    assert_eq!(code, Some(0), "{shown}");
    assert!(shown.contains("[1] Once") && !shown.contains("\x1b[1m"), "{shown:?}");
    let (_, shown, _) = Terminal::new(tinyvllm("--prompt a --temperature 9").env("NO_COLOR", "1")).end();
    assert!(shown.contains("error: ") && !shown.contains('\x1b'), "{shown:?}");
}

#[test]
fn generate_without_a_prompt_is_wrong_usage() {
    for words in ["generate", "--json --model demo", "--raw --model demo"] {
        let (code, shown, _) = Terminal::new(tinyvllm(words)).end();
        assert_eq!(code, Some(2), "{words}: {shown}");
        assert!(shown.contains("--prompt TEXT"), "{words}: {shown}");
    }
}

/// Answers every request with a page of metrics, `num_pages` times; then it stops listening.
fn serve_metrics(num_pages: u32) -> std::net::SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for page in 0..num_pages {
            let (mut stream, _) = listener.accept().unwrap();
            let mut buffer = [0; 4_096];
            let _ = stream.read(&mut buffer);
            let body = format!(
                "vllm:num_requests_running{{model_name=\"watched\"}} 7\nvllm:kv_cache_usage_perc 0.5\n\
                 vllm:generation_tokens_total {}\n",
                page * 1_000
            );
            let head =
                format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
            let _ = stream.write_all(format!("{head}{body}").as_bytes());
        }
    });
    address
}

#[test]
fn top_draws_in_place_and_gives_the_terminal_back() {
    let url = format!("http://{}", serve_metrics(4));
    let mut terminal = Terminal::new(tinyvllm(&format!("top --interval 0.2 --url {url}")));
    terminal.wait_for("\x1b[?1049h");
    terminal.wait_for("watched");
    let shown = terminal.wait_for("████████████░░░░░░░░░░░░");
    assert!(shown.contains("\x1b[1m"), "numbers are bold: {shown:?}");
    // The second frame is drawn over the first one.
    let shown = terminal.wait_for("\x1b[H");
    assert!(!shown.contains("\x1b[2J"), "{shown:?}");
    terminal.wait_for("no answer, retrying");
    terminal.interrupt();
    let (code, shown, _) = terminal.end();
    assert_eq!(code, Some(0), "{shown}");
    assert!(shown.ends_with("\x1b[?25h\x1b[?1049l"), "{shown:?}");
}

#[test]
fn a_key_leaves_top() {
    let url = format!("http://{}", serve_metrics(10_000));
    let mut terminal =
        Terminal::new(tinyvllm(&format!("top --interval 0.1 --url {url}")).env("NO_COLOR", "1"));
    terminal.wait_for("watched");
    let shown = terminal.wait_for("last 0.1 s");
    assert!(!shown.contains("\x1b[1m"), "{shown:?}");
    terminal.type_text("xq");
    let (code, shown, _) = terminal.end();
    assert_eq!(code, Some(0), "{shown}");
    // What is typed is not shown, and the terminal is as it was.
    assert!(!shown.contains("xq") && shown.ends_with("\x1b[?1049l"), "{shown:?}");
}
