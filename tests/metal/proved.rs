//! Results of long tests, valid until a file changes that they depend on.
//!
//! `proved.txt` has a digest of these files for each such test. While the digest matches, only a part of the test runs,
//! another one each day, or the whole test on one day of several; otherwise, all of it runs. `TINYVLLM_PROVE` runs
//! everything and writes the file; `TINYVLLM_SEARCH_NOTICED`, which CI sets once a week, runs everything and ignores
//! the file.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::emulator::Compiler;

const FILE: &str = "tests/metal/proved.txt";
const HEADER: &str = "\
# test: digest of what it depended on when all of it was right
# written by the tests themselves: TINYVLLM_PROVE=1 cargo test --test metal
";

/// Set to run everything and to write the results afterwards.
pub(crate) const PROVE: &str = "TINYVLLM_PROVE";
/// Set to run everything and ignore the file.
pub(crate) const SEARCH: &str = "TINYVLLM_SEARCH_NOTICED";

/// Kernels, the code that launches and defines them, the checks, and the tests with their emulator.
const DEPENDED_ON: [&str; 4] = ["metal_kernels", "src/ops", "src/self_test", "tests/metal"];
/// Exceptions: code that runs on no GPU, and files that are made from the others.
const NOT_DEPENDED_ON: [&str; 3] = ["src/ops/cpu", FILE, "tests/metal/planted/noticed.txt"];

/// Tests that are done as a whole or not at all; each has its day.
const BY_DAY: [&str; 8] = [
    "ops::checked",
    "ops::on_tensor_cores",
    "ops::the_sanitizers_find_nothing",
    "ops::in_any_order_with_the_fewest_threads",
    "ops::on_smaller_tensor_cores",
    "ops::reversed_with_fast_math",
    "ops::on_tensor_cores_checked",
    "planted::without_a_defect_all_is_right",
];
const DAYS: u64 = BY_DAY.len() as u64;

struct Proved {
    digest: String,
    known: BTreeMap<String, String>,
    /// Tests that passed in this process.
    written: Mutex<BTreeMap<String, String>>,
    proves: bool,
    believes: bool,
}

static PROVED: LazyLock<Proved> = LazyLock::new(|| {
    let is_set = |variable| std::env::var_os(variable).is_some();
    let text = fs::read_to_string(in_project(FILE)).unwrap_or_default();
    let (proves, believes) = (is_set(PROVE) && !is_set(SEARCH), !is_set(PROVE) && !is_set(SEARCH));
    let known = parse(&text);
    let digest = digest();
    if believes && known.values().any(|proved_with| *proved_with != digest) {
        say(&format!(
            "{FILE} is of other kernels, checks or launch code, so all of them is tried; {PROVE}=1 writes it anew"
        ));
    }
    Proved { digest, written: Mutex::new(known.clone()), known, proves, believes }
});

impl Proved {
    fn is_known(&self, test: &str) -> bool {
        self.believes && self.known.get(test) == Some(&self.digest)
    }
}

/// Whether all of a test passed with the current files, so that a part of it suffices.
pub(crate) fn is_known(test: &str) -> bool {
    PROVED.is_known(test)
}

/// Whether an item of a test always runs today. Each has its turn.
pub(crate) fn is_of_today(item: &str) -> bool {
    is_of_day(item, today())
}

/// Notes that all of a test was right.
pub(crate) fn note(test: &str) {
    if !PROVED.proves || Compiler::find().is_none() {
        return;
    }
    let mut written = PROVED.written.lock().unwrap_or_else(PoisonError::into_inner);
    written.insert(test.to_owned(), PROVED.digest.clone());
    let mut text = HEADER.to_owned();
    for (test, digest) in &*written {
        _ = writeln!(text, "{test}: {digest}");
    }
    fs::write(in_project(FILE), text).unwrap();
}

/// Runs a test of [`BY_DAY`] on its day, and whenever its result is unknown.
#[track_caller]
pub(crate) fn on_its_day(test: &str, run: impl FnOnce()) {
    let day = BY_DAY.iter().position(|own| *own == test).expect("the test has a day");
    if is_known(test) && today() % DAYS != day as u64 {
        say(&format!("known: {test}; it has another day"));
        return;
    }
    run();
    note(test);
}

fn today() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()) / (24 * 60 * 60)
}

fn is_of_day(item: &str, day: u64) -> bool {
    xxh3_64(item.as_bytes()) % DAYS == day % DAYS
}

fn parse(text: &str) -> BTreeMap<String, String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let lines = lines
        .map(|line| line.rsplit_once(": ").unwrap_or_else(|| panic!("{FILE}: `{line}` is no line of it")));
    lines.map(|(test, digest)| (test.to_owned(), digest.to_owned())).collect()
}

/// Of the names and the contents of all files that outcomes depend on.
fn digest() -> String {
    let mut files = Vec::new();
    DEPENDED_ON.iter().for_each(|path| add_files(&in_project(path), &mut files));
    files.sort();
    let mut hash = Xxh3::new();
    for file in files {
        let content = fs::read(&file).unwrap();
        let name = file.strip_prefix(in_project("")).unwrap();
        hash.update(format!("{} {}\n", name.display(), content.len()).as_bytes());
        hash.update(&content);
    }
    format!("{:032x}", hash.digest128())
}

fn add_files(path: &Path, files: &mut Vec<PathBuf>) {
    if NOT_DEPENDED_ON.iter().any(|other| path == in_project(other)) {
        return;
    }
    if path.is_dir() {
        fs::read_dir(path).unwrap().for_each(|entry| add_files(&entry.unwrap().path(), files));
    } else {
        files.push(path.to_owned());
    }
}

fn in_project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Printed always, unlike the test harness's output, which it shows for failed tests only.
pub(crate) fn say(message: &str) {
    drop(writeln!(std::io::stderr(), "{message}"));
}

#[test]
fn each_item_is_of_one_day_of_several() {
    let items: Vec<String> = (0..800).map(|number| format!("matmul: matvec.metal: {number}")).collect();
    for day in 20_000..20_000 + DAYS {
        let count = items.iter().filter(|item| is_of_day(item, day)).count();
        assert!((60..140).contains(&count), "{count} on day {day}");
    }
    for item in &items {
        assert_eq!((0..DAYS).filter(|day| is_of_day(item, *day)).count(), 1, "{item}");
    }
}

#[test]
fn what_is_known_of_other_sources_is_nothing() {
    let proved = |proved_with: &str, believes: bool| Proved {
        digest: "now".to_owned(),
        known: parse(&format!("# a comment\nops::checked: {proved_with}\n")),
        written: Mutex::default(),
        proves: false,
        believes,
    };
    assert!(proved("now", true).is_known("ops::checked"));
    assert!(!proved("before", true).is_known("ops::checked"));
    assert!(!proved("now", false).is_known("ops::checked"));
    assert!(!proved("now", true).is_known("ops::fast"));
}

/// Every change to one of the files changes the digest.
#[test]
fn the_digest_is_of_kernels_launches_and_checks() {
    let mut files = Vec::new();
    DEPENDED_ON.iter().for_each(|path| add_files(&in_project(path), &mut files));
    for file in [
        "metal_kernels/codes.h",
        "src/ops/gpu/device/cuda/kernels/fragments.h",
        "src/ops/gpu/matmul/launch.rs",
        "src/self_test/latent.rs",
        "tests/metal/emulator/runtime/checks.hpp",
        "tests/metal/planted/matmul.txt",
    ] {
        assert!(files.contains(&in_project(file)), "{file}");
    }
    assert!(files.iter().all(|file| !file.starts_with(in_project("src/ops/cpu"))));
}
