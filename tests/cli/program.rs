//! Runs the program and looks at what came out.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// How to run the program: without anything of the surroundings that would change what it does.
pub(crate) struct Program {
    command: Command,
    stdin: Vec<u8>,
}

/// What came out.
pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// The path of a fixture.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures")).join(name)
}

/// A small model without a tokenizer, as safetensors: 288 tokens of vocabulary, 512 of context.
pub(crate) fn tiny_llama() -> String {
    fixture("tiny/llama").to_str().unwrap().to_owned()
}

/// The program with these words, split at spaces.
pub(crate) fn tinyvllm(words: &str) -> Program {
    Program::new().args(words.split_whitespace())
}

impl Program {
    pub(crate) fn new() -> Self {
        Self::of(env!("CARGO_BIN_EXE_tinyvllm"))
    }

    /// Another program, such as a shell that runs this one.
    pub(crate) fn of(name: &str) -> Self {
        let mut command = Command::new(name);
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            let prefixes = ["TINYVLLM_", "HF_", "XDG_", "NO_COLOR", "CLICOLOR"];
            if prefixes.iter().any(|prefix| name.starts_with(prefix)) {
                command.env_remove(name);
            }
        }
        Self { command, stdin: Vec::new() }
    }

    pub(crate) fn args<S: AsRef<std::ffi::OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    pub(crate) fn model(self, path: impl AsRef<Path>) -> Self {
        self.args([Path::new("--model"), path.as_ref()])
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    pub(crate) fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = bytes.into();
        self
    }

    /// For what needs more than input and output.
    pub(crate) fn into_command(self) -> Command {
        self.command
    }

    pub(crate) fn run(mut self) -> Outcome {
        self.command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.command.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let bytes = self.stdin;
        let writer = std::thread::spawn(move || {
            // A program that has all it needs may close its end.
            let _ = stdin.write_all(&bytes);
        });
        let outcome = Outcome::from(child.wait_with_output().unwrap());
        writer.join().unwrap();
        outcome
    }
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is UTF-8");
        Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

impl Outcome {
    /// Standard output of a run that must have succeeded.
    #[track_caller]
    pub(crate) fn success(self) -> String {
        assert_eq!(self.code, Some(0), "standard error: {}", self.stderr);
        self.stdout
    }

    /// JSON objects of a run that must have succeeded.
    #[track_caller]
    pub(crate) fn json(self) -> Vec<Value> {
        let stdout = self.success();
        stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Checks that the run ended with an error that says all of `words`, with nothing on standard
    /// output and no panic.
    #[track_caller]
    pub(crate) fn error(self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "standard error: {}", self.stderr);
        assert_eq!(self.stdout, "");
        let line = self.stderr.lines().find(|line| line.starts_with("error: "));
        assert!(line.is_some(), "no line begins with `error: `: {}", self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        // Messages are wrapped nowhere but in usage errors.
        let text = self.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        for word in words {
            assert!(text.contains(word), "{text} should say {word}");
        }
    }
}
