//! The emulator finds defects: in kernels, in launches, in declarations.

use tinyvllm::ops::gpu::{Binding, Constant, Gpu, GpuBuffer, Launch, Library, Placement};

use crate::buffers::buffer;
use crate::emulator::{Emulator, Order, Variant, is_sanitized, run_again};

static DEFECTS: Library = Library { name: "defects", source: include_str!("kernels/defects.metal") };
const STRICT: &str = include_str!("kernels/strict.metal");

/// Each kernel with the expected finding.
fn expectations() -> Vec<(&'static str, &'static str)> {
    let mut all = Vec::new();
    for text in DEFECTS.source.split("// expect:").skip(1) {
        let (expected, rest) = text.split_once('\n').unwrap();
        let name = rest.split_once("void ").unwrap().1.split('(').next().unwrap();
        all.push((name, expected.trim()));
    }
    assert!(all.len() > 15);
    all
}

/// One launch of a kernel that may have an input, a buffer of both and an output, of 64 floats each.
fn launch(gpu: &Emulator, kernel: &str) -> Result<(), String> {
    let pipeline = gpu.pipeline(&DEFECTS, kernel, &[]).unwrap();
    let all: Vec<GpuBuffer> = (0..3).map(|_| buffer(gpu, &[0.5_f32; 64])).collect();
    let bindings = match kernel {
        "writes_its_input" => vec![Binding::read(&all[0]), Binding::read(&all[1])],
        "reads_its_output" | "reads_back_its_output" => vec![Binding::write(&all[0])],
        _ => vec![Binding::read_write(&all[0])],
    };
    let launch = Launch {
        pipeline,
        args: &[],
        buffers: &bindings,
        threadgroup_memory: 0,
        grid: [if kernel.starts_with("two_threadgroups") { 2 } else { 1 }, 1, 1],
        num_threads: 64,
    };
    gpu.dispatch(&launch).map_err(|error| error.to_string())
}

#[test]
fn the_checked_build_finds_each_defect() {
    for order in [Order::Forward, Order::Reversed, Order::Random(5)] {
        let Some(gpu) = Emulator::new(Variant::Checked) else { return };
        let gpu = gpu.with_order(order);
        for (kernel, expected) in expectations() {
            let found = launch(&gpu, kernel);
            if expected.is_empty() {
                assert_eq!(found, Ok(()), "{kernel}, {order:?}");
                continue;
            }
            let message = found.expect_err(kernel);
            assert!(message.contains(expected), "{kernel}, {order:?}: {message}");
            assert!(message.contains(kernel), "{message}");
        }
    }
}

#[test]
fn the_message_names_the_lines_and_the_threads() {
    let Some(gpu) = Emulator::new(Variant::Checked) else { return };
    let message = launch(&gpu, "no_barrier_of_the_simdgroup").unwrap_err();
    let line = 1 + DEFECTS.source.lines().position(|line| line.ends_with("x[t] = s[t ^ 1];")).unwrap();
    assert!(message.contains(&format!("defects.metal:{line}")), "{message}");
    assert!(message.contains(&format!("defects.metal:{}", line - 1)), "{message}");
    assert!(message.contains("by thread 0 (simdgroup 0, lane 0) of threadgroup 0"), "{message}");
}

#[test]
fn what_the_language_refuses_is_refused() {
    let mut cases = STRICT.split("\n\n// ");
    let preamble = cases.by_ref().take(1).collect::<String>();
    let (mut num_wrong, mut num_right) = (0, 0);
    for case in cases {
        let (expected, text) = case.split_once('\n').unwrap();
        let Some(gpu) = Emulator::new(Variant::Fast) else { return };
        let gpu = gpu.with_text(&DEFECTS, format!("{preamble}\n{text}"));
        let found = gpu.check_language(&DEFECTS).map_err(|error| error.to_string());
        match expected.strip_prefix("wrong: ") {
            Some(expected) => {
                let message = found.expect_err(text);
                assert!(message.contains(expected), "{expected} is not found in\n{text}\nbut {message}");
                num_wrong += 1;
            }
            None => {
                assert_eq!((expected, found), ("right", Ok(())), "{text}");
                num_right += 1;
            }
        }
    }
    assert_eq!((num_wrong, num_right), (20, 3));
}

