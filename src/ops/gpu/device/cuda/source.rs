//! Converts a library of kernels to a program for NVIDIA's run-time compiler with one of its kernels.
//!
//! The headers in `msl` are Metal's library in CUDA, with macros for keywords. Four changes that no header can make are
//! made here, line by line, so that the compiler's messages name lines of the `.metal` file: function constants get
//! their value, arrays in shared memory their keyword, loops this compiler's pragma, and attributes are removed. The
//! attributes that bind a kernel's parameters become a list for `msl/entry_cuda.hpp`.

use std::fmt::Write as _;

use crate::ops::gpu::device::{Constant, Library};
use crate::{Error, Result};

/// The headers by name.
pub(super) const HEADERS: [(&str, &str); 14] = [
    ("cuda.hpp", include_str!("../msl/cuda.hpp")),
    ("platform_cuda.hpp", include_str!("../msl/platform_cuda.hpp")),
    ("traits.hpp", include_str!("../msl/traits.hpp")),
    ("vectors.hpp", include_str!("../msl/vectors.hpp")),
    ("packed.hpp", include_str!("../msl/packed.hpp")),
    ("math.hpp", include_str!("../msl/math.hpp")),
    ("synchronisation.hpp", include_str!("../msl/synchronisation.hpp")),
    ("simdgroup_cuda.hpp", include_str!("../msl/simdgroup_cuda.hpp")),
    ("simdgroup_matrix.hpp", include_str!("../msl/simdgroup_matrix.hpp")),
    ("tensor_cores_cuda.hpp", include_str!("../msl/tensor_cores_cuda.hpp")),
    ("stages_cuda.hpp", include_str!("../msl/stages_cuda.hpp")),
    ("atomics_cuda.hpp", include_str!("../msl/atomics_cuda.hpp")),
    ("entry_cuda.hpp", include_str!("../msl/entry_cuda.hpp")),
    ("built_ins.hpp", include_str!("../msl/built_ins.hpp")),
];

/// Built-in values of a kernel, in the order of `msl/built_ins.hpp`.
const BUILT_INS: [&str; 12] = [
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "threads_per_grid",
    "threads_per_threadgroup",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "threads_per_simdgroup",
    "thread_execution_width",
];

/// Maximum threads of a thread block if a library does not give it: a thread may then have as many registers as on an
/// Apple GPU, 128.
const MAX_THREADS: usize = 512;

/// A kernel for the compiler.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Program {
    /// The source without the headers.
    pub(super) text: String,
    /// The name of the compiled kernel.
    pub(super) entry: String,
}

/// The kernel `function` of a library, for these function constants.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] with the line, if the library uses an unknown construct.
pub(super) fn program(library: &Library, function: &str, constants: &[Constant]) -> Result<Program> {
    let source = library.text();
    let wrong =
        |what: &str, line: &str| Err(Error::internal(format!("{}: {what}: {}", library.file(), line.trim())));
    let kernels = kernels(&source).map_err(|what| Error::internal(format!("{}: {what}", library.file())))?;
    let max_threads = library.max_threads().unwrap_or(MAX_THREADS);
    let bounds = library.min_threadgroups().map_or_else(
        || max_threads.to_string(),
        |min_threadgroups| format!("{max_threads}, {min_threadgroups}"),
    );
    let mut text = format!("#define MSL_WANTED_{function} 0, 1\n#define MSL_BOUNDS {bounds}\n");
    let waits_itself = library.is_for_nvidia();
    _ = writeln!(text, "#define MSL_WAITS_ITSELF {waits_itself}");
    let cluster = source.lines().find(|line| line.starts_with("constant ushort CLUSTER "));
    let cluster = cluster.and_then(|line| value_of(line, constants)).unwrap_or_else(|| "0".to_owned());
    _ = writeln!(text, "#define MSL_CLUSTER {cluster}");
    if source.contains("simdgroup_matrix") {
        text.push_str("#define MSL_MATRICES\n");
    }
    text.push_str("#include \"cuda.hpp\"\n");
    for kernel in &kernels {
        _ = writeln!(text, "#define MSL_PARAMETERS_{} {}", kernel.name, kernel.parameters);
    }
    text.push_str("namespace metal {\n");
    for line in source.lines() {
        let start = line.trim_start();
        if start.starts_with("#include <metal_") {
            // The headers are included already.
        } else if let Some(pragma) = start.strip_prefix("#pragma clang loop ") {
            match unrolling(pragma) {
                Some(unrolling) => text.push_str(&unrolling),
                None => return wrong("an unknown pragma", line),
            }
        } else if start.starts_with("constant ") && line.contains("[[function_constant(") {
            match function_constant(start, constants) {
                Some(constant) => text.push_str(&constant),
                None => return wrong("a function constant without a number", line),
            }
        } else {
            let line = match start.strip_prefix("threadgroup ") {
                Some(rest) if is_array(rest) => line.replacen("threadgroup ", "__shared__ ", 1),
                _ => line.to_owned(),
            };
            match without_attributes(&line) {
                Some(line) => text.push_str(&line),
                None => return wrong("an attribute without end", &line),
            }
        }
        text.push('\n');
    }
    for kernel in kernels.iter().filter(|kernel| !kernel.is_template) {
        _ = writeln!(text, "MSL_PLAIN({})", kernel.name);
    }
    text.push_str("}\n");
    Ok(Program { text, entry: format!("msl_{function}") })
}

