//! Defects of kernels: a fragment of a source and its replacement.
//!
//! All defects of a library are compiled into one object, each behind a condition, and a launch selects the active one.

use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use tinyvllm::ops::gpu::{CUDA_LIBRARIES, ChipClass, LIBRARIES, Library};
use tinyvllm::self_test::Family;

use super::{Emulator, Variant};

/// The tables, by family. `== file` begins the defects of a file; substrings of the names of checks that are likely to
/// notice them may follow a colon, and those checks come first. A defect is a line that describes it, lines with `- ` and
/// the file's text, and lines with `+ ` and the replacement: an expression, or statements, which end with `;` or `}` and
/// may be replaced with nothing. If there are backticks in the text, only the text between them is replaced, and the rest
/// makes it unique.
pub(super) const TABLES: [(Family, &str); 6] = [
    (Family::Matmul, include_str!("matmul.txt")),
    (Family::Rows, include_str!("rows.txt")),
    (Family::Attention, include_str!("attention.txt")),
    (Family::Latent, include_str!("latent.txt")),
    (Family::Experts, include_str!("experts.txt")),
    (Family::Sampling, include_str!("sampling.txt")),
];

/// The folders of kernels for all GPUs, and of those for NVIDIA's only.
pub(super) const METAL_FOLDER: &str = "metal_kernels";
pub(super) const CUDA_FOLDER: &str = "src/ops/gpu/device/cuda/kernels";

/// Marks the description of a defect that accesses foreign memory: the checked build finds it.
const OUT_OF_BOUNDS: &str = "(out of bounds)";

struct Defect {
    family: Family,
    file: &'static str,
    likely: Vec<&'static str>,
    what: &'static str,
    /// The original text, which the file has once.
    text: String,
    /// The part of it that is replaced.
    part: Range<usize>,
    replacement: String,
}

/// All defects, and the libraries with them.
pub(super) struct Planted {
    defects: Vec<Defect>,
    texts: Vec<String>,
}

impl Planted {
    /// None where there is no emulator.
    ///
    /// # Panics
    /// If a table is invalid, or if the file does not have a text exactly once.
    pub(super) fn new(tables: &[(Family, &'static str)]) -> Option<Self> {
        Emulator::new(Variant::Fast)?;
        let defects: Vec<Defect> = tables.iter().flat_map(|(family, table)| parse(*family, table)).collect();
        let mut texts: Vec<String> = libraries().map(Library::text).collect();
        for file in files(&defects) {
            let folder = if is_for_nvidia(file) { CUDA_FOLDER } else { METAL_FOLDER };
            let source = fs::read_to_string(in_project(folder).join(file)).unwrap();
            // Headers come first, and the text of a library includes them unchanged.
            let begin = source.rfind("#include").unwrap_or(0);
            let body = &source[begin + source[begin..].find('\n').unwrap()..];
            let with_defects = plant(body, file, &defects);
            let mut found = false;
            for text in &mut texts {
                found |= text.contains(body);
                *text = text.replace(body, &with_defects);
            }
            assert!(found, "{file} is not in any library as it is in its file");
        }
        Some(Self { defects, texts })
    }

    /// A device with all defects planted, of which one shows, or none.
    ///
    /// # Panics
    /// If the changed source does not compile, which would fail every check.
    pub(super) fn device(&self, defect: Option<usize>) -> Option<Emulator> {
        // Accesses outside a buffer would crash the tests.
        let leaves = defect.is_some_and(|defect| self.defects[defect].what.ends_with(OUT_OF_BOUNDS));
        let mut gpu = Emulator::new(if leaves { Variant::Checked } else { Variant::Fast })?;
        for (library, text) in libraries().zip(&self.texts) {
            gpu = gpu.with_text(library, text.clone());
        }
        let Some(defect) = defect else { return Some(gpu) };
        let is_for_nvidia = is_for_nvidia(self.defects[defect].file);
        if is_for_nvidia {
            gpu = gpu.with_class(ChipClass::Nvidia);
        }
        for (library, text) in libraries().zip(&self.texts) {
            // Headers are tested with the kernels for all GPUs.
            let is_tried = library.is_for_nvidia() == is_for_nvidia;
            if is_tried && text.contains(&format!("is_planted({defect})")) {
                gpu.kernels(library).unwrap();
            }
        }
        Some(gpu.with_defect(defect))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = usize> {
        0..self.defects.len()
    }

    pub(super) fn family(&self, defect: usize) -> Family {
        self.defects[defect].family
    }

    /// Substrings of the names of checks that are likely to notice it.
    pub(super) fn likely(&self, defect: usize) -> &[&'static str] {
        &self.defects[defect].likely
    }

    pub(super) fn files(&self) -> BTreeSet<&'static str> {
        files(&self.defects)
    }

    /// The table, the file and the description, which together are unique.
    pub(super) fn name(&self, defect: usize) -> String {
        let Defect { family, file, what, .. } = &self.defects[defect];
        format!("{}: {file}: {what}", format!("{family:?}").to_lowercase())
    }
}

fn libraries() -> impl Iterator<Item = &'static Library> {
    LIBRARIES.into_iter().chain(CUDA_LIBRARIES)
}

/// Whether only NVIDIA's GPUs run the file's kernels.
fn is_for_nvidia(file: &str) -> bool {
    in_project(CUDA_FOLDER).join(file).is_file()
}

fn files(defects: &[Defect]) -> BTreeSet<&'static str> {
    defects.iter().map(|defect| defect.file).collect()
}

