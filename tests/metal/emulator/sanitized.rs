//! Tests once more in a process with clang's address and undefined-behaviour sanitizers.
//!
//! The sanitizers replace the allocator, so they have to be in a process from its start: it is this test
//! program again, with the run time loaded before it.

use std::env;
use std::process::Command;

use super::Compiler;

/// Set in the process with the sanitizers.
const VARIABLE: &str = "TINYVLLM_EMULATOR_SANITIZED";

/// Whether this is the process with the sanitizers.
pub(crate) fn is_sanitized() -> bool {
    env::var_os(VARIABLE).is_some()
}

/// Runs the tests with `filter` in their names again.
///
/// # Errors
/// The output, if a test fails or a sanitizer ends the process.
pub(crate) fn run_again(filter: &str) -> Result<String, String> {
    let compiler = Compiler::find().ok_or("there is no compiler")?;
    let run_time = compiler.sanitizer()?;
    let program = env::current_exe().map_err(|error| error.to_string())?;
    // Stacks of fibres that are left behind are no leaks.
    let options = "detect_leaks=0:detect_stack_use_after_return=0:handle_segv=1:exitcode=99";
    let output = Command::new(program)
        .args([filter, "--nocapture", "--test-threads=2"])
        .env(VARIABLE, "1")
        .env("LD_PRELOAD", run_time)
        .env("ASAN_OPTIONS", options)
        .env("UBSAN_OPTIONS", "print_stacktrace=0")
        .output()
        .map_err(|error| error.to_string())?;
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() { Ok(text) } else { Err(text) }
}
