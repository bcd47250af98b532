//! The commands of README, as a reader types them into a shell.
//!
//! The models that they name are the built-in one under these names in a cache, so nothing is downloaded.
//! Variables (`TINYVLLM_MAX_TOKENS` and others) keep each command short and leave the command as it is.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Stdio};

use tempfile::TempDir;

use crate::program::{Program, fixture};

/// What needs longer than a test may take, and where it is run.
const NOT_RUN: [(&str, &str); 2] = [
    ("cargo install --path src/cli", "it builds the program"),
    ("tinyvllm bench --model ./model.gguf", "it measures the memory for seconds; bench.rs runs it"),
];

/// What ends with an error here: the status and a part of the message.
const REFUSED: [(&str, i32, &str); 4] = [
    ("tinyvllm chat qwen3-0.6b --no-thinking", 1, "has no switch for reasoning"),
    // A fixture instead of the model: it is loaded and quantised, and has no tokenizer.
    ("tinyvllm --model Qwen/Qwen2.5-0.5B-Instruct --quantization q8_0", 1, "has no tokenizer"),
    ("tinyvllm list && tinyvllm rm org/name", 2, "standard input is not a terminal"),
    // Nothing has made the folder.
    ("tinyvllm cache ls FOLDER", 1, "is no directory of cached prefixes"),
];

/// `cargo run --release -- …` is the program that the test has built.
const CARGO: &str = "cargo() { shift 2; [ \"$1\" = -- ] && shift; tinyvllm \"$@\"; }";

const LIMITS: [(&str, &str); 13] = [
    ("BATCH_SIZES", "1"),
    ("CONTEXT_LENS", "8"),
    ("INPUT_LEN", "8"),
    ("INTERVAL", "0.1"),
    ("MAX_TOKENS", "4"),
    ("MEMORY_BANDWIDTH", "10"),
    ("NUM_PROMPTS", "2"),
    ("ONCE", "true"),
    ("ONLY", "gather_rows"),
    ("OUTPUT_LEN", "2"),
    ("PORT", "0"),
    ("REQUEST_RATE", "inf"),
    ("THREADS", "1"),
];

/// Commands in the blocks for shells. One that a comment offers instead (`or: tinyvllm …`) comes before its line.
fn commands() -> Vec<String> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md"));
    let text = fs::read_to_string(path).unwrap();
    let blocks = text.split("```").skip(1).step_by(2);
    let shell: String = blocks.filter_map(|block| block.strip_prefix("sh\n")).collect();
    let mut commands = Vec::new();
    for line in shell.replace("\\\n", "").lines() {
        if let Some((_, other)) = line.split_once("or: tinyvllm ") {
            commands.push(format!("tinyvllm {other}"));
        }
        commands.push(line.to_owned());
    }
    assert!(commands.len() > 20, "README has only {commands:?}");
    commands
}

/// A folder with the files that README names, a cache with its models, and a server if one runs.
struct ReadmeSetup {
    folder: TempDir,
    server: Option<Server>,
}

struct Server {
    child: Child,
    /// Open as long as the server runs, which writes its log there.
    _log: BufReader<ChildStderr>,
    address: String,
}

impl Drop for ReadmeSetup {
    fn drop(&mut self) {
        self.stop();
    }
}

