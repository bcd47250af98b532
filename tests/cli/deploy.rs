//! The files for operators in `scripts/deploy`: the program takes the flags that they give it.

use std::collections::BTreeMap;
use std::path::Path;

use crate::program::tinyvllm;

fn read(name: &str) -> String {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/deploy")).join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// What stands after `tinyvllm serve` in each file.
fn arguments() -> BTreeMap<&'static str, Vec<String>> {
    let mut found = BTreeMap::new();
    for name in ["Dockerfile", "Dockerfile.static", "Dockerfile.cuda"] {
        let text = read(name);
        let line = text.lines().find_map(|line| line.strip_prefix("ENTRYPOINT ")).unwrap();
        let words: Vec<String> = serde_json::from_str(line).unwrap();
        assert_eq!(words[1], "serve");
        found.insert(name, words[2..].to_vec());
    }
    let unit = read("tinyvllm.service");
    let line =
        unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/local/bin/tinyvllm serve ")).unwrap();
    found.insert("tinyvllm.service", line.split(' ').map(str::to_owned).collect());
    for name in ["compose.yaml", "kubernetes.yaml", "kubernetes-fleet.yaml"] {
        let text = read(name);
        // The router has a list of its own.
        let items = text.lines().map(str::trim).skip_while(|line| !line.starts_with("- --model="));
        found.insert(name, items.map_while(|line| line.strip_prefix("- ")).map(str::to_owned).collect());
    }
    found
}

#[test]
fn the_program_takes_what_the_files_for_operators_give_it() {
    for (name, arguments) in arguments() {
        assert!(arguments.len() >= 2, "{name}: {arguments:?}");
        // Arguments are read from the left: a wrong one is an error before the help is reached.
        let help = tinyvllm("serve").args(&arguments).args(["--help"]).run().success();
        assert!(help.contains("Usage:"), "{name}");
        let wrong = tinyvllm("serve").args(&arguments).args(["--not-a-flag", "--help"]).run();
        wrong.error(2, &["--not-a-flag"]);
    }
    let help = tinyvllm("serve --help").run().success();
    for text in [read("tinyvllm.service"), read("README.md")] {
        let names = text.split(|c: char| !c.is_ascii_uppercase() && c != '_');
        for name in names.filter_map(|word| word.strip_prefix("TINYVLLM_")) {
            let flag = format!("--{}", name.to_lowercase().replace('_', "-"));
            assert!(help.contains(&flag), "TINYVLLM_{name}");
        }
        for word in text.split(['`', ' ', '\n']).filter(|word| word.starts_with("--") && word.len() > 4) {
            let of_others =
                ["--gpus", "--read-only", "--tmpfs", "--rm", "--name", "--set", "--from-file", "--now"];
            let flag = word.split('=').next().unwrap().trim_end_matches([',', '.', ';', ')', ':']);
            assert!(help.contains(flag) || of_others.contains(&flag), "{flag}");
        }
    }
}

#[test]
fn there_is_time_to_end_answers() {
    let seconds = |text: &str, name: &str| -> u64 {
        let rest = text.split(name).nth(1).unwrap_or_else(|| panic!("no {name}"));
        rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
    };
    let unit = read("tinyvllm.service");
    assert!(seconds(&unit, "TimeoutStopSec=") > seconds(&unit, "--shutdown-timeout "));
    let compose = read("compose.yaml");
    assert!(seconds(&compose, "stop_grace_period: ") > seconds(&compose, "--shutdown-timeout="));
    for manifest in ["kubernetes.yaml", "kubernetes-fleet.yaml"].map(read) {
        let ends = seconds(&manifest, "sleep: {seconds: ") + seconds(&manifest, "--shutdown-timeout=");
        assert!(seconds(&manifest, "terminationGracePeriodSeconds: ") > ends);
    }
}

/// The release makes the archives under the names by which `cargo binstall` and the formula look for them.
#[cfg(unix)]
#[test]
fn a_release_has_the_names_that_installers_ask_for() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let text = |name: &str| std::fs::read_to_string(root.join(name)).unwrap();
    let workflow = text(".github/workflows/release.yml");
    for part in ["name=\"tinyvllm-$version-$TARGET\"", "\"dist/$name\"", "\"$name.tar.gz\""] {
        assert!(workflow.contains(part), "{part}");
    }
    let archive = "tinyvllm-{ version }-{ target }";
    let manifest = text("src/cli/Cargo.toml");
    for line in [
        format!("pkg-url = \"{{ repo }}/releases/download/v{{ version }}/{archive}.tar.gz\""),
        format!("bin-dir = \"{archive}/{{ bin }}{{ binary-ext }}\""),
    ] {
        assert!(manifest.contains(&line), "{line}");
    }
    let targets: Vec<_> = workflow
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- { target: ")?.split(',').next())
        .collect();
    assert_eq!(targets.len(), 3);

    let sums = tempfile::NamedTempFile::new().unwrap();
    let formula = |targets: &[&str]| {
        let lines = targets
            .iter()
            .zip(1..)
            .map(|(target, number)| format!("{number:064}  tinyvllm-1.2.3-{target}.tar.gz\n"));
        std::fs::write(sums.path(), lines.collect::<String>()).unwrap();
        let script = root.join("scripts/deploy/formula.sh");
        std::process::Command::new(script).arg("1.2.3").arg(sums.path()).output().unwrap()
    };
    let output = formula(&targets);
    assert!(output.status.success(), "{output:?}");
    let made = String::from_utf8(output.stdout).unwrap();
    for (target, number) in targets.iter().zip(1..) {
        let asked = format!("/tinyvllm/releases/download/v1.2.3/tinyvllm-1.2.3-{target}.tar.gz\"\n",);
        let (_, rest) = made.split_once(&asked).unwrap_or_else(|| panic!("{target} is not in {made}"));
        assert!(rest.trim_start().starts_with(&format!("sha256 \"{number:064}\"")), "{target}");
    }
    assert!(!made.contains('@'), "{made}");
    assert!(!formula(&targets[1..]).status.success(), "an archive without a sum");
}