pub(super) fn in_project(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)
}

fn parse(family: Family, table: &'static str) -> Vec<Defect> {
    let mut defects = Vec::new();
    let (mut file, mut likely) = ("", Vec::new());
    for block in table.split("\n\n").filter(|block| !block.trim().is_empty()) {
        let mut lines = block.trim_matches('\n').lines().peekable();
        if let Some(line) = lines.next_if(|line| line.starts_with("== ")) {
            let (name, parts) = line[3..].split_once(": ").unwrap_or((&line[3..], ""));
            file = name;
            likely = parts.split(", ").filter(|part| !part.is_empty()).collect();
        }
        let what = lines.next().unwrap_or_default();
        let (mut text, mut replacement) = (Vec::new(), Vec::new());
        for line in lines {
            match line.split_at_checked(2) {
                Some(("- ", line)) => text.push(line),
                Some(("+ ", line)) => replacement.push(line),
                None if line == "+" => {}
                _ => panic!(
                    "in the table of {file}, under {what:?}: {line:?} begins with neither `- ` nor `+ `"
                ),
            }
        }
        let (marked, replacement) = (text.join("\n"), replacement.join(" "));
        let text = marked.replace('`', "");
        let part = match marked.split('`').collect::<Vec<_>>()[..] {
            [_] => 0..text.len(),
            [before, part, _] => before.len()..before.len() + part.len(),
            _ => panic!("in the table of {file}, under {what:?}: a part is between two backticks"),
        };
        assert!(!part.is_empty(), "in the table of {file}: {what:?} changes nothing");
        let likely = likely.clone();
        defects.push(Defect { family, file, likely, what, text, part, replacement });
    }
    defects
}

/// Inserts all defects of `file` into its source: an expression becomes `(is_planted(7) ? (wrong) : (right))`,
/// statements become two branches. Defects may be nested.
fn plant(source: &str, file: &str, defects: &[Defect]) -> String {
    let mut insertions = Vec::new();
    for (number, defect) in defects.iter().enumerate().filter(|(_, defect)| defect.file == file) {
        let Defect { what, text, part, replacement, .. } = defect;
        let mut offsets = source.match_indices(text.as_str()).map(|(at, _)| at);
        let (Some(offset), None) = (offsets.next(), offsets.next()) else {
            let times = source.matches(text.as_str()).count();
            panic!("{file} has {times} times what {what:?} is to change, not once: {text}");
        };
        let (begin, end) = (offset + part.start, offset + part.end);
        let is_statement = text[part.clone()].ends_with([';', '}']);
        let (before, after) = if is_statement {
            (format!("if (is_planted({number})) {{ {replacement} }} else {{ "), " }".to_owned())
        } else {
            (format!("(is_planted({number}) ? ({replacement}) : ("), "))".to_owned())
        };
        // At one offset, ends come first, the inner one before the outer one; then starts, the outer one before the
        // inner one.
        insertions.push(((begin, 1, source.len() - part.len(), number), before));
        insertions.push(((end, 0, part.len(), defects.len() - number), after));
    }
    insertions.sort();
    let mut planted = String::new();
    let mut done = 0;
    for ((at, ..), text) in insertions {
        planted.push_str(&source[done..at]);
        planted.push_str(&text);
        done = at;
    }
    planted.push_str(&source[done..]);
    planted
}
