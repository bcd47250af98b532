//! Converts a preprocessed kernel source to one that clang compiles for this machine.
//!
//! It works on tokens, never moves code to another line and keeps the line markers, so that every message of a compiler
//! or a checker names the line of the `.metal` file. It supports the subset of the language that this project's kernels
//! use and reports unsupported constructs; types are left to the compiler. `rules` has prohibitions of the language
//! that no compiler here checks.

mod bodies;
mod declarations;
mod glue;
mod outline;
mod rules;
mod tokens;

mod tests;

use std::collections::{BTreeMap, BTreeSet};

/// The language of the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Mode {
    /// C++ for this machine, to be run.
    Run,
    /// The same with the pragmas that unroll loops, to be optimised, not run.
    Unrolled,
    /// OpenCL C++, whose address spaces are the language's: to be checked, not run.
    AddressSpaces,
}

/// A source for clang, and the declarations found in it.
#[derive(Debug)]
pub(crate) struct Rewritten {
    /// Source code; it includes `msl.hpp`.
    pub(crate) text: String,
    /// The barriers in the order of the source; the run time identifies each by its index here.
    pub(crate) barriers: Vec<Barrier>,
}

/// A call of `threadgroup_barrier` or `simdgroup_barrier`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Barrier {
    /// The call.
    pub(crate) call: String,
    /// The file with the call.
    pub(crate) file: String,
    /// Its line.
    pub(crate) line: usize,
}

/// Built-in values of a kernel. The number of a name is its index. Positions and sizes come first, then indices and
/// numbers of threads.
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
const NUM_POSITIONS: usize = 6;

/// `constant kind name [[function_constant(index)]];`
#[derive(Debug)]
struct FunctionConstant {
    index: u32,
    kind: String,
    name: String,
}

/// A kernel that the host can name.
#[derive(Debug)]
struct Instance {
    name: String,
    expression: String,
    kernel: String,
}

#[derive(Debug)]
struct Parameter {
    kind: ParameterKind,
    is_reference: bool,
}

#[derive(Debug, Clone, Copy)]
enum ParameterKind {
    Buffer(usize),
    Threadgroup(usize),
    BuiltIn(usize),
}

struct Rewriter {
    mode: Mode,
    kernels: BTreeMap<String, Vec<Parameter>>,
    instances: Vec<Instance>,
    constants: Vec<FunctionConstant>,
    /// Names of constants that depend on function constants.
    derived: BTreeSet<String>,
    barriers: Vec<Barrier>,
    /// In the kernel so far.
    num_threadgroup_variables: usize,
}

/// Rewrites a source without macros and includes, which has to keep the rules of the language if it is Metal's.
///
/// # Errors
/// The location, and the construct that the language forbids or that the rewriter does not support.
pub(crate) fn rewrite(source: &str, mode: Mode, is_metal: bool) -> Result<Rewritten, String> {
    let tokens = tokens::tokenize(source);
    let findings = if is_metal { rules::findings(&outline::Outline::of(&tokens)?) } else { Vec::new() };
    if !findings.is_empty() {
        return Err(findings.join("\n"));
    }
    let mut rewriter = Rewriter {
        mode,
        kernels: BTreeMap::new(),
        instances: Vec::new(),
        constants: Vec::new(),
        derived: BTreeSet::new(),
        barriers: Vec::new(),
        num_threadgroup_variables: 0,
    };
    let mut text = String::from("#include \"msl.hpp\"\n");
    for token in rewriter.all(&tokens)? {
        // Unrolling would only cost time.
        let is_pragma = token.kind == tokens::Kind::Directive && token.text.starts_with("#pragma");
        if !is_pragma || mode == Mode::Unrolled {
            text.push_str(&token.text);
        }
    }
    // The 3 marks code outside the kernels, for which the compiler suppresses warnings.
    text.push_str("\n# 1 \"generated\" 3\n");
    rewriter.glue(&mut text)?;
    Ok(Rewritten { text, barriers: rewriter.barriers })
}
