//! Rules of the house that no compiler checks: what may use what, how long files are, what text must
//! not be in them. They are tests so that CI has no rules of its own.

#![expect(clippy::unwrap_used, reason = "a file that cannot be read fails the test, as it should")]

#[path = "tidy/documents.rs"]
mod documents;
#[path = "tidy/sources.rs"]
mod sources;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use documents::{MAX_CELL, anchors, flags, links, long_cells};
use sources::*;

/// Lines of a source file, without its tests.
const MAX_LINES: usize = 700;

/// What each module of the library may use of it, besides `config` and `error`. The kernels, the server and the command
/// line are packages, whose dependencies the compiler knows.
const MAY_USE: &[(&str, &[&str])] = &[
    ("chat", &["deadline", "grammar", "tokenizer", "weights"]),
    ("config", &["weights"]),
    ("deadline", &[]),
    ("demo", &[]),
    ("engine", &["kv_cache", "prefix_store", "runner", "sampling", "scheduler", "speculation"]),
    ("files", &[]),
    ("grammar", &["deadline", "sampling", "tokenizer"]),
    ("hub", &[]),
    ("kv_cache", &[]),
    ("layers", &["ops", "weights"]),
    (
        "llm",
        &[
            "chat",
            "demo",
            "engine",
            "grammar",
            "hub",
            "models",
            "ops",
            "prefix_store",
            "runner",
            "sampling",
            "tokenizer",
            "weights",
        ],
    ),
    ("models", &["layers", "ops", "weights"]),
    ("ops", &["weights"]),
    ("prefix_store", &[]),
    ("runner", &["kv_cache", "models", "ops", "sampling", "scheduler", "speculation"]),
    ("sampling", &[]),
    ("scheduler", &["kv_cache", "speculation"]),
    ("self_test", &["demo", "models", "ops", "sampling", "weights"]),
    ("speculation", &["sampling"]),
    ("tokenizer", &["deadline", "weights"]),
    ("weights", &["ops"]),
];

/// Packages in `src`, which are no modules of the library.
const PACKAGES: [&str; 3] = ["cli", "kernels", "server"];

/// Crates, and the only modules that may name them: modules, or folders in `src`.
const ONLY_IN: &[(&str, &[&str])] = &[
    ("blake3", &["prefix_store"]),
    ("block2", &["ops/gpu/device/apple"]),
    ("candle_metal_kernels", &["ops/gpu/device/apple"]),
    // Its tensors are the definition of the ops, and of nothing else.
    ("candle_core", &["ops/reference"]),
    ("candle_nn", &["ops/reference"]),
    ("cudarc", &["ops/gpu/device/cuda"]),
    ("hf_hub", &["hub"]),
    ("libloading", &["ops/gpu/device/cuda"]),
    ("llguidance", &["grammar"]),
    ("memmap2", &["kernels", "ops", "weights"]),
    ("minijinja", &["chat"]),
    ("objc2", &["ops/gpu/device/apple"]),
    ("objc2_metal", &["ops/gpu/device/apple"]),
    ("rmp_serde", &["server/kv_events"]),
    ("rustls", &["hub/download"]),
    ("tokenizers", &["tokenizer"]),
    ("ureq", &["hub/download"]),
];

/// Modules of `ops` that know all devices.
const CHOOSES_DEVICE: &[&str] = &["ops/context", "ops/device"];

/// What a pure module must not name: it decides by numbers alone.
const IMPURE: &[&str] = &[
    "std::time",
    "std::fs",
    "std::io",
    "std::net",
    "std::env",
    "std::thread",
    "std::sync",
    "std::process",
    "SystemTime",
    "Instant",
];
const PURE: &[&str] = &["kv_cache", "scheduler"];

