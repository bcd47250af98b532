//! Whether the kernels of a decode step keep to the registers that a thread of an Apple GPU has, as far as NVIDIA's
//! assembler tells: nothing on the stack, nothing spilled.
//!
//! It needs the assembler and no GPU. An array that is indexed in a loop is in registers only if the loop is unrolled;
//! so the kernels are also compiled without unrolling more than they demand.

use std::env;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tinyvllm::ops::gpu::{LIBRARIES, Library};

use super::TOOLKIT;
use crate::emulator::{Compiler, Emulator, KernelUsage, MAX_REGISTERS, Unrolling, Variant, flag_sets};

static PLANTED: Library = Library { name: "registers", source: include_str!("../kernels/registers.metal") };

fn toolkit() -> Option<PathBuf> {
    let toolkit =
        env::var_os(TOOLKIT).map(PathBuf::from).filter(|toolkit| toolkit.join("bin/ptxas").is_file());
    if toolkit.is_none() {
        let message =
            format!("{TOOLKIT} names no folder with bin/ptxas: the kernels' registers are not counted");
        assert!(env::var_os("TINYVLLM_REQUIRE_PTXAS").is_none(), "{message}");
        drop(writeln!(std::io::stderr(), "skipped: {message}"));
    }
    toolkit
}

/// Kernels of several rows or of prompts have no time to lose either, but more to hold.
fn is_of_a_decode_step(kernel: &str) -> bool {
    let is_of_rows = kernel.starts_with("matvec") && !kernel.ends_with("_1");
    !is_of_rows && !kernel.starts_with("matmul") && !kernel.starts_with("flash")
}

/// What is wrong with the kernels of a library; and of how many there is word.
fn findings(compiler: &Compiler, library: &Library, toolkit: &Path) -> (Vec<String>, usize) {
    let text = library.text();
    let jobs: Vec<(u32, Unrolling)> = flag_sets(text.matches("[[function_constant(").count())
        .flat_map(|set| [Unrolling::Everything, Unrolling::AsWritten].map(|unrolling| (set, unrolling)))
        .collect();
    let (next, wrong, num_kernels) = (AtomicUsize::new(0), Mutex::new(Vec::new()), AtomicUsize::new(0));
    let work = || {
        while let Some(&(set, unrolling)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let usage = compiler.cuda_usage(&text, toolkit, set, unrolling, is_of_a_decode_step).unwrap();
            for (kernel, KernelUsage { registers, spills, stack, .. }) in usage {
                num_kernels.fetch_add(1, Ordering::Relaxed);
                if registers > MAX_REGISTERS || spills > 0 || stack > 0 {
                    wrong.lock().unwrap().push(format!(
                        "{kernel}, function constants {set:b}, unrolling {unrolling:?}: {registers} registers \
                         (at most {MAX_REGISTERS}), {spills} bytes spilled, {stack} bytes on the stack"
                    ));
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    (wrong.into_inner().unwrap(), num_kernels.into_inner())
}

#[test]
fn kernels_of_a_decode_step_fit_in_registers() {
    let Some(toolkit) = toolkit() else { return };
    let Some((_, compiler)) = Emulator::new(Variant::Fast).zip(Compiler::find()) else { return };
    let (mut wrong, mut num_all) = (Vec::new(), 0);
    for library in LIBRARIES {
        let (found, num_kernels) = findings(compiler, library, &toolkit);
        wrong.extend(found);
        num_all += num_kernels;
    }
    assert!(wrong.is_empty(), "{} of {num_all}:\n{}", wrong.len(), wrong.join("\n"));
    assert!(num_all > 400, "word of {num_all} kernels only");
}

#[test]
fn too_many_registers_and_a_stack_are_found() {
    let Some(toolkit) = toolkit() else { return };
    let Some((_, compiler)) = Emulator::new(Variant::Fast).zip(Compiler::find()) else { return };
    let (wrong, num_kernels) = findings(compiler, &PLANTED, &toolkit);
    let is_found = |kernel: &str, unrolling: &str, what: &str| {
        let is_it = |line: &&String| line.starts_with(kernel) && line.contains(unrolling);
        wrong.iter().find(is_it).is_some_and(|line| line.contains(what))
    };
    assert_eq!((num_kernels, wrong.len()), (6, 5), "{wrong:?}");
    assert!(
        is_found("values_of_many_reads", "Everything", "0 bytes spilled, 0 bytes on the stack"),
        "{wrong:?}"
    );
    assert!(
        is_found("values_of_many_reads", "AsWritten", "0 bytes spilled, 0 bytes on the stack"),
        "{wrong:?}"
    );
    assert!(is_found("place_known_late", "Everything", "bytes on the stack"), "{wrong:?}");
    assert!(is_found("loop_left_to_the_compiler", "AsWritten", "bytes on the stack"), "{wrong:?}");
}
