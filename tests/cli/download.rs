//! Models by name: downloaded from a fake Hub on this machine, then used from the cache.
//!
//! What the Hub may do wrong is tested in `tests/hub.rs`; here it is about what the user sees.

use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;

use crate::fake::{COMMIT, FakeHub, Response};
use crate::program::{Program, fixture, tinyvllm};

/// A Hub with one repository, and a home for its copy.
struct HubSetup {
    hub: FakeHub,
    home: TempDir,
    repo: &'static str,
}

impl HubSetup {
    fn new(repo: &'static str, files: &[(&str, PathBuf)]) -> Self {
        let files: Vec<_> = files.iter().map(|(name, path)| (*name, fs::read(path).unwrap())).collect();
        let files: Vec<_> = files.iter().map(|(name, data)| (*name, data.as_slice())).collect();
        Self { hub: FakeHub::new(repo, &files), home: tempfile::tempdir().unwrap(), repo }
    }

    fn tiny_llama() -> Self {
        let names = ["config.json", "generation_config.json", "model.safetensors"];
        Self::new("org/tiny", &names.map(|name| (name, fixture("tiny/llama").join(name))))
    }

    fn program(&self, words: &str) -> Program {
        tinyvllm(words)
            .env("HF_ENDPOINT", self.hub.endpoint())
            .env("HF_HOME", self.home.path())
            .env("NO_PROXY", "127.0.0.1")
    }

    fn snapshot(&self) -> PathBuf {
        let folder = format!("models--{}", self.repo.replace('/', "--"));
        self.home.path().join("hub").join(folder).join("snapshots").join(COMMIT)
    }
}

#[test]
fn pull_downloads_once_and_prints_the_path() {
    let setup = HubSetup::tiny_llama();
    let first = setup.program("pull org/tiny").run();
    assert!(first.stderr.contains("downloading model.safetensors"), "{}", first.stderr);
    assert_eq!(first.success(), format!("{}\n", setup.snapshot().display()));
    let second = setup.program("pull --model org/tiny").run();
    assert!(!second.stderr.contains("downloading"), "{}", second.stderr);
    assert_eq!(second.success(), format!("{}\n", setup.snapshot().display()));
}

#[test]
fn a_model_by_name_gives_what_its_folder_gives_and_needs_no_network_later() {
    let setup = HubSetup::tiny_llama();
    let words = "--prompt-ids 5,6,7 --temperature 0 --ignore-eos --max-tokens 8 --json";
    let ids = |program: Program| program.run().json()[0]["output_token_ids"].clone();
    let expected = ids(tinyvllm(words).model(fixture("tiny/llama")));
    let named = || setup.program(words).args(["--model", "org/tiny"]);
    assert_eq!(ids(named()), expected);
    setup.hub.take_requests();
    assert_eq!(ids(named().env("HF_HUB_OFFLINE", "1")), expected);
    assert!(setup.hub.take_requests().is_empty(), "offline means no request at all");
    // A Hub that is down: the copy is used, with a notice.
    setup.hub.set_fault(|_, response| *response = Response::status(503));
    let outcome = named().run();
    assert!(outcome.stderr.contains("using the copy of `org/tiny`"), "{}", outcome.stderr);
    assert_eq!(outcome.json()[0]["output_token_ids"], expected);
}

#[test]
fn an_alias_with_a_type_picks_the_gguf_file_and_answers() {
    let demo = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../src/demo/model.gguf"));
    let tiny = fixture("tiny/llama/llama.q8_0.gguf");
    let files = [("name.Q5_0.gguf", demo), ("name.Q8_0.gguf", tiny)];
    let setup = HubSetup::new("TinyLlama/TinyLlama-1.1B-Chat-v1.0", &files);
    let words = "--prompt Hello --temperature 0 --max-tokens 8";
    let outcome = setup.program(words).args(["-m", "tinyllama:Q5_0"]).run();
    assert!(outcome.stderr.contains("TinyLlama/TinyLlama-1.1B-Chat-v1.0:Q5_0"), "{}", outcome.stderr);
    assert_eq!(outcome.success(), tinyvllm(words).run().success());
    let path = setup.program("pull tinyllama:Q5_0").run().success();
    assert!(path.ends_with("name.Q5_0.gguf\n"), "{path}");
    setup.program("info tinyllama:Q2_K").run().error(1, &["Q2_K", "Q5_0", "Q8_0"]);
}

#[test]
fn names_from_elsewhere_are_downloaded_run_listed_and_removed() {
    let demo = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../src/demo/model.gguf"));
    let repo = "bartowski/Llama-3.2-1B-Instruct-GGUF";
    let setup = HubSetup::new(repo, &[("Llama-3.2-1B-Instruct-Q4_K_M.gguf", demo)]);
    let words = "--temperature 0 --max-tokens 8";
    let expected = tinyvllm(&format!("--prompt Hello {words}")).run().success();
    for name in ["llama3.2:1b", &format!("hf.co/{repo}:Q4_K_M"), &format!("https://huggingface.co/{repo}")] {
        let outcome = setup.program(&format!("run {name} Hello {words}")).run();
        assert_eq!(outcome.success(), expected, "{name}");
    }
    let listed = setup.program("list --json").run().json();
    assert_eq!(listed[0]["name"], format!("{repo}:Q4_K_M"));
    assert!(setup.program("show llama3.2:1b").run().success().contains(&format!("{repo}:Q4_K_M")));
    setup.program("rm --yes llama3.2:1b").run().success();
    assert_eq!(setup.program("list").run().success(), "");
}

#[test]
fn refusals_say_what_to_do() {
    let setup = HubSetup::tiny_llama();
    let check = |response: fn() -> Response, expected: &[&str]| {
        setup.hub.set_fault(move |_, slot| *slot = response());
        let expected = [expected, &["hint: "]].concat();
        setup.program("--prompt-ids 5").args(["--model", "org/tiny"]).run().error(1, &expected);
    };
    check(|| Response::refusal(404, "RepoNotFound", "Repository not found"), &["no model `org/tiny`"]);
    check(|| Response::refusal(401, "GatedRepo", ""), &["gated", "no token"]);
    check(|| Response::refusal(429, "", ""), &["refuses more requests"]);
    setup.hub.clear_fault();
    setup.program("pull org/tiny --revision v9").run().error(1, &["v9", "hint: "]);
}
