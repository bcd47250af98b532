//! The compiler's messages about a kernel, for tests on machines without a GPU.

use super::nvrtc::Nvrtc;
use super::pipelines::OPTIONS;
use super::source::{HEADERS, program};
use crate::Result;
use crate::ops::gpu::device::{Constant, Library};

/// Compiles a kernel for GPUs of an architecture, such as 90. Returns the compiler's messages about it: the registers
/// of a thread, and the bytes of spills and of its stack. Needs the compiler, but neither driver nor GPU.
///
/// # Errors
/// [`crate::ErrorKind::Unsupported`] with what to install if this machine has no compiler;
/// [`crate::ErrorKind::Internal`] with its messages if the kernel does not compile.
pub fn compile_messages(
    library: &Library,
    function: &str,
    constants: &[Constant],
    architecture: i32,
) -> Result<String> {
    let compiler = Nvrtc::load()?;
    let program = program(library, function, constants)?;
    let name = format!("{function} of {}", library.file());
    let options = [&OPTIONS[..], &["--ptxas-options=-v"]].concat();
    let compiled =
        compiler.compile(&name, &program.text, &HEADERS, compiler.target(architecture), &options)?;
    Ok(compiled.messages)
}
