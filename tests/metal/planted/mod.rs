//! Defects that are planted on purpose, in kernels and in launches. The checks of their family have to notice each.
//!
//! A check that has never failed says little. Here each of them has something to find: what a slip of the pen would
//! be, a bound that is one off, a term that is left out, the wrong one of two strides. Whoever changes a kernel sees
//! in these tables whether the checks still look where it matters: a defect whose text is no longer in its file is
//! an error, and so is one that nothing notices.

mod kernels;
mod launches;
mod lines;

use std::collections::HashMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use tinyvllm::ops::Context;
use tinyvllm::ops::gpu::{ChipClass, Gpu};
use tinyvllm::self_test::{Check, Effort, Family, Report};

use crate::emulator::{Emulator, Timing, Variant};

use kernels::{CUDA_FOLDER, METAL_FOLDER, Planted, TABLES, in_project};
use launches::Altered;
use lines::{LINES, Lines};

/// How many of the checks that have noticed wrong launches are tried first on the next one.
const NUM_NOTICING: usize = 8;

/// Looks for a check that finds something wrong with a device, and ends the checks there.
struct Search<'a> {
    wants: &'a dyn Fn(&str) -> bool,
    /// The check that is done.
    current: String,
    failure: Option<String>,
}

impl Report for Search<'_> {
    fn wants(&mut self, name: &str) -> bool {
        let wants = (self.wants)(name);
        if wants {
            name.clone_into(&mut self.current);
        }
        wants
    }

    fn hear(&mut self, check: Check) {
        if !check.passed {
            self.failure = Some(format!("{}: {}", check.name, check.detail));
            self.current = check.name;
            // Unlike a panic, this says nothing.
            resume_unwind(Box::new("noticed"));
        }
    }
}

/// The first of the wanted checks of a family that finds something wrong with a device: its name, and what it says.
fn first_failure(
    gpu: Arc<dyn Gpu>,
    family: Family,
    wants: &dyn Fn(&str) -> bool,
) -> Option<(String, String)> {
    let mut search = Search { wants, current: String::new(), failure: None };
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        family.check(&Context::gpu(gpu), Effort::Small, &mut search);
    }));
    let failure = outcome.err().map(|_| search.failure.unwrap_or_else(|| "a panic".to_owned()));
    failure.map(|failure| (search.current, failure))
}

/// What the first check says that notices a defect, and its name: on either of two devices, one that allows much, and one of
/// few threads, which gets its launches in pieces. Those that are likely to notice it come before the others.
fn noticed(
    gpu: impl Fn() -> Option<Emulator>,
    device: impl Fn(Emulator) -> Arc<dyn Gpu>,
    family: Family,
    is_likely: Option<&dyn Fn(&str) -> bool>,
) -> Option<(String, String)> {
    let on_both = |wants: &dyn Fn(&str) -> bool| {
        first_failure(device(gpu()?), family, wants)
            .or_else(|| first_failure(device(small(gpu()?, family)), family, wants))
    };
    match is_likely {
        None => on_both(&|_| true),
        Some(is_likely) => on_both(is_likely).or_else(|| on_both(&|name| !is_likely(name))),
    }
}

/// The second of them, with as few threads as each kernel of its class is content with; for experts it has more cores, which
/// share the tiles of all groups, and for products one, for which a matrix has tiles enough.
pub(crate) fn small(gpu: Emulator, family: Family) -> Emulator {
    let max_threads = if gpu.class() == ChipClass::Nvidia { 512 } else { 384 };
    let gpu = gpu.with_max_threads(max_threads).with_patience(Duration::from_nanos(1));
    match family {
        Family::Experts => gpu.with_num_cores(12),
        Family::Products => gpu.with_num_cores(1),
        _ => gpu,
    }
}

/// Fails with the names of those that are noticed by nothing.
fn assert_all_noticed(defects: impl Iterator<Item = (String, Option<(String, String)>)>) {
    let mut survivors = Vec::new();
    for (name, failure) in defects {
        if failure.is_none() {
            survivors.push(name);
        }
    }
    assert!(survivors.is_empty(), "no check notices:\n{}", survivors.join("\n"));
}

fn every_defect_is_noticed(planted: &Planted, family: Family) {
    assert_all_noticed(planted.of_family(family).map(|defect| {
        let gpu = || planted.device(Some(defect));
        let likely = planted.likely(defect);
        let is_likely = |name: &str| likely.iter().any(|part| name.contains(part));
        let is_likely: Option<&dyn Fn(&str) -> bool> =
            if likely.is_empty() { None } else { Some(&is_likely) };
        (planted.name(defect), noticed(gpu, |gpu| Arc::new(gpu), family, is_likely))
    }));
}

