//! Which check noticed each defect the last time, so that it alone is done for it the next time.
//!
//! The file lists checks to try first, and proves nothing: a defect is noticed if a check fails now. If the listed
//! check does not fail, all are searched as if the file were empty, and the output reports that its line is stale.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tinyvllm::self_test::Family;

use super::search::{Device, confirms, search};
use crate::proved::{PROVE, SEARCH, say};

/// From the top of the project.
const FILE: &str = "tests/metal/planted/noticed.txt";

const HEADER: &str = "\
# defect -> device: the check that noticed it last, which is tried first
# written by the tests themselves: TINYVLLM_PROVE=1 cargo test --test metal planted
";

/// Where a defect shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Notice {
    /// One of several devices.
    pub(crate) device: String,
    /// The name of the check.
    pub(crate) check: String,
}

/// A defect, and where it may show.
pub(crate) struct Wanted<'a> {
    /// Only those of the defect's section, the text before the first colon.
    pub(crate) name: String,
    pub(crate) family: Family,
    pub(crate) devices: Vec<Device<'a>>,
    /// Substrings of the names of checks that are searched before the others. Checks that noticed other defects are not
    /// among them: a defect may make a check access foreign memory, which only the checked build reports.
    pub(crate) likely: Vec<String>,
}

/// The lines of the file.
pub(crate) struct Noticed {
    path: Option<PathBuf>,
    /// Whether stale or missing lines are reported.
    says: bool,
    lines: Mutex<BTreeMap<String, Notice>>,
}

/// Those of the project.
pub(crate) static NOTICED: LazyLock<Noticed> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(FILE);
    let is_set = |variable| std::env::var_os(variable).is_some();
    let text = if is_set(SEARCH) { String::new() } else { fs::read_to_string(&path).unwrap_or_default() };
    Noticed {
        path: (is_set(PROVE) && !is_set(SEARCH)).then_some(path),
        says: !is_set(SEARCH),
        lines: Mutex::new(parse(&text)),
    }
});

impl Noticed {
    /// Lines that are in no file.
    pub(super) fn new(text: &str) -> Self {
        Self { path: None, says: false, lines: Mutex::new(parse(text)) }
    }

    /// Whether any check notices a defect; reports a stale line.
    pub(crate) fn is_noticed(&self, wanted: &Wanted<'_>) -> bool {
        let Wanted { name, family, devices, likely } = wanted;
        let known = self.lines().get(name).cloned();
        if known.as_ref().is_some_and(|known| confirms(devices, *family, known)) {
            return true;
        }
        let begin = Instant::now();
        let is_likely = |check: &str| likely.iter().any(|part| check.contains(part.as_str()));
        let is_likely: Option<&dyn Fn(&str) -> bool> =
            if likely.is_empty() { None } else { Some(&is_likely) };
        let found = search(devices, *family, is_likely);
        let line = match &found {
            Some((notice, _)) => line(name, notice),
            None => return false,
        };
        if self.says {
            let what = if known.is_some() { "a stale line" } else { "no line" };
            let took = begin.elapsed();
            say(&format!(
                "{FILE} has {what} for a defect; a search took {took:.0?}; {PROVE}=1 writes: {line}"
            ));
        }
        if let Some((notice, _)) = found {
            self.lines().insert(name.clone(), notice);
            self.write();
        }
        true
    }

    /// Fails if there is a line for a defect that is none of these, unless lines are written, which drops it.
    pub(super) fn assert_no_others(&self, names: &BTreeSet<String>) {
        let others: Vec<String> =
            self.lines().keys().filter(|name| !names.contains(*name)).cloned().collect();
        if self.path.is_some() {
            self.lines().retain(|name, _| names.contains(name));
            self.write();
        } else {
            assert!(
                others.is_empty(),
                "{FILE} has lines for no defect; {PROVE}=1 drops:\n{}",
                others.join("\n")
            );
        }
    }

    /// The checks that notice others whose names begin like this.
    pub(super) fn checks(&self, begin: &str) -> Vec<String> {
        let lines = self.lines();
        let own = lines.iter().filter(|(name, _)| name.starts_with(begin));
        own.map(|(_, notice)| &notice.check).collect::<BTreeSet<_>>().into_iter().cloned().collect()
    }

    fn lines(&self) -> MutexGuard<'_, BTreeMap<String, Notice>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) {
        let Some(path) = &self.path else { return };
        let lines = self.lines();
        let mut text = HEADER.to_owned();
        for (name, notice) in &*lines {
            _ = writeln!(text, "{}", line(name, notice));
        }
        fs::write(path, text).unwrap();
    }
}

fn line(name: &str, Notice { device, check }: &Notice) -> String {
    format!("{name} -> {device}: {check}")
}

/// # Panics
/// If a line is not `name -> device: check`, or two have the same name.
fn parse(text: &str) -> BTreeMap<String, Notice> {
    let mut lines = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let parts = line.split_once(" -> ").and_then(|(name, rest)| Some((name, rest.split_once(": ")?)));
        let Some((name, (device, check))) = parts else { panic!("{FILE}: `{line}` is no line of it") };
        let notice = Notice { device: device.to_owned(), check: check.to_owned() };
        assert!(lines.insert(name.to_owned(), notice).is_none(), "{FILE}: two lines for {name}");
    }
    lines
}
