//! Defects that are planted on purpose, in kernels and in launches. The checks of their family have to notice each.
//!
//! A check that has never failed proves little. These tables give each check something to find: typical slips, a bound
//! that is one off, a missing term, the wrong one of two strides. They show a reader who changes a kernel whether the
//! checks still cover it: a defect whose text is no longer in its file is an error, and so is one that no check
//! notices. `noticed.txt` has the check that noticed each defect last; `proved.rs` skips the search until something
//! changes that its result depends on.

mod kernels;
mod launches;
mod lines;
mod noticed;
mod search;

use std::collections::BTreeSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tinyvllm::ops::gpu::{ChipClass, Gpu};
use tinyvllm::self_test::Family;

use crate::emulator::{Emulator, Timing, Variant};
use crate::ops::barriers;
use crate::proved;

use kernels::{CUDA_FOLDER, METAL_FOLDER, Planted, TABLES, in_project};
use launches::Altered;
use lines::{LINES, Lines};
use noticed::{NOTICED, Noticed};
use search::search;

pub(crate) use noticed::Wanted;
pub(crate) use search::Device;

/// Devices that show defects: one that allows much, and one of few threads, whose launches are divided into chunks.
const LARGE: &str = "large";
const SMALL: &str = "small";

/// The second of these, with as few threads as each kernel of its class is content with; for experts it has more cores, which
/// share the tiles of all groups, and for matmuls one, for which a matrix has tiles enough.
pub(crate) fn small(gpu: Emulator, family: Family) -> Emulator {
    let max_threads = if gpu.class() == ChipClass::Nvidia { 512 } else { 384 };
    let gpu = gpu.with_max_threads(max_threads).with_dispatch_budget(Duration::from_nanos(1));
    match family {
        Family::Experts => gpu.with_num_cores(12),
        Family::Matmul => gpu.with_num_cores(1),
        _ => gpu,
    }
}

/// Fails with those that no check notices.
fn assert_noticed_by<'a>(noticed: &Noticed, defects: impl Iterator<Item = Wanted<'a>>) {
    let survivors: Vec<String> =
        defects.filter(|defect| !noticed.is_noticed(defect)).map(|defect| defect.name).collect();
    assert!(survivors.is_empty(), "no check notices:\n{}", survivors.join("\n"));
}

/// As [`assert_noticed_by`], with the project's own list of checks to try first. Tests all defects, or only today's if
/// all are known to be noticed.
fn assert_noticed<'a>(test: &str, defects: impl Iterator<Item = Wanted<'a>>) {
    if proved::is_known(test) {
        return assert_noticed_by(&NOTICED, defects.filter(|defect| proved::is_of_today(&defect.name)));
    }
    assert_noticed_by(&NOTICED, defects);
    proved::note(test);
}

impl Planted {
    /// A defect, on devices that have all planted and show this one.
    fn wanted(&self, defect: usize) -> Wanted<'_> {
        let family = self.family(defect);
        Wanted {
            name: self.name(defect),
            family,
            devices: vec![
                (LARGE, Box::new(move || Some(Arc::new(self.device(Some(defect))?)))),
                (SMALL, Box::new(move || Some(Arc::new(small(self.device(Some(defect))?, family))))),
            ],
            likely: self.likely(defect).iter().map(|&part| part.to_owned()).collect(),
        }
    }
}

/// With all tables.
static PLANTED: LazyLock<Option<Planted>> = LazyLock::new(|| Planted::new(&TABLES));

fn of_family(family: Family) -> impl Iterator<Item = Wanted<'static>> {
    let planted = PLANTED.as_ref();
    planted.into_iter().flat_map(move |planted| {
        let own = planted.all().filter(move |defect| planted.family(*defect) == family);
        own.map(|defect| planted.wanted(defect))
    })
}

/// Makes tests from parts of some defects, so that all processors have work.
macro_rules! tests_of_parts {
    ($($name:ident: $defects:expr, $($part:ident)+;)+) => {
        $(mod $name {
            use super::*;

            const PARTS: &[&str] = &[$(stringify!($part)),+];

            $(#[test]
            fn $part() {
                let part = PARTS.iter().position(|part| *part == stringify!($part)).unwrap();
                let test = concat!("planted::", stringify!($name), "::", stringify!($part));
                assert_noticed(test, $defects.skip(part).step_by(PARTS.len()));
            })+
        })+
    };
}

tests_of_parts! {
    matmul: of_family(Family::Matmul), part_1 part_2 part_3 part_4 part_5 part_6;
    rows: of_family(Family::Rows), all;
    attention: of_family(Family::Attention), part_1 part_2 part_3 part_4;
    latent: of_family(Family::Latent), part_1 part_2 part_3 part_4;
    experts: of_family(Family::Experts), part_1 part_2;
    sampling: of_family(Family::Sampling), part_1 part_2;
    launch_code: wrong_launches(), part_1 part_2 part_3 part_4;
    barriers: barriers(), all;
}

