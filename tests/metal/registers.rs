//! Whether the kernels of a decode step fit into the registers that a thread of an Apple GPU has, as far as NVIDIA's
//! compiler reports: no array on the stack, and no spills except a value or two with which the compiler makes space for
//! another threadgroup.
//!
//! It takes the compiler and no GPU. The kernels' names are from the emulator.

use std::env;
use std::io::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tinyvllm::ErrorKind;
use tinyvllm::ops::gpu::{CUDA_LIBRARIES, Constant, LIBRARIES, Library, compile_messages};

use crate::emulator::{Emulator, Variant};
use crate::proved;

static PLANTED: Library = Library { name: "registers", source: include_str!("kernels/registers.metal") };

/// The GPU that is asked for, of compute capability 9.0, and the oldest one with the instructions of attention.
const ARCHITECTURE: i32 = 90;
const OLDEST_ARCHITECTURE: i32 = 80;

/// The maximum of a thread of an Apple GPU: a kernel that spills here may spill there. The compiler assumes
/// threadgroups so large that there are no more.
const MAX_REGISTERS: usize = 128;

/// Registers with which one more threadgroup is in flight, and bytes, of six registers, that the compiler may spill for
/// it: a negligible amount.
const FEW_REGISTERS: usize = 64;
const MAX_FEW_SPILLS: usize = 24;

/// Kernels of several rows or of prompts have no time to lose either, but more to hold.
fn is_of_a_decode_step(kernel: &str) -> bool {
    let is_of_rows = kernel.starts_with("matvec") && !kernel.ends_with("_1");
    !is_of_rows && !kernel.starts_with("matmul") && !kernel.starts_with("flash")
}

/// The values of this many flags with which a kernel is launched: bit `i` is constant `i`. Matmuls with the fourth, of
/// groups, and those with gates have no bias and do not add to the previous values.
fn flag_sets(kernel: &str, num_flags: usize) -> impl Iterator<Item = u32> {
    let is_gated = kernel.contains("swiglu");
    (0..1 << num_flags).filter(move |set| (!is_gated && set >> 3 == 0) || set & 0b0110 == 0)
}

/// The resources of a kernel's thread: registers, bytes of its stack, and bytes of spill stores and loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Usage {
    registers: usize,
    stack: usize,
    stores: usize,
    loads: usize,
}

impl Usage {
    /// Whether everything that a kernel works with is in registers.
    fn fits(self) -> bool {
        let Self { registers, stack, stores, loads } = self;
        let has_array = stack > stores.next_multiple_of(8);
        let spills = match registers <= FEW_REGISTERS {
            true => stores > MAX_FEW_SPILLS,
            false => stores + loads > 0,
        };
        registers <= MAX_REGISTERS && !has_array && !spills
    }
}

/// Parses the compiler's messages about one kernel; none if they do not report its resources.
fn usage(messages: &str) -> Option<Usage> {
    let frame = messages.lines().find(|line| line.contains("bytes stack frame"))?;
    let numbers: Vec<usize> = frame.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [stack, stores, loads] = numbers[..] else { return None };
    let (_, used) = messages.split_once("Used ")?;
    let (registers, _) = used.split_once(" registers")?;
    Some(Usage { registers: registers.parse().ok()?, stack, stores, loads })
}

/// The resources of the kernels, with each set of flags that they may be launched with; none, with a message, if there
/// is no compiler.
fn usages(libraries: &[&Library], wants: impl Fn(&str) -> bool) -> Option<Vec<(String, Usage)>> {
    let gpu = Emulator::new(Variant::Fast)?;
    let mut jobs: Vec<(&Library, String, u32)> = Vec::new();
    for library in libraries {
        let num_flags = library.text().matches("[[function_constant(").count();
        for kernel in gpu.kernels(library).unwrap().into_iter().filter(|kernel| is_of_a_decode_step(kernel)) {
            let all = flag_sets(&kernel, num_flags).map(|set| (*library, kernel.clone(), set));
            jobs.extend(all.filter(|(_, kernel, set)| wants(&format!("{kernel} {set:b}"))));
        }
    }
    let (library, kernel, _) = jobs.first().unwrap();
    if let Err(error) = compile_messages(library, kernel, &[], ARCHITECTURE)
        && error.kind() == ErrorKind::Unsupported
    {
        assert!(env::var_os("TINYVLLM_REQUIRE_NVRTC").is_none(), "{error}");
        drop(writeln!(std::io::stderr(), "skipped: the kernels' registers are not counted: {error}"));
        return None;
    }
    let (next, usages) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some((library, kernel, set)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let constants: Vec<_> =
                (0..u32::BITS).map(|index| Constant::Bool(index, set >> index & 1 != 0)).collect();
            let messages = compile_messages(library, kernel, &constants, ARCHITECTURE).unwrap();
            let usage = usage(&messages).unwrap_or_else(|| panic!("{kernel}: {messages}"));
            usages.lock().unwrap().push((format!("{kernel}, function constants {set:b}"), usage));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    Some(usages.into_inner().unwrap())
}

/// Resources beyond the limits.
fn findings(usages: &[(String, Usage)]) -> Vec<String> {
    let wrong = usages.iter().filter(|(_, usage)| !usage.fits());
    wrong.map(|(kernel, usage)| format!("{kernel}: {usage:?}")).collect()
}

#[test]
fn kernels_of_a_decode_step_fit_in_registers() {
    const TEST: &str = "registers::kernels_of_a_decode_step_fit_in_registers";
    let is_known = proved::is_known(TEST);
    let Some(usages) = usages(&LIBRARIES, |kernel| !is_known || proved::is_of_today(kernel)) else { return };
    let wrong = findings(&usages);
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), usages.len(), wrong.join("\n"));
    if !is_known {
        assert!(usages.len() > 200, "word of {} kernels only", usages.len());
        proved::note(TEST);
    }
}

