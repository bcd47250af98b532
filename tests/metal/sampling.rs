//! State of the device's sampler between passes and between steps.

use std::collections::BTreeMap;
use std::sync::Arc;

use tinyvllm::config::ModelConfig;
use tinyvllm::ops::{
    AttentionHeads, AttentionLimits, AttentionMetadata, Buffer, Context, DeviceInputs, DeviceSampler,
    KvCache, KvCacheDType, Matrix, SampleParams, StepInputs, embed,
};
use tinyvllm::weights::{Checkpoint, DType};

use crate::emulator::{Emulator, Timing, Variant};

const VOCAB_SIZE: usize = 64;

fn late_context() -> Option<Context> {
    let gpu = Emulator::new(Variant::Fast)?.with_timing(Timing::Late);
    Some(Context::gpu(Arc::new(gpu)))
}

fn greedy(logit_bias: &BTreeMap<u32, f32>) -> SampleParams<'_> {
    SampleParams { logit_bias, ..SampleParams::greedy() }
}

fn logits(context: &Context, value: f32) -> Buffer {
    let mut logits = Buffer::shared(context, 1, VOCAB_SIZE).unwrap();
    logits.write(1, |logits| logits.fill(value)).unwrap();
    logits
}

/// A multi-step whose rows have all ended leaves a pass in the queue that no caller waits for.
#[test]
fn a_queued_pass_keeps_its_parameters_when_the_next_step_begins() {
    let Some(context) = late_context() else { return };
    let mut sampler = DeviceSampler::new(&context).unwrap().unwrap();
    let (old, new) = (BTreeMap::from([(3, 4.0)]), BTreeMap::from([(5, 6.0)]));
    let (first, second) = (logits(&context, 0.0), logits(&context, 0.0));
    sampler.begin(&context, std::iter::once(greedy(&old)), 1).unwrap();
    sampler.launch(&context, &first).unwrap();
    sampler.begin(&context, std::iter::once(greedy(&new)), 1).unwrap();
    sampler.launch(&context, &second).unwrap();
    let mut tokens = Vec::new();
    sampler.tokens(&context, 0, &mut tokens).unwrap();
    assert_eq!(tokens, [5]);
    // The bias was added to the logits in place.
    first.read(1, |logits| assert_eq!((logits[3], logits[5]), (4.0, 0.0))).unwrap();
}

/// A row with NaN logits passes on an invalid token, and the others continue.
#[test]
fn a_row_that_has_failed_does_not_fail_the_next_pass() {
    let Some(context) = late_context() else { return };
    let mut sampler = DeviceSampler::new(&context).unwrap().unwrap();
    let no_bias = BTreeMap::new();
    let broken = logits(&context, f32::NAN);
    sampler.begin(&context, std::iter::once(greedy(&no_bias)), 2).unwrap();
    sampler.launch(&context, &broken).unwrap();
    let mut tokens = Vec::new();
    sampler.tokens(&context, 0, &mut tokens).unwrap();
    assert_eq!(tokens, [u32::MAX]);

    let checkpoint = Checkpoint::from_static(tinyvllm::demo::MODEL).unwrap();
    let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
    let heads = AttentionHeads::new(config.num_heads, config.num_kv_heads, config.head_dim);
    let limits =
        AttentionLimits { heads, max_window: None, max_model_len: 16, max_num_tokens: 1, max_num_rows: 1 };
    let cache = KvCache::new(&context, &config, 1, 16, KvCacheDType::F16).unwrap();
    let mut inputs = DeviceInputs::new(&context, &limits, 16).unwrap();
    let mut metadata = AttentionMetadata { block_size: 16, ..AttentionMetadata::default() };
    metadata.clear();
    let sampled = sampler.on_device(&context, 0).unwrap();
    let mut step = StepInputs::new(&tokens, &[0], &[], &metadata);
    step.sampled = Some(&sampled);
    let step = inputs.upload(&context, step, &cache).unwrap();
    let bytes: Vec<u8> = (0..32 * 16).flat_map(|index| (index as f32).to_le_bytes()).collect();
    let table = Matrix::from_bytes(&context, DType::F32, &bytes, 32, 16).unwrap();
    let mut out = Buffer::new(&context, 1, 16).unwrap();
    embed(&context, &step, &table, 1.0, &mut out).unwrap();
    assert_eq!(out.read(1, <[f32]>::to_vec).unwrap(), [0.0; 16]);
}