fn check(family: Family) {
    if let Some(planted) = Planted::new(&TABLES) {
        every_defect_is_noticed(&planted, family);
    }
}

#[test]
fn products() {
    check(Family::Products);
}

#[test]
fn rows() {
    check(Family::Rows);
}

#[test]
fn attention() {
    check(Family::Attention);
}

#[test]
fn latent() {
    check(Family::Latent);
}

#[test]
fn experts() {
    check(Family::Experts);
}

#[test]
fn sampling() {
    check(Family::Sampling);
}

#[test]
fn launches() {
    if Emulator::new(Variant::Checked).is_none() {
        return;
    }
    let defects = LINES.iter().flat_map(|lines| lines.defects.iter().map(move |defect| (lines, defect)));
    // What notices one often notices its neighbours too.
    let mut noticing = HashMap::<Family, Vec<String>>::new();
    assert_all_noticed(defects.map(|(Lines { file, family, kernels, .. }, (text, what, change))| {
        let source = fs::read_to_string(in_project("src/ops/gpu").join(file)).unwrap();
        let times = source.matches(text).count();
        assert_eq!(times, 1, "{file} has {times} times what {what:?} is about, not once: {text}");
        // Whatever leaves its memory is found there, and work that nobody waits for is not done.
        let gpu = || Some(Emulator::new(Variant::Checked)?.with_timing(Timing::Late));
        let device = |gpu| Arc::new(Altered::new(gpu, kernels, *change)) as Arc<dyn Gpu>;
        let known = noticing.entry(*family).or_default();
        let failure = noticed(gpu, device, *family, Some(&|name| known.iter().any(|known| known == name)));
        if let Some((name, _)) = &failure {
            known.retain(|known| known != name);
            known.push(name.clone());
            known.drain(..known.len().saturating_sub(NUM_NOTICING));
        }
        (format!("{file}: {what} ({text})"), failure)
    }));
}

#[test]
fn without_a_defect_all_is_right() {
    let Some(planted) = Planted::new(&TABLES) else { return };
    for family in Family::ALL {
        assert_eq!(noticed(|| planted.device(None), |gpu| Arc::new(gpu), family, None), None);
    }
}

#[test]
fn every_source_of_kernels_has_defects() {
    let Some(planted) = Planted::new(&TABLES) else { return };
    for folder in [METAL_FOLDER, CUDA_FOLDER] {
        for entry in fs::read_dir(in_project(folder)).unwrap() {
            let file = entry.unwrap().file_name().into_string().unwrap();
            // What the probes find is tried in their own tests.
            assert!(file == "probe.metal" || planted.files().contains(&*file), "{file} has none");
        }
    }
}

/// What the panic says that `run` ends with.
fn panic_of(run: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
    payload.downcast_ref::<String>().unwrap().clone()
}

#[test]
fn a_defect_that_is_not_noticed_or_not_there_is_an_error() {
    if Emulator::new(Variant::Fast).is_none() {
        return;
    }
    let with = |lines: &'static str| Planted::new(&[(Family::Rows, lines)]).unwrap();
    let none = "== rows.metal\nno defect\n- i < a.num_rows\n+ a.num_rows > i\n";
    let message = panic_of(|| every_defect_is_noticed(&with(none), Family::Rows));
    assert!(message.contains("no check notices:\nrows.metal: no defect"), "{message}");
    let one = "== rows.metal\none\n- `i` < a.num_rows\n+ 2 * i\n\nall of it\n- i < a.num_rows\n+ i + 1 < a.num_rows\n";
    every_defect_is_noticed(&with(one), Family::Rows);
    let broken = "== rows.metal\nbroken\n- i < a.num_rows\n+ no_such_name\n";
    let message = panic_of(|| every_defect_is_noticed(&with(broken), Family::Rows));
    assert!(message.contains("no_such_name"), "{message}");
    for (text, times) in [("i < a.num_columns", 0), ("index * LANES + lane", 3)] {
        let lines = format!("== rows.metal\nelsewhere\n- {text}\n+ 0\n");
        let message = panic_of(|| drop(with(lines.leak())));
        assert!(message.contains(&format!("rows.metal has {times} times what \"elsewhere\"")), "{message}");
    }
}