/// Fails if a kernel of attention on tensor cores needs more registers than a thread has if two threadgroups of 256 share
/// a multiprocessor.
fn check_fit(library: &str, kernel: &str, flags: &[bool], numbers: &[u16]) {
    let library = CUDA_LIBRARIES.into_iter().find(|own| own.name == library).unwrap();
    let numbers = (flags.len() as u32..).zip(numbers).map(|(index, number)| Constant::U16(index, *number));
    let flags = (0..).zip(flags).map(|(index, flag)| Constant::Bool(index, *flag));
    let constants: Vec<_> = flags.chain(numbers).collect();
    for architecture in [ARCHITECTURE, OLDEST_ARCHITECTURE] {
        let messages = match compile_messages(library, kernel, &constants, architecture) {
            Err(error) if error.kind() == ErrorKind::Unsupported => return,
            outcome => outcome.unwrap(),
        };
        let usage = usage(&messages).unwrap_or_else(|| panic!("{kernel}: {messages}"));
        assert!(usage.fits(), "{kernel} {constants:?}, compute capability {architecture}: {usage:?}");
    }
}

#[test]
fn attention_on_tensor_cores_fits_in_registers() {
    for (kernel, head_dims) in [
        ("decode_attention_f16_128", [64, 96, 128]),
        ("decode_attention_bf16_128", [64, 80, 128]),
        ("decode_attention_f16_256", [160, 192, 256]),
        ("decode_attention_bf16_256", [144, 224, 256]),
        ("decode_attention_q8_0_128", [64, 96, 128]),
        ("decode_attention_q8_0_256", [144, 192, 256]),
        ("decode_attention_fp8_e4m3_128", [64, 96, 128]),
        ("decode_attention_fp8_e4m3_256", [144, 192, 256]),
        ("decode_attention_merge", [64, 128, 256]),
    ] {
        for head_dim in head_dims {
            // Variants without rotation have neither norms nor pairs. Models with sinks or a cap have no norms. With
            // the widest heads, a cap spills a register or two.
            let flags = match kernel.ends_with("merge") {
                true => &["", "s"][..],
                false => &["", "r", "nr", "nir", "s", "rs", "c", "rc"],
            };
            for flags in flags.iter().filter(|flags| head_dim <= 128 || !flags.contains('c')) {
                let flags = ['n', 'i', 'r', 's', 'c'].map(|flag| flags.contains(flag));
                check_fit("decode_attention", kernel, &flags, &[head_dim]);
            }
        }
    }
}

#[test]
fn latent_attention_on_tensor_cores_fits_in_registers() {
    for kernel in ["f16_16", "bf16_16", "q8_0_16", "fp8_e4m3_16", "merge"] {
        for dims in [[576, 512], [320, 256], [128, 64]] {
            check_fit("decode_latent_attention", &format!("decode_latent_attention_{kernel}"), &[], &dims);
        }
    }
}

#[test]
fn spilled_registers_and_a_stack_are_found() {
    let Some(usages) = usages(&[&PLANTED], |_| true) else { return };
    let of = |kernel: &str| {
        let found = usages.iter().find(|(name, _)| name.starts_with(kernel));
        found.unwrap_or_else(|| panic!("no {kernel} in {usages:?}")).1
    };
    assert_eq!((usages.len(), findings(&usages).len()), (3, 2), "{usages:?}");
    assert!(of("values_of_many_reads").stores > 0, "{usages:?}");
    let Usage { stack, stores, .. } = of("place_known_late");
    assert!(stores == 0 && stack > 0, "{usages:?}");
    assert!(of("values_of_a_few_reads").fits());
}

#[test]
fn messages_are_read() {
    let messages = "ptxas info    : 0 bytes gmem\n\
                    ptxas info    : Compiling entry function 'msl_sample' for 'sm_90'\n\
                    ptxas info    : Function properties for msl_sample\n    \
                    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
                    ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size\n";
    assert_eq!(usage(messages), Some(Usage { registers: 40, stack: 8, stores: 4, loads: 12 }));
    assert_eq!(usage("ptxas info    : Used 40 registers"), None);
    assert_eq!(
        (flag_sets("matvec_Q4_0_1", 4).count(), flag_sets("matvec_swiglu_Q4_0_1", 4).count()),
        (10, 4)
    );
    let fits = |registers, stack, stores| Usage { registers, stack, stores, loads: stores }.fits();
    assert!(fits(128, 0, 0) && fits(64, 24, 24) && fits(40, 8, 4));
    assert!(!fits(129, 0, 0) && !fits(65, 8, 8) && !fits(64, 32, 28) && !fits(32, 8, 0));
}