#[test]
fn devices_are_symmetric_and_chosen_in_one_place() {
    let sources = sources();
    let mut wrong = Vec::new();
    for source in sources.iter().filter(|source| source.is_in("ops")) {
        if !CHOOSES_DEVICE.iter().any(|module| source.is_in(module)) {
            wrong.extend(source.lines_with("Backend::Gpu"));
        }
        // What a GPU is knows no kernels and no ops.
        if source.is_in("ops/gpu/device") && !source.is_test() {
            let above = |(_, line): &&(usize, String)| {
                line.contains("crate::ops::")
                    && !line.contains("crate::ops::gpu::device")
                    && !line.contains("pub(in")
            };
            let lines = source.code.iter().filter(above);
            wrong.extend(lines.map(|(number, line)| format!("{}:{number}: {line}", source.path)));
        }
        // The op, and what it is on each device, are found by its name.
        let op = source.path.strip_prefix("src/ops/").and_then(|path| path.strip_suffix(".rs"));
        let is_op = source.code.iter().any(|(_, line)| {
            line.starts_with("pub(crate) trait")
                && ["Device {", "PagedAttention {"].iter().any(|end| line.ends_with(end))
        });
        let Some(op) = op.filter(|op| is_op && !op.contains('/')) else { continue };
        for device in ["cpu", "gpu", "reference"] {
            let path = format!("src/ops/{device}/{op}.rs");
            if !sources.iter().any(|source| source.path == path) {
                wrong.push(format!("{}: there is no {path}", source.path));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn source_files_are_short_and_say_what_they_are_for() {
    let sources = sources();
    none(
        &format!("a source file has at most {MAX_LINES} lines without its tests"),
        sources
            .iter()
            .filter(|source| !source.is_test() && source.code.len() > MAX_LINES)
            .map(|source| format!("{}: {}", source.path, source.code.len())),
    );
    none(
        "a source file starts with its purpose (//!)",
        sources
            .iter()
            .filter(|source| !source.is_test() && !source.text.starts_with("//!"))
            .map(|source| source.path.clone()),
    );
    let vague = ["utils", "util", "helpers", "helper", "common", "misc"];
    none(
        "a module is named after what it is for",
        sources
            .iter()
            .filter(|source| source.path.split(['/', '.']).any(|part| vague.contains(&part)))
            .map(|source| source.path.clone()),
    );
}

#[test]
fn files_of_kernels_and_of_the_page_are_short_too() {
    let ends = [".rs", ".hpp", ".cpp", ".metal", ".h", ".js"];
    let mut files = tracked_files();
    let folders = ["metal_kernels/", "tests/metal/", "src/server/page/"];
    files.retain(|name| folders.iter().any(|folder| name.starts_with(folder)));
    files.retain(|name| ends.iter().any(|end| name.ends_with(end)));
    assert!(files.len() > 20, "only {} files found", files.len());
    let read = |name: &String| fs::read_to_string(root().join(name)).unwrap();
    let is_long = |name: &&String| read(name).lines().count() > MAX_LINES;
    none(&format!("a file has at most {MAX_LINES} lines"), files.iter().filter(is_long).cloned());
    let has_no_purpose = |name: &&String| !name.ends_with("/tests.rs") && !read(name).starts_with("//");
    none("a file starts with its purpose", files.iter().filter(has_no_purpose).cloned());
}

#[test]
fn modules_use_only_what_they_may() {
    let mut violations = Vec::new();
    for source in sources() {
        let module = source.module();
        if source.is_test() || module == "lib" || PACKAGES.contains(&module) {
            continue;
        }
        let Some((_, allowed)) = MAY_USE.iter().find(|(name, _)| *name == module) else {
            violations.push(format!("{}: {module} is missing in MAY_USE", source.path));
            continue;
        };
        for (number, used) in source.uses() {
            let is_module = used.starts_with(|c: char| c.is_lowercase());
            // Every module may use errors, what shortens what they quote, and files.
            let for_all = used == module
                || ["config", "files", "quoted", "shortened", "visible"].contains(&used.as_str());
            if is_module && !for_all && !allowed.contains(&used.as_str()) {
                violations.push(format!("{}:{number}: {module} uses {used}", source.path));
            }
        }
    }
    none("which module may use which is the code map of ARCHITECTURE.md", violations);
}

#[test]
fn every_program_of_tests_is_a_target_of_one_package() {
    let manifests = ["Cargo.toml", "src/cli/Cargo.toml", "src/server/Cargo.toml"];
    let manifests = manifests.map(|name| fs::read_to_string(root().join(name)).unwrap());
    let programs = tracked_files().into_iter().filter(|name| match name.strip_prefix("tests/") {
        Some(name) => name.ends_with(".rs") && (!name.contains('/') || name.ends_with("/main.rs")),
        None => false,
    });
    let programs: Vec<String> = programs.filter(|name| name.matches('/').count() <= 2).collect();
    assert!(programs.len() > 10, "only {programs:?} found");
    let is_in = |name: &str| {
        let named = [format!("path = \"{name}\""), format!("path = \"../../{name}\"")];
        manifests.iter().filter(|text| named.iter().any(|path| text.contains(path))).count()
    };
    none(
        "a program of tests is a [[test]] in one Cargo.toml; one that starts the program is in src/cli",
        programs.into_iter().filter(|name| is_in(name) != 1),
    );
}

#[test]
fn foreign_crates_stay_inside_their_module() {
    let sources = sources();
    for (name, modules) in ONLY_IN {
        none(
            &format!("{name} is used in {modules:?} only"),
            sources
                .iter()
                .filter(|source| !modules.iter().any(|module| source.is_in(module)) && !source.is_test())
                .flat_map(|source| source.lines_with(name)),
        );
    }
    for name in IMPURE {
        none(
            &format!("{PURE:?} know no clock, file, thread or environment"),
            sources
                .iter()
                .filter(|source| PURE.contains(&source.module()) && !source.is_test())
                .flat_map(|source| source.lines_with(name)),
        );
    }
}

#[test]
fn one_module_picks_status_codes() {
    none(
        "what is answered when something goes wrong is decided in src/server/error.rs",
        sources()
            .iter()
            .filter(|source| source.module() == "server" && source.path != "src/server/error.rs")
            .flat_map(|source| source.lines_with("StatusCode").collect::<Vec<_>>()),
    );
}

#[test]
fn unsafe_code_stays_in_kernels_and_memory_maps() {
    none(
        "unsafe code is in src/kernels and src/ops, and in src/weights to map files",
        sources()
            .iter()
            .filter(|source| !["kernels", "ops"].contains(&source.module()))
            .filter(|source| source.module() != "weights" || !source.text.contains("memmap2"))
            .flat_map(|source| source.lines_with("unsafe").collect::<Vec<_>>()),
    );
}

#[test]
fn only_the_command_line_prints() {
    let sources = sources();
    for name in ["println!", "eprintln!", "print!", "eprint!", "dbg!"] {
        none(
            "output is written in src/cli only",
            sources
                .iter()
                .filter(|source| source.module() != "cli" && !source.is_test())
                .flat_map(|source| source.lines_with(name)),
        );
    }
}

#[test]
fn nothing_is_left_for_later() {
    let mut files = sources();
    for name in tracked_files() {
        if name.ends_with(".rs") && name.starts_with("tests/") && name != "tests/tidy.rs" {
            let text = fs::read_to_string(root().join(&name)).unwrap();
            let code = text.lines().enumerate().map(|(index, line)| (index + 1, strip(line))).collect();
            files.push(Source { path: name, text, code });
        }
    }
    for name in ["todo!", "unimplemented!", "#[ignore", "#[allow(", "#![allow(", "#[should_panic"] {
        let mut found = Vec::new();
        for source in &files {
            let lines = source.text.lines().enumerate();
            found.extend(
                lines
                    .filter(|(_, line)| strip(line).contains(name))
                    .map(|(index, _)| format!("{}:{}", source.path, index + 1)),
            );
        }
        none(&format!("{name} does not belong here"), found);
    }
}

#[test]
fn the_top_level_stays_as_it_is() {
    let allowed = [".ci", ".github", "benches", "metal_kernels", "scripts", "src", "tests"];
    let mut folders: Vec<String> = tracked_files()
        .iter()
        .filter_map(|name| name.split_once('/').map(|(folder, _)| folder.to_owned()))
        .filter(|folder| !allowed.contains(&folder.as_str()))
        .collect();
    folders.dedup();
    none("a new top-level folder needs a reason and an entry here", folders);
    let is_source_or_documentation = |name: &&String| {
        let licences = ["LICENSE-APACHE", "LICENSE-MIT"];
        let ends = [".md", ".toml", ".lock", ".rs"];
        [".gitignore"].contains(&name.as_str())
            || licences.contains(&name.as_str())
            || ends.iter().any(|end| name.ends_with(end))
    };
    let odd =
        tracked_files().into_iter().filter(|name| !name.contains('/') && !is_source_or_documentation(&name));
    none("the root has source and documentation only", odd);
}

#[test]
fn no_file_knows_the_machine_it_was_written_on() {
    // Put together, so that this file does not contain what it looks for.
    let modules: Vec<String> = ["work", "root", "tmp"].iter().map(|name| format!("/{name}/")).collect();
    let text_files = [
        ".rs",
        ".md",
        ".toml",
        ".yml",
        ".yaml",
        ".py",
        ".metal",
        ".h",
        ".hpp",
        ".cpp",
        ".sh",
        ".ci/run",
        ".html",
        ".css",
        ".js",
        ".service",
        "/Dockerfile",
        ".static",
    ];
    let mut violations = Vec::new();
    for name in tracked_files() {
        if !text_files.iter().any(|end| name.ends_with(end)) {
            continue;
        }
        let text = fs::read_to_string(root().join(&name)).unwrap();
        for (index, line) in text.lines().enumerate() {
            for module in &modules {
                let from_root = |start: usize| {
                    !line[..start].ends_with(|c: char| c.is_alphanumeric() || "._-~>})".contains(c))
                };
                if line.match_indices(module.as_str()).any(|(start, _)| from_root(start)) {
                    violations.push(format!("{name}:{}: {module}", index + 1));
                }
            }
        }
    }
    none("files name no path of one machine", violations);
}

fn help(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_tinyvllm")).args(arguments).arg("--help").output().unwrap();
    assert!(output.status.success(), "{arguments:?} --help failed");
    String::from_utf8(output.stdout).unwrap()
}

/// The subcommands that the help names.
fn subcommands() -> Vec<String> {
    let help = help(&[]);
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names: Vec<String> = lines
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next().map(str::to_owned))
        .filter(|name| name != "help" && name.starts_with(|c: char| c.is_lowercase()))
        .collect();
    assert!(names.len() >= 5, "the help lists only {names:?}");
    names
}

/// Flags in a help text with nothing said about them, alongside or below.
fn unexplained_flags(help: &str) -> Vec<String> {
    let lines: Vec<&str> = help.lines().collect();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let flag = line.trim_start();
        // Deeper lines are explanations, which may begin with a flag as well.
        if !flag.starts_with('-') || indent(line) > 6 || indent(line) == 0 {
            continue;
        }
        let beside = flag.contains("  ");
        let below = lines.get(index + 1).is_some_and(|next| indent(next) > 6 && !next.trim().is_empty());
        if !beside && !below {
            found.push(flag.to_owned());
        }
    }
    found
}

#[test]
fn every_flag_is_explained_and_the_readme_shows_every_command() {
    let commands = subcommands();
    let mut pages = vec![(String::new(), help(&[]))];
    pages.extend(commands.iter().map(|name| (name.clone(), help(&[name]))));
    none(
        "the help says what each flag is for",
        pages.iter().flat_map(|(name, page)| {
            unexplained_flags(page).into_iter().map(move |flag| format!("{name}: {flag}"))
        }),
    );
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    none(
        "the README shows every command",
        commands.into_iter().filter(|name| !readme.contains(&format!("tinyvllm {name}"))),
    );
}

#[test]
fn the_checks_see_what_they_should() {
    let page =
        "Options:\n  -m, --model <MODEL>\n          Which\n\n      --quiet\n  -h, --help  Print help\n";
    assert_eq!(unexplained_flags(page), ["--quiet"]);
    assert_eq!(first_segments("{config::{A, b}, Error, ops}"), ["config", "Error", "ops"]);
    assert_eq!(first_segments("kv_cache::BlockId;"), ["kv_cache"]);
    assert_eq!(strip(r#"call("unsafe // {}"); // unsafe"#), r#"call(""); "#);
    assert!(contains_word("let x = unsafe { f() };", "unsafe"));
    assert!(!contains_word("unsafe_op()", "unsafe"));
    assert!(!contains_word("eprintln!()", "println!"));
    let text = "use crate::a;\n#[cfg(test)]\nmod tests {\n    use crate::b;\n}\n";
    let source = Source { path: "src/c/d.rs".to_owned(), text: text.to_owned(), code: code_of(text) };
    assert_eq!((source.module(), source.uses()), ("c", vec![(1, "a".to_owned())]));
    assert_eq!(long_cells(&format!("|a|\n| {} | b |\n{0}", "ä".repeat(MAX_CELL + 1))), [(2, MAX_CELL + 1)]);
    let text = "# A *b*, c-d\n[x](y.md#z) and [a](https://b)\n```\n# no\n[x](no)\n```\n![i](j.png)\n";
    assert_eq!(links(text), [(2, "y.md#z".to_owned()), (7, "j.png".to_owned())]);
    assert_eq!(anchors(text), ["a-b-c-d"]);
    let found: Vec<String> =
        flags("`--top-p 1`, a--b, --x=1 [--no-y]\n|---|\n-- z").into_iter().map(|(_, f)| f).collect();
    assert_eq!(found, ["--top-p", "--x", "--no-y"]);
}