/// A kernel of a library.
#[derive(Debug)]
struct Kernel {
    name: String,
    is_template: bool,
    /// `{kind, index}` for each, with the numbers of `msl/built_ins.hpp`.
    parameters: String,
}

/// The kernels of a source: `[[kernel]] void name(…) {`, where an attribute binds each parameter.
fn kernels(source: &str) -> Result<Vec<Kernel>, String> {
    const HEAD: &str = "\n[[kernel]] void ";
    let mut kernels = Vec::new();
    for (start, _) in source.match_indices(HEAD) {
        let rest = &source[start + HEAD.len()..];
        let end = rest.find(") {").ok_or("a kernel without body")?;
        let (name, list) = rest[..end].split_once('(').ok_or("a kernel without parameters")?;
        let mut parameters = String::new();
        for attribute in list.split("[[").skip(1) {
            let attribute = attribute.split("]]").next().unwrap_or_default();
            let (what, index) = attribute.split_once('(').unwrap_or((attribute, ""));
            let index = index.trim_end_matches(')');
            let unknown = || format!("{name} has a parameter with an unknown attribute: {attribute}");
            let bound =
                |kind: usize| index.parse::<usize>().map(|index| (kind, index)).map_err(|_| unknown());
            let (kind, index) = match what {
                "buffer" => bound(0)?,
                "threadgroup" => bound(1)?,
                _ => (2, BUILT_INS.iter().position(|name| *name == what).ok_or_else(unknown)?),
            };
            _ = write!(parameters, "{{{kind}, {index}}}, ");
        }
        let before = source[..start].lines().next_back().unwrap_or_default();
        kernels.push(Kernel {
            name: name.to_owned(),
            is_template: before.starts_with("template <"),
            parameters,
        });
    }
    Ok(kernels)
}

/// `unroll(full)` and its variants as a pragma of this compiler.
fn unrolling(pragma: &str) -> Option<String> {
    let (how, number) = pragma.trim_end().strip_suffix(')')?.split_once('(')?;
    match (how, number) {
        ("unroll", "full") => Some("#pragma unroll".to_owned()),
        ("unroll", "disable") => Some("#pragma unroll 1".to_owned()),
        ("unroll_count", _) => Some(format!("#pragma unroll {number}")),
        _ => None,
    }
}

/// `constant kind name [[function_constant(index)]];` with its value. Constants that the host does not set are unused
/// by the kernel: those are zero.
fn function_constant(line: &str, constants: &[Constant]) -> Option<String> {
    let (declared, _) = line.split_once("[[function_constant(")?;
    let value = value_of(line, constants)?;
    Some(format!("{}= {value};", declared.replacen("constant ", "constexpr ", 1)))
}

/// The value of the constant that a line declares.
fn value_of(line: &str, constants: &[Constant]) -> Option<String> {
    let (_, rest) = line.split_once("[[function_constant(")?;
    let index: u32 = rest.split_once(')')?.0.parse().ok()?;
    let value = constants.iter().find_map(|constant| match *constant {
        Constant::Bool(at, value) => (at == index).then(|| value.to_string()),
        Constant::U16(at, value) => (at == index).then(|| value.to_string()),
    });
    Some(value.unwrap_or_else(|| "0".to_owned()))
}

/// Whether `threadgroup` declares memory, and not a pointer or a reference to it: `type name[…];` follows.
fn is_array(rest: &str) -> bool {
    let head = rest.split(['[', ';', '=', '(']).next().unwrap_or_default();
    rest[head.len()..].starts_with('[') && !head.contains(['*', '&'])
}

/// A line without its attributes; none if an attribute continues on the next line.
fn without_attributes(line: &str) -> Option<String> {
    let mut parts = line.split("[[");
    let mut text = parts.next()?.to_owned();
    for part in parts {
        text.truncate(text.trim_end().len());
        text.push_str(part.split_once("]]")?.1);
    }
    Some(text)
}
