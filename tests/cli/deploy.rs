//! The files for operators in `scripts/deploy`: the program takes the flags that they give it.

use std::collections::BTreeMap;
use std::path::Path;

use crate::program::tinyvllm;

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/deploy").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// What stands behind `tinyvllm serve` in each file.
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
    let manifest = read("kubernetes.yaml");
    let flags = manifest.lines().filter_map(|line| line.trim().strip_prefix("- --"));
    found.insert("kubernetes.yaml", flags.map(|flag| format!("--{flag}")).collect());
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
    let manifest = read("kubernetes.yaml");
    let ends = seconds(&manifest, "sleep: {seconds: ") + seconds(&manifest, "--shutdown-timeout=");
    assert!(seconds(&manifest, "terminationGracePeriodSeconds: ") > ends);
}
