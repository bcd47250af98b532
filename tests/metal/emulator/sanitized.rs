//! Runs tests again in a process with clang's address and undefined-behaviour sanitizers.
//!
//! The sanitizers replace the allocator, so they have to be in a process from its start: it is this test
//! program again, with the run time loaded before it.

use std::env;
use std::path::Path;
use std::process::Command;

use super::Compiler;
use super::object::line;

/// Set in the process with the sanitizers.
const VARIABLE: &str = "TINYVLLM_EMULATOR_SANITIZED";

/// Whether this is the process with the sanitizers.
pub(crate) fn is_sanitized() -> bool {
    env::var_os(VARIABLE).is_some()
}

/// Runs the tests with `filter` in their names again; gives their output, as an error if a test fails or a
/// sanitizer ends the process. None, with a message, if this is that process or there are no sanitizers.
pub(crate) fn run_again(filter: &str) -> Option<Result<String, String>> {
    if is_sanitized() {
        return None;
    }
    let Some(run_time) = Compiler::find().and_then(Compiler::sanitizer) else {
        super::skip("clang 19 with its sanitizers is not installed: they do not see the Metal kernels");
        return None;
    };
    // Abandoned stacks of fibres are not leaks. The sanitizer would start a program to find lines, and an
    // `llvm-symbolizer` of another version finds none, so lines are found here.
    let options = "detect_leaks=0:detect_stack_use_after_return=0:handle_segv=1:exitcode=99:symbolize=0";
    let command = env::current_exe().map(|program| {
        Command::new(program)
            .args([filter, "--nocapture", "--test-threads=2"])
            .env(VARIABLE, "1")
            .env("LD_PRELOAD", run_time)
            .env("ASAN_OPTIONS", options)
            .output()
    });
    let output = match command.and_then(|output| output) {
        Ok(output) => output,
        Err(error) => return Some(Err(error.to_string())),
    };
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let text = with_lines(&format!("{out}{err}"));
    Some(if output.status.success() { Ok(text) } else { Err(text) })
}

/// Puts the line of a kernel after each `(object.so+0x1a2b)`.
fn with_lines(report: &str) -> String {
    let mut text = String::with_capacity(report.len());
    for frame in report.lines() {
        text.push_str(frame);
        let frame_location = frame.split_once('(').and_then(|(_, rest)| rest.split_once(".so+0x"));
        if let Some((object, rest)) = frame_location
            && let Some(line) =
                line(Path::new(&format!("{object}.so")), rest.split(')').next().unwrap_or(rest))
        {
            text.push_str(" in ");
            text.push_str(&line);
        }
        text.push('\n');
    }
    text
}
