//! `list` and `rm`: models in the cache, which other programs share.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::program::{Program, tinyvllm};

/// A cache as the Hugging Face libraries make it.
fn cache(files: &[(&str, &str, &str, usize)]) -> TempDir {
    let home = tempfile::tempdir().unwrap();
    for (repo, commit, file, size) in files {
        let folder = home.path().join("hub").join(format!("models--{}", repo.replace('/', "--")));
        let blob = folder.join("blobs").join(format!("{file}-{size}"));
        let path = folder.join("snapshots").join(commit).join(file);
        for path in [&blob, &path, &folder.join("refs/main")] {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
        }
        fs::write(&blob, vec![b'x'; *size]).unwrap();
        fs::write(folder.join("refs/main"), commit).unwrap();
        fs::hard_link(&blob, &path).or_else(|_| fs::copy(&blob, &path).map(drop)).unwrap();
        #[cfg(unix)]
        {
            fs::remove_file(&path).unwrap();
            let target = Path::new("../../blobs").join(blob.file_name().unwrap());
            std::os::unix::fs::symlink(target, &path).unwrap();
        }
    }
    home
}

fn program(home: &TempDir, words: &str) -> Program {
    tinyvllm(words).env("HF_HOME", home.path())
}

#[test]
fn models_are_listed_by_the_names_that_run_them() {
    let home = cache(&[]);
    let outcome = program(&home, "list").run();
    assert!(outcome.stderr.contains("there are no models in ") && outcome.stderr.contains("run demo"));
    assert_eq!(outcome.success(), "");
    let home = cache(&[
        ("org/folder", "c0ffee", "config.json", 100),
        ("org/folder", "c0ffee", "model.safetensors", 2 << 20),
        ("org/name-GGUF", "c0ffee", "name-Q4_K_M.gguf", 3 << 20),
    ]);
    let text = program(&home, "ls").run().success();
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["NAME", "SIZE", "LAST", "USED"]);
    assert_eq!(lines[1][..3], ["org/folder", "2.00", "MiB"]);
    assert_eq!(lines[2][..3], ["org/name-GGUF:Q4_K_M", "3.00", "MiB"]);
    assert_eq!(lines[2][4..], ["seconds", "ago"], "{text}");
    let json = program(&home, "list --json").run().json();
    assert_eq!((&json[1]["name"], &json[1]["bytes"]), (&"org/name-GGUF:Q4_K_M".into(), &(3 << 20).into()));
}

#[test]
fn models_are_removed_after_confirmation() {
    let files = [
        ("org/name-GGUF", "c0ffee", "name-Q4_K_M.gguf", 30),
        ("org/name-GGUF", "c0ffee", "name-Q8_0.gguf", 50),
        ("org/other", "c0ffee", "model.safetensors", 70),
    ];
    let home = cache(&files);
    let names = |home: &TempDir| {
        let models = program(home, "list --json").run().json();
        models.iter().map(|model| model["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    // There is no terminal to ask.
    program(&home, "rm org/other").run().error(2, &["standard input is not a terminal", "--yes"]);
    program(&home, "rm --yes org/other org/none").run().error(1, &["`org/none` is not in the cache"]);
    program(&home, "rm --yes org/name-GGUF:Q2_K").run().error(1, &["there is org/name-GGUF:Q4_K_M"]);
    program(&home, "rm --yes demo").run().error(1, &["part of this program"]);
    program(&home, &format!("rm --yes {}", home.path().display())).run().error(1, &["a file of your own"]);
    program(&home, "rm").run().error(2, &["MODEL"]);
    assert_eq!(names(&home).len(), 3);
    let outcome = program(&home, "rm --yes org/name-GGUF:q8_0").run();
    assert!(outcome.stderr.contains("removed org/name-GGUF:q8_0, 50 B"), "{}", outcome.stderr);
    assert_eq!(names(&home), ["org/name-GGUF:Q4_K_M", "org/other"]);
    program(&home, "rm -y https://huggingface.co/org/name-GGUF org/other").run().success();
    assert_eq!(names(&home), Vec::<String>::new());
    assert_eq!(fs::read_dir(home.path().join("hub")).unwrap().count(), 0);
}

#[cfg(unix)]
#[test]
fn a_question_is_asked_on_a_terminal() {
    use crate::terminal::Terminal;
    let home = cache(&[("org/name", "c0ffee", "model.safetensors", 70)]);
    for (answer, words, is_gone) in [("", "nothing was removed", false), ("y", "removed org/name, 7", true)] {
        let mut terminal = Terminal::new(program(&home, "rm org/name"));
        terminal.wait_for("Other programs that use the Hugging Face cache lose it, too. [y/N] ");
        terminal.type_text(&format!("{answer}\r"));
        terminal.wait_for(words);
        assert_eq!(terminal.end().0, Some(i32::from(!is_gone)));
        assert_eq!(home.path().join("hub/models--org--name").exists(), !is_gone);
    }
}
