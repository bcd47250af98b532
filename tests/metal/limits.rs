//! Devices that allow fewer threads: kernels that support it run and compute the same, and the others give an error
//! that names them. `ops.rs` has all ops on a device with the fewest threads.

use std::sync::Arc;

use tinyvllm::ErrorKind;
use tinyvllm::ops::gpu::{LIBRARIES, Library};
use tinyvllm::ops::{Buffer, Context, DeviceSampler, Matrix, RmsNorm, SampleParams, Vector};
use tinyvllm::ops::{LinearScratch, norm_logits};
use tinyvllm::self_test::{Check, Effort, Family};
use tinyvllm::weights::DType;

use crate::emulator::{Emulator, Variant};
use crate::oracle::Remembering;

/// Of the checks of sampling.
fn failures(gpu: Emulator) -> Vec<Check> {
    let mut failures = Vec::new();
    let mut report = Remembering(|check: Check| failures.extend((!check.passed).then_some(check)));
    Family::Sampling.check(&Context::gpu(Arc::new(gpu)), Effort::Small, &mut report);
    failures
}

#[test]
fn the_sampler_gives_the_hosts_tokens_with_any_number_of_threads() {
    for max_threads in [1024, 896, 900, 512, 96, 32] {
        let Some(gpu) = Emulator::new(Variant::Fast) else { return };
        assert_eq!(failures(gpu.with_max_threads(max_threads)), [], "{max_threads}");
    }
}

const VOCAB_SIZE: usize = 100_000;
const NUM_ROWS: usize = 64;
const NUM_STEPS: usize = 8;

fn row(stream: usize) -> SampleParams<'static> {
    SampleParams {
        top_p: if stream < 4 { 0.9 } else { 1.0 },
        seed: 1,
        stream: stream as u32,
        ..SampleParams::plain()
    }
}

/// Draws from rows in which every token is about as likely, so that a sum that is off by its last bit shows in some
/// of them.
fn draws(gpu: Emulator) -> Vec<u32> {
    let context = Context::gpu(Arc::new(gpu));
    let mut sampler = DeviceSampler::new(&context).unwrap().unwrap();
    let mut logits = Buffer::shared(&context, NUM_ROWS, VOCAB_SIZE).unwrap();
    sampler.begin(&context, (0..NUM_ROWS).map(row), NUM_STEPS).unwrap();
    let (mut all, mut tokens) = (Vec::new(), Vec::new());
    for step in 0..NUM_STEPS {
        let values = (0..NUM_ROWS * VOCAB_SIZE).map(|index| (index * 37 % 1009) as f32 / 1009.0);
        logits
            .write(NUM_ROWS, |logits| logits.iter_mut().zip(values).for_each(|(to, value)| *to = value))
            .unwrap();
        sampler.launch(&context, &logits).unwrap();
        sampler.tokens(&context, step, &mut tokens).unwrap();
        all.extend_from_slice(&tokens);
    }
    all
}

#[test]
fn the_number_of_threads_does_not_change_a_bit_of_a_draw() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let expected = draws(gpu);
    assert!(expected.iter().all(|token| (*token as usize) < VOCAB_SIZE), "{expected:?}");
    for max_threads in [896, 32] {
        let Some(gpu) = Emulator::new(Variant::Fast) else { return };
        assert!(draws(gpu.with_max_threads(max_threads)) == expected, "{max_threads} threads");
    }
    // If each simdgroup added up its own segments first, it would.
    let by_segment = "        total += sums[segment];\n    }\n";
    let by_group = "        if (segment < position.num_groups) {\n            float own = 0.0f;\n            \
                    for (uint p = segment; p < NUM_SEGMENTS; p += position.num_groups) {\n                \
                    own += sums[p];\n            }\n            total += own;\n        }\n    }\n";
    let (library, text) = sampler_with(by_segment, by_group);
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let gpu = gpu.with_max_threads(896).with_text(library, text);
    assert!(draws(gpu) != expected, "a sum in another order is not noticed");
}