impl ReadmeSetup {
    fn new() -> Self {
        let setup = Self { folder: tempfile::tempdir().unwrap(), server: None };
        let path = |name: &str| setup.folder.path().join(name);
        let demo = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../src/demo/model.gguf"));
        for (repo, file) in [
            ("bartowski/Llama-3.2-3B-Instruct-GGUF", "name-Q4_K_M.gguf"),
            ("org/name", "name-Q4_K_M.gguf"),
            ("Qwen/Qwen3-0.6B", "name.gguf"),
            ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "name.gguf"),
        ] {
            symlink(&demo, setup.snapshot(repo).join(file)).unwrap();
        }
        let folder = setup.snapshot("Qwen/Qwen2.5-0.5B-Instruct");
        for file in ["config.json", "model.safetensors"] {
            symlink(fixture("tiny/qwen2").join(file), folder.join(file)).unwrap();
        }
        let tiny = fixture("tiny/llama");
        let files = [
            (&demo, "model.gguf"),
            (&tiny, "DIR"),
            (&tiny, "M"),
            (&tiny.join("golden.safetensors"), "golden.safetensors"),
        ];
        for (target, name) in files {
            symlink(target, path(name)).unwrap();
        }
        fs::write(path("report.txt"), "Nora was a farmer.\n").unwrap();
        fs::write(path("keys.txt"), "secret\n").unwrap();
        fs::create_dir(path("bin")).unwrap();
        symlink(env!("CARGO_BIN_EXE_tinyvllm"), path("bin/tinyvllm")).unwrap();
        for browser in ["bin/open", "bin/xdg-open"] {
            fs::write(path(browser), "#!/bin/sh\n").unwrap();
            fs::set_permissions(path(browser), fs::Permissions::from_mode(0o755)).unwrap();
        }
        setup
    }

    /// The folder of a model in the cache.
    fn snapshot(&self, repo: &str) -> PathBuf {
        let folder = self.folder.path().join("hub").join(format!("models--{}", repo.replace('/', "--")));
        let snapshot = folder.join("snapshots/c0ffee");
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir(folder.join("refs")).unwrap();
        fs::write(folder.join("refs/main"), "c0ffee").unwrap();
        snapshot
    }

    fn shell(&self, command: &str) -> Program {
        let home = self.folder.path();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut program = Program::of("sh")
            .args(["-c", &format!("cd '{}'; {CARGO}\n{command}", home.display())])
            .env("PATH", format!("{}:{path}", home.join("bin").display()))
            .env("HF_HOME", home)
            .env("HF_HUB_OFFLINE", "1")
            .env("XDG_CACHE_HOME", home)
            .env("XDG_RUNTIME_DIR", home.join("runtime"));
        for (name, value) in LIMITS {
            program = program.env(&format!("TINYVLLM_{name}"), value);
        }
        if let Some(Server { address, .. }) = &self.server {
            for name in ["TINYVLLM_URL", "TINYVLLM_BASE_URL"] {
                program = program.env(name, format!("http://{address}"));
            }
        }
        program
    }

    /// Starts a server, instead of one that runs, and waits until it is ready.
    fn serve(&mut self, command: &str) {
        self.stop();
        // The shell becomes the server, so that it can be killed.
        let mut shell = self.shell(&format!("exec {command}")).into_command();
        let mut child = shell.stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let ready = log.by_ref().lines().map(Result::unwrap).find(|line| line.starts_with("chat http://"));
        let ready = ready.unwrap_or_else(|| panic!("{command}: the server ended"));
        let address = ready.split('/').nth(2).unwrap().to_owned();
        self.server = Some(Server { child, _log: log, address });
    }

    fn stop(&mut self) {
        if let Some(Server { mut child, .. }) = self.server.take() {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// What the `curl` of README posts, sent to the server that runs.
    fn post(&self, command: &str) -> String {
        let (_, rest) = command.split_once("8000").unwrap();
        let path = rest.split(' ').next().unwrap();
        let body = command.split("-d '").nth(1).and_then(|rest| rest.split('\'').next()).unwrap();
        let mut stream = TcpStream::connect(&self.server.as_ref().unwrap().address).unwrap();
        let head = "Host: localhost\r\nConnection: close\r\nContent-Type: application/json";
        write!(stream, "POST {path} HTTP/1.1\r\n{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

#[test]
fn the_commands_of_the_readme_run() {
    let commands = commands();
    let mut setup = ReadmeSetup::new();
    for command in &commands {
        if NOT_RUN.iter().any(|(name, _)| command.starts_with(name)) {
            continue;
        }
        if command.starts_with("tinyvllm serve") {
            setup.serve(command);
            continue;
        }
        if command.starts_with("curl") {
            let answer = setup.post(command);
            assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"choices\""), "{answer}");
            continue;
        }
        let needs_server =
            ["tinyvllm top", "tinyvllm bench serve"].iter().any(|name| command.starts_with(name));
        if needs_server && setup.server.is_none() {
            setup.serve("tinyvllm serve");
        }
        let outcome = setup.shell(command).stdin("Hello\n").run();
        if let Some((_, status, words)) = REFUSED.iter().find(|(name, ..)| command.starts_with(name)) {
            assert_eq!(outcome.code, Some(*status), "{command}: {}", outcome.stderr);
            assert!(outcome.stderr.contains(words), "{command}: {}", outcome.stderr);
        } else {
            assert_eq!(outcome.code, Some(0), "{command}: {}", outcome.stderr);
            assert!(!outcome.stdout.is_empty() || command.contains("stop"), "{command}: {}", outcome.stderr);
        }
        if command.contains("tinyvllm stop") {
            let mut server = setup.server.take().unwrap();
            assert!(server.child.wait().unwrap().success(), "{command}");
        }
    }
    let named = NOT_RUN.iter().map(|(name, _)| name).chain(REFUSED.iter().map(|(name, ..)| name));
    for name in named {
        assert!(commands.iter().any(|command| command.starts_with(name)), "README has no `{name}`");
    }
}
