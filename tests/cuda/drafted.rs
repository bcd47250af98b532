//! A model with a cache of one sequence, to compare steps of it.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use tinyvllm::config::ModelConfig;
use tinyvllm::models::{self, CausalLm, InputBatch, LoadOptions, Wanted};
use tinyvllm::ops::{Context, KvCache, KvCacheDType, RowMode};
use tinyvllm::weights::Checkpoint;

/// Longest sequence.
const MAX_LEN: usize = 768;

/// A model with a cache of one sequence.
pub(crate) struct Drafted {
    model: Box<dyn CausalLm>,
    cache: KvCache,
}

impl Drafted {
    pub(crate) fn open(path: &Path, context: &Arc<Context>, dtype: KvCacheDType) -> Self {
        let checkpoint = Checkpoint::open(path).unwrap();
        let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
        let options = LoadOptions {
            quantizer: None,
            expert_file: None,
            max_model_len: MAX_LEN,
            max_num_batched_tokens: MAX_LEN,
            max_num_seqs: 1,
            num_speculative_tokens: 32,
            block_size: 16,
        };
        let model = models::load(&checkpoint, &config, context, &options, &|_| ()).unwrap();
        let cache = KvCache::new(context, &config, MAX_LEN / 16, 16, dtype).unwrap();
        Self { model, cache }
    }

    /// The bits of the logits of these positions; of a prompt those of the last one.
    pub(crate) fn step(&mut self, tokens: &[u32], positions: Range<usize>, mode: RowMode) -> Vec<Vec<u32>> {
        let mut batch = InputBatch::default();
        batch.clear();
        batch.attention.block_size = 16;
        batch.token_ids.extend_from_slice(&tokens[positions.clone()]);
        batch.positions.extend(positions.start as u32..positions.end as u32);
        batch.attention.slot_mapping.extend(positions.clone());
        let num_outputs = if mode == RowMode::Decode { positions.len() } else { 1 };
        (positions.len() - num_outputs..positions.len()).for_each(|index| batch.want(index, Wanted::Logits));
        batch.attention.push(positions, 0, mode, |index| index as u32);
        let vocab_size = self.model.config().vocab_size;
        let logits = self.model.forward(&batch, &mut self.cache).unwrap();
        let bits = |row: &[f32]| row.iter().map(|value| value.to_bits()).collect();
        logits.read(num_outputs, |logits| logits.chunks(vocab_size).map(bits).collect()).unwrap()
    }
}