/// A launch that is right, to be made wrong in one way.
#[test]
fn launches_outside_the_limits_are_errors() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let pipeline = gpu.pipeline(&DEFECTS, "fence_of_the_right_memory", &[]).unwrap();
    let x = gpu.allocate(256, Placement::Private).unwrap();
    let one = [Binding::read_write(&x)];
    let right = Launch {
        pipeline,
        args: &[],
        buffers: &one,
        threadgroup_memory: 0,
        grid: [1, 1, 1],
        num_threads: 64,
    };
    assert!(gpu.dispatch(&right).is_ok());
    let check = |launch: &Launch<'_>, expected: &str| {
        let message = gpu.dispatch(launch).unwrap_err().to_string();
        assert!(message.contains(expected) && message.contains("fence_of_the_right"), "{message}");
    };
    let (short, many) = ([0; 4], [0; 4097]);
    check(&Launch { args: &many, ..right }, "4097 bytes of arguments");
    check(&Launch { args: &short, ..right }, "buffer(0) is given, but the kernel has none");
    check(&Launch { threadgroup_memory: 24, ..right }, "24 bytes of threadgroup memory");
    check(&Launch { threadgroup_memory: 24_592, ..right }, "24592 bytes of threadgroup memory; more than");
    check(&Launch { threadgroup_memory: 32_784, ..right }, "32784 bytes of threadgroup memory");
    check(&Launch { threadgroup_memory: 16, ..right }, "the kernel has no threadgroup(0)");
    check(&Launch { num_threads: 0, ..right }, "0 threads");
    check(&Launch { num_threads: 48, ..right }, "48 threads");
    check(&Launch { num_threads: 1056, ..right }, "1056 threads");
    check(&Launch { grid: [1, 0, 1], ..right }, "a grid of [1, 0, 1]");
    check(&Launch { grid: [1 << 20, 1 << 20, 1], ..right }, "threadgroups");
    check(&Launch { buffers: &[], ..right }, "buffer(1) is not given");
    check(&Launch { buffers: &[one[0], one[0]], ..right }, "buffer(2) is given, but the kernel has none");
    check(&Launch { buffers: &[one[0]; 31], ..right }, "31 buffers");
    check(&Launch { buffers: &[one[0].at(6)], ..right }, "begins at 6 of 256 bytes");
    check(&Launch { buffers: &[one[0].at(256)], ..right }, "begins at 256 of 256 bytes");
}

#[test]
fn what_does_not_exist_is_an_error() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let message = gpu.pipeline(&DEFECTS, "nothing", &[]).unwrap_err().to_string();
    assert!(message.contains("defects.metal has no kernel nothing"), "{message}");
    let pipeline = gpu.pipeline(&DEFECTS, "never_written", &[Constant::Bool(9, true)]).unwrap();
    let x = gpu.allocate(256, Placement::Private).unwrap();
    let launch = Launch {
        pipeline,
        args: &[],
        buffers: &[Binding::write(&x)],
        threadgroup_memory: 0,
        grid: [1, 1, 1],
        num_threads: 32,
    };
    let message = gpu.dispatch(&launch).unwrap_err().to_string();
    assert!(message.contains("there is no function constant 9"), "{message}");
    assert!(gpu.write(&x, 250, &[0; 8]).is_err());
    assert!(gpu.read(&x, usize::MAX, &mut [0; 8]).is_err());
    assert!(gpu.allocate(15, Placement::Shared).is_err());
}

#[test]
fn a_kernel_that_does_not_compile_is_an_error_with_its_line() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let text = "#line 7 \"broken.metal\"\nkernel void k(device float* x [[buffer(1)]]) {\n    x[0] = y;\n}\n";
    let gpu = gpu.with_text(&DEFECTS, text.to_owned());
    let message = gpu.pipeline(&DEFECTS, "k", &[]).unwrap_err().to_string();
    assert!(message.contains("broken.metal:8"), "{message}");
    // Code that clang accepts and Apple's compiler rejects.
    let text =
        "#line 7 \"broken.metal\"\nkernel void k(device float* x [[buffer(31)]]) {\n    x[0] = 1;\n}\n";
    let message =
        gpu.with_text(&DEFECTS, text.to_owned()).pipeline(&DEFECTS, "k", &[]).unwrap_err().to_string();
    assert!(message.contains("broken.metal:7") && message.contains("from 0 to 30"), "{message}");
}

/// Runs in the process with the sanitizers, and ends it.
#[test]
fn sanitized_process_ends_here() {
    if !is_sanitized() {
        return;
    }
    let Some(gpu) = Emulator::new(Variant::Sanitized) else { return };
    launch(&gpu, "one_past_the_buffer").unwrap();
}

#[test]
fn the_sanitizers_see_an_access_out_of_bounds() {
    let Some(result) = run_again("defects::sanitized_process_ends_here") else { return };
    let message = result.unwrap_err();
    let line = 1 + DEFECTS.source.lines().position(|line| line.contains("void one_past_the_buffer")).unwrap();
    let location = format!("in defects.metal:{}", line + 1);
    assert!(message.contains("heap-buffer-overflow") && message.contains(&location), "{location}: {message}");
}

/// Apple's compiler gives a loop with functions of a simdgroup no remainder, so it unrolls it only if it knows the number of
/// turns. It says so in a warning, which the compile tests on a Mac take for an error.
#[test]
fn a_loop_that_cannot_be_unrolled_is_an_error() {
    let compiled = |body: &str| {
        let gpu = Emulator::new(Variant::Fast)?;
        let text = format!(
            "#include <metal_stdlib>\nusing namespace metal;\n\
             kernel void k(device float* x [[buffer(0)]], constant uint& n [[buffer(1)]],\n\
             uint t [[thread_index_in_threadgroup]]) {{\n\
             float sum = x[t];\n#pragma clang loop unroll_count(2)\nfor (uint i = 0; i < n; ++i) {{ {body} }}\nx[t] = sum;\n}}"
        );
        let gpu = gpu.with_text(&DEFECTS, text);
        Some(gpu.check_language(&DEFECTS).map_err(|error| error.to_string()))
    };
    let Some(right) = compiled("sum = sum * 2.0f + x[i];") else { return };
    assert_eq!(right, Ok(()));
    let message = compiled("sum += simd_sum(sum);").unwrap().unwrap_err();
    assert!(message.contains("loop not unrolled"), "{message}");
}