/// The sampler's text with one line changed.
fn sampler_with(from: &str, to: &str) -> (&'static Library, String) {
    let library = LIBRARIES.into_iter().find(|library| library.name == "sampling").unwrap();
    let text = library.text();
    assert_eq!(text.matches(from).count(), 1, "{from}");
    (library, text.replace(from, to))
}

/// The tokens of a multi-step that penalises repeated ones, and so uses up all tokens, from the last one on.
fn penalised(gpu: Emulator) -> Vec<u32> {
    const VOCAB_SIZE: usize = 100;
    let context = Context::gpu(Arc::new(gpu));
    let mut sampler = DeviceSampler::new(&context).unwrap().unwrap();
    let params = SampleParams { inverse_temperature: 0.0, presence_penalty: 2.0, ..row(0) };
    sampler.begin(&context, std::iter::once(params), VOCAB_SIZE).unwrap();
    let (mut all, mut tokens) = (Vec::new(), Vec::new());
    for step in 0..VOCAB_SIZE {
        let mut logits = Buffer::shared(&context, 1, VOCAB_SIZE).unwrap();
        let values = (0..VOCAB_SIZE).map(|token| token as f32 / VOCAB_SIZE as f32);
        logits.write(1, |logits| logits.iter_mut().zip(values).for_each(|(to, value)| *to = value)).unwrap();
        sampler.launch(&context, &logits).unwrap();
        sampler.tokens(&context, step, &mut tokens).unwrap();
        all.extend_from_slice(&tokens);
    }
    all
}

/// The tokens of earlier steps are shared among the threads, of which there may be fewer.
#[test]
fn every_step_of_a_multi_step_is_penalised() {
    for max_threads in [1024, 64, 32] {
        let Some(gpu) = Emulator::new(Variant::Fast) else { return };
        let expected: Vec<u32> = (0..100).rev().collect();
        assert_eq!(penalised(gpu.with_max_threads(max_threads)), expected, "{max_threads} threads");
    }
    let (library, text) =
        sampler_with("step < a.step; step += position.num_threads", "step < a.step; step += 4096");
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let gpu = gpu.with_max_threads(32).with_text(library, text);
    assert_ne!(
        penalised(gpu),
        (0..100).rev().collect::<Vec<u32>>(),
        "steps after the 32nd are not penalised"
    );
}

/// A matmul of one row on such a device.
fn matmul(gpu: Emulator) -> tinyvllm::Result<()> {
    let context = Context::gpu(Arc::new(gpu));
    let matrix = Matrix::from_bytes(&context, DType::Q4_0, &[0; 18], 1, 32)?;
    let norm = RmsNorm { weight: Vector::new(&context, vec![1.0; 32])?, eps: 1e-5 };
    let mut scratch = LinearScratch::new(&context, 1, 32)?;
    let (x, mut out) = (Buffer::new(&context, 1, 32)?, Buffer::new(&context, 1, 1)?);
    norm_logits(&context, &mut scratch, 1, &x, &norm, &matrix, &mut out)
}

#[test]
fn a_kernel_that_does_not_fit_is_an_error_with_the_numbers_and_the_way_out() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let error = matmul(gpu.with_max_threads(96)).unwrap_err();
    let message = "matvec_Q4_0_1 cannot run on this device: it takes 128 threads in a group, and its registers allow 96";
    assert_eq!((error.kind(), error.message()), (ErrorKind::Internal, message));
    assert!(error.hint().is_some_and(|hint| hint.contains("--kernels reference")), "{error:?}");

    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let error = matmul(gpu.with_simd_width(64)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().starts_with("matvec_Q4_0_1 runs in groups of 64 threads"), "{error}");
    assert!(error.hint().is_some_and(|hint| hint.contains("--kernels reference")), "{error:?}");

    // No kernel has a group of fewer threads than a simdgroup, not even the sampler.
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let failed = failures(gpu.with_max_threads(31));
    assert!(failed[0].detail.contains("sample cannot run on this device: it takes 32 threads"), "{failed:?}");
}
