//! The examples for Rust, as a reader runs them.

use std::path::PathBuf;
use std::process::Command;

/// Where the examples are. `cargo test` builds them; `cargo test --test cli` does not.
fn folder() -> PathBuf {
    let profile = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().to_owned();
    let folder = profile.join("examples");
    if ["chat", "batch", "stream"].iter().any(|name| !folder.join(name).exists()) {
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .args(["build", "--package", "tinyvllm", "--examples", "--target-dir"])
            .arg(profile.parent().unwrap());
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.status().unwrap().success());
    }
    folder
}

#[test]
fn examples_print_answers() {
    let folder = folder();
    let run = |name: &str| {
        let output = Command::new(folder.join(name)).arg("demo").output().unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    // It is sampled, so it may be short.
    assert!(!run("chat").trim().is_empty());
    assert!(run("stream").split("\n\n").count() >= 2);
    let batch = run("batch");
    for (line, place) in batch.lines().zip(["a farm", "a forest", "a city", "the sea"]) {
        let answer = line.strip_prefix(place).and_then(|line| line.strip_prefix(": ")).unwrap();
        // An object in the requested format, or the beginning of one: numbers have no end of their own.
        assert!(answer.starts_with('{') && answer.contains("\"animal\""), "{batch}");
    }
    assert_eq!(batch.lines().count(), 4);
}