/// All defects of launches.
fn wrong_launches() -> impl Iterator<Item = Wanted<'static>> {
    let lines = Emulator::new(Variant::Checked).map(|_| &LINES).into_iter().flatten();
    let defects = lines.flat_map(|lines| lines.defects.iter().map(move |defect| (lines, defect)));
    defects.map(|(Lines { file, family, kernels, .. }, (text, what, change))| {
        // The checked build finds accesses outside buffers, and drops work that no caller waits for.
        let gpu = || Some(Emulator::new(Variant::Checked)?.with_timing(Timing::Late));
        let altered = |gpu| Arc::new(Altered::new(gpu, kernels, *change)) as Arc<dyn Gpu>;
        Wanted {
            // In one line.
            name: format!(
                "launches: {file}: {kernels}: {what} ({})",
                text.split_whitespace().collect::<Vec<_>>().join(" ")
            ),
            family: *family,
            devices: vec![
                (LARGE, Box::new(move || Some(altered(gpu()?)))),
                (SMALL, Box::new(move || Some(altered(small(gpu()?, *family))))),
            ],
            // A check that notices one defect often notices its neighbours too, and the checked build reports its
            // accesses.
            likely: NOTICED.checks(&format!("launches: {file}: {kernels}: ")),
        }
    })
}

#[test]
fn every_line_of_launches_is_in_its_file() {
    for Lines { file, defects, .. } in &LINES {
        let source = fs::read_to_string(in_project("src/ops/gpu").join(file)).unwrap();
        for (text, what, _) in *defects {
            let times = source.matches(text).count();
            assert_eq!(times, 1, "{file} has {times} times what {what:?} is about, not once: {text}");
        }
    }
}

#[test]
fn without_a_defect_all_is_right() {
    let Some(planted) = &*PLANTED else { return };
    proved::on_its_day("planted::without_a_defect_all_is_right", || {
        for family in Family::ALL {
            let devices: [Device<'_>; 2] = [
                (LARGE, Box::new(|| Some(Arc::new(planted.device(None)?)))),
                (SMALL, Box::new(|| Some(Arc::new(small(planted.device(None)?, family))))),
            ];
            assert_eq!(search(&devices, family, None), None);
        }
    });
}

#[test]
fn what_is_tried_first_is_of_defects_that_there_are() {
    let Some(planted) = &*PLANTED else { return };
    let mut names = BTreeSet::new();
    let kernels = planted.all().map(|defect| planted.wanted(defect).name);
    for name in kernels.chain(wrong_launches().chain(barriers()).map(|defect| defect.name)) {
        assert!(names.insert(name.clone()), "two defects are {name}");
    }
    NOTICED.assert_no_others(&names);
}

#[test]
fn every_source_of_kernels_has_defects() {
    let Some(planted) = &*PLANTED else { return };
    for folder in [METAL_FOLDER, CUDA_FOLDER] {
        for entry in fs::read_dir(in_project(folder)).unwrap() {
            let file = entry.unwrap().file_name().into_string().unwrap();
            // The probes have their own tests for these.
            assert!(file == "probe.metal" || planted.files().contains(&*file), "{file} has none");
        }
    }
}

/// The message of the panic that ends `run`.
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
    let check = |planted: Planted| {
        assert_noticed_by(&Noticed::new(""), planted.all().map(|defect| planted.wanted(defect)));
    };
    let message = panic_of(|| check(with(none)));
    assert!(message.contains("no check notices:\nrows: rows.metal: no defect"), "{message}");
    let one = "== rows.metal\none\n- `i` < a.num_rows\n+ 2 * i\n\nall of it\n- i < a.num_rows\n+ i + 1 < a.num_rows\n";
    check(with(one));
    let broken = "== rows.metal\nbroken\n- i < a.num_rows\n+ no_such_name\n";
    let message = panic_of(|| check(with(broken)));
    assert!(message.contains("no_such_name"), "{message}");
    for (text, times) in [("i < a.num_columns", 0), ("index * LANES + lane", 3)] {
        let lines = format!("== rows.metal\nelsewhere\n- {text}\n+ 0\n");
        let message = panic_of(|| drop(with(lines.leak())));
        assert!(message.contains(&format!("rows.metal has {times} times what \"elsewhere\"")), "{message}");
    }
}

/// The line only starts the search, and does not change its result.
#[test]
fn a_line_that_is_stale_is_replaced_by_what_notices_now() {
    let table = "== rows.metal\none\n- `i` < a.num_rows\n+ 2 * i\n";
    let Some(planted) = Planted::new(&[(Family::Rows, table)]) else { return };
    let after = |text: &str| {
        let noticed = Noticed::new(text);
        assert!(noticed.is_noticed(&planted.wanted(0)), "{text}");
        noticed.checks("rows: rows.metal: one")
    };
    let all = [
        "",
        "rows: rows.metal: one -> large: no such check",
        "rows: rows.metal: one -> none: gather_rows",
        "rows: rows.metal: one -> large: embed F32, rows of 48",
        "rows: rows.metal: one -> small: gather_rows",
    ];
    assert_eq!(all.map(after), all.map(|_| ["gather_rows"]));
}
