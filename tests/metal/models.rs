//! Whole models on the emulated GPU.

use std::path::Path;
use std::sync::Arc;

use tinyvllm::config::{ModelConfig, Shard};
use tinyvllm::models::{self, InputBatch, LoadOptions, Wanted};
use tinyvllm::ops::reference::ReferenceBackend;
use tinyvllm::ops::{
    AttentionHeads, AttentionLimits, AttentionMetadata, Buffer, Communicator, Context, DeviceInputs, KvCache,
    KvCacheDType, RowMode, StepInputs, keep_on_first_rank, sum_over_ranks,
};
use tinyvllm::self_test;
use tinyvllm::weights::Checkpoint;

use crate::emulator::{Emulator, Timing, Variant};

/// A batch is checked before its lists go to the device.
#[test]
fn rows_that_do_not_fit_together_are_errors() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let context = Context::gpu(Arc::new(gpu));
    let heads = AttentionHeads::new(1, 1, 64);
    let limits =
        AttentionLimits { heads, max_window: None, max_model_len: 16, max_num_tokens: 4, max_num_rows: 1 };
    let checkpoint = Checkpoint::from_static(tinyvllm::demo::MODEL).unwrap();
    let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
    let cache = KvCache::new(&context, &config, 1, 16, KvCacheDType::F16).unwrap();
    let mut inputs = DeviceInputs::new(&context, &limits, 16).unwrap();
    let mut upload = |query_start_loc: &[usize], seq_len: usize| {
        let metadata = AttentionMetadata {
            query_start_loc: query_start_loc.to_vec(),
            seq_lens: vec![seq_len],
            block_tables: vec![0],
            block_table_starts: vec![0, 1],
            slot_mapping: vec![0],
            block_size: 16,
            modes: vec![RowMode::Decode],
        };
        inputs.upload(&context, StepInputs::new(&[1], &[0], &[0], &metadata), &cache).map(|_| ())
    };
    assert!(upload(&[0, 1], 1).is_ok());
    assert!(upload(&[0], 1).is_err());
    assert!(upload(&[0, 0], 1).is_err());
    assert!(upload(&[0, 3], 2).unwrap_err().message().contains("tokens 0..3"));
}

/// A connection that multiplies by the number of ranks, as if all had the same values.
#[derive(Debug)]
struct Alike(usize);

impl Communicator for Alike {
    fn sum(&self, values: &mut [f32]) -> tinyvllm::Result<()> {
        values.iter_mut().for_each(|value| *value *= self.0 as f32);
        Ok(())
    }
}

/// Values of a GPU go through the host, in the order of its kernels.
#[test]
fn values_are_summed_over_ranks() {
    for (rank, expected) in [(0, 6.0), (1, 0.0), (2, 0.0)] {
        let Some(gpu) = Emulator::new(Variant::Fast) else { return };
        let context = Context::gpu(Arc::new(gpu.with_timing(Timing::Late)));
        let context = context.of_rank(Shard::new(rank, 3).unwrap(), Arc::new(Alike(3)));
        let mut x = Buffer::new(&context, 3, 40).unwrap();
        x.write(3, |values| values.fill(2.0)).unwrap();
        keep_on_first_rank(&context, 2, &mut x).unwrap();
        sum_over_ranks(&context, 2, &mut x).unwrap();
        let rows = x.read(3, |values| values.chunks(40).map(<[f32]>::to_vec).collect::<Vec<_>>()).unwrap();
        assert_eq!(rows, [vec![expected; 40], vec![expected; 40], vec![2.0; 40]], "rank {rank}");
    }
}

/// Logits of one sequence and the hidden state of another one, in one step.
#[test]
fn hidden_states_are_those_of_the_reference() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let checkpoint = Checkpoint::from_static(tinyvllm::demo::MODEL).unwrap();
    let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
    let run = |context: Context| {
        let context = Arc::new(context);
        let options = LoadOptions {
            quantizer: None,
            expert_file: None,
            max_model_len: 16,
            max_num_batched_tokens: 16,
            max_num_seqs: 2,
            num_speculative_tokens: 0,
            block_size: 16,
        };
        let mut model = models::load(&checkpoint, &config, &context, &options, &|_| ()).unwrap();
        let mut cache = KvCache::new(&context, &config, 2, 16, KvCacheDType::F32).unwrap();
        let mut batch = InputBatch::default();
        batch.clear();
        batch.attention.block_size = 16;
        for (block, len, wanted) in [(0, 5, Wanted::Logits), (1, 7, Wanted::Hidden)] {
            batch.token_ids.extend((0..len).map(|index| 20 + 3 * index + block));
            batch.positions.extend(0..len);
            batch.attention.slot_mapping.extend((0..len as usize).map(|index| 16 * block as usize + index));
            batch.attention.push(0..len as usize, 0, RowMode::Prefill, |_| block);
            batch.want(batch.token_ids.len() - 1, wanted);
        }
        let logits = model.forward(&batch, &mut cache).unwrap().read(1, <[f32]>::to_vec).unwrap();
        (logits, model.hidden_states(&batch).unwrap())
    };
    let (logits, state) = run(Context::gpu(Arc::new(gpu.with_timing(Timing::Late))));
    let (expected_logits, expected_state) = run(Context::reference(ReferenceBackend::cpu()));
    assert_eq!(state.len(), config.hidden_size);
    for (own, expected) in [(logits, expected_logits), (state, expected_state)] {
        let largest = expected.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        let differences = own.iter().zip(&expected).map(|(own, expected)| (own - expected).abs());
        assert!(own.len() == expected.len() && differences.fold(0.0, f32::max) < 0.02 * largest);
    }
}

#[test]
fn models_give_the_tokens_of_the_cpu() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let context = Arc::new(Context::gpu(Arc::new(gpu.with_timing(Timing::Late))));
    let mut failures = Vec::new();
    let mut report = |check: self_test::Check| {
        if !check.passed {
            failures.push(format!("{}: {}", check.name, check.detail));
        }
    };
    self_test::demo_model(&context, &mut report);
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    self_test::golden_models(&context, &fixtures, &mut report);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
