//! Compiles the kernels of a model's first steps in advance.

use std::sync::Arc;

use super::{InputBatch, LoadOptions, Wanted, load};
use crate::Result;
use crate::config::ModelConfig;
use crate::ops::{Context, DeviceSampler, KvCache, KvCacheDType, RowMode, SampleParams};
use crate::weights::Checkpoint;

/// Numbers of tokens and of sequences that are tried, in addition to powers of two and the maximum: more than a
/// tile of any kernel has rows whose kernel plan depends on more than the next power of two.
const MAX_ROWS: usize = 64;

/// Compiles every kernel that the model uses in any step within these limits; does nothing if the device compiles no
/// kernels. Calls `on_progress`, from any thread, with the number of compiled kernels and of all; it returns whether to
/// continue.
///
/// # Errors
/// Those of loading the model, except for its weights, which are not read, and those of the device's compiler.
pub fn compile_kernels(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    context: &Context,
    options: &LoadOptions,
    kv_cache_dtype: KvCacheDType,
    on_progress: &(dyn Fn(usize, usize) -> bool + Sync),
) -> Result<()> {
    let Some(dry_run) = context.dry_run() else { return Ok(()) };
    let dry_run = Arc::new(dry_run);
    let mut model = load(checkpoint, config, &dry_run, options, &|_| ())?;
    let own = config.of_shard(context.shard())?;
    let mut cache = KvCache::new(&dry_run, &own.with_cached_layers(), 1, options.block_size, kv_cache_dtype)?;
    let mut sampler = DeviceSampler::new(&dry_run)?;
    let mut batch = InputBatch::default();
    let mut forward_for = |sequences: &[WarmUpSequence], num_outputs: usize, wanted: Wanted| {
        fill(&mut batch, sequences, options.block_size);
        (0..num_outputs).for_each(|index| batch.want(index, wanted));
        let logits = model.forward(&batch, &mut cache)?;
        if let Some(sampler) = sampler.as_mut().filter(|_| wanted == Wanted::Logits) {
            // Which token is chosen decides over no kernel.
            sampler.begin(&dry_run, std::iter::once(SampleParams::greedy()), 1)?;
            sampler.launch(&dry_run, logits)?;
        }
        // The block that drafts has the same tokens after the layers.
        if let Some(mtp) = model.mtp() {
            mtp.follow(&batch, &mut cache)?;
            if batch.token_ids.len() == 1 {
                mtp.predict_after(&batch, &mut cache)?;
            }
        }
        Ok::<_, crate::Error>(())
    };
    forward_for(&[WarmUpSequence { num_tokens: 1, len: 1, mode: RowMode::Decode }], 1, Wanted::Hidden)?;
    let mut forward =
        |sequences: &[WarmUpSequence], num_outputs| forward_for(sequences, num_outputs, Wanted::Logits);
    let LoadOptions { max_num_seqs, max_num_batched_tokens, max_model_len, .. } = *options;
    let max_num_rows = options.max_num_rows();
    let doubled = |most: usize| (1..).map(|power| MAX_ROWS << power).take_while(move |count| *count < most);
    let counts =
        |most: usize| (1..=most.min(MAX_ROWS)).chain(doubled(most)).chain((most > MAX_ROWS).then_some(most));
    for num_sequences in counts(max_num_rows.min(max_num_batched_tokens)) {
        let mut sequences =
            vec![WarmUpSequence { num_tokens: 1, len: 1, mode: RowMode::Decode }; num_sequences];
        forward(&sequences, num_sequences)?;
        // A long context is computed in chunks, which are merged.
        sequences[0].len = max_model_len;
        forward(&sequences, num_sequences)?;
    }
    // Drafted tokens.
    if options.num_speculative_tokens > 0 && max_num_batched_tokens > 1 && max_model_len > 1 {
        for len in [2, max_model_len] {
            forward(&[WarmUpSequence { num_tokens: 2, len, mode: RowMode::Decode }], 2)?;
        }
    }
    // Chunks of prompts, also in both modes.
    let has_modes = config.latent_attention.is_some();
    let modes = if has_modes { &[RowMode::Prefill, RowMode::Expanded][..] } else { &[RowMode::Prefill] };
    for num_tokens in counts(max_num_batched_tokens.min(max_model_len)) {
        for mode in modes.iter().copied() {
            let prompt = [WarmUpSequence { num_tokens, len: num_tokens, mode }];
            forward(&prompt, 1)?;
            forward(&prompt, num_tokens.min(max_num_rows))?;
        }
    }
    // Sequences share blocks only with others.
    if max_num_seqs > 1 {
        cache.copy_block(0, 0)?;
    }
    context.compile(&dry_run, on_progress)
}

/// The last tokens of a sequence, which a step computes.
#[derive(Debug, Clone, Copy)]
struct WarmUpSequence {
    num_tokens: usize,
    len: usize,
    mode: RowMode,
}

/// A step of these sequences, all of whose tokens are in the one block that there is.
fn fill(batch: &mut InputBatch, sequences: &[WarmUpSequence], block_size: usize) {
    batch.clear();
    let attention = &mut batch.attention;
    attention.block_size = block_size;
    for &WarmUpSequence { num_tokens, len, mode } in sequences {
        attention.slot_mapping.resize(attention.slot_mapping.len() + num_tokens, 0);
        let num_expanded = if mode == RowMode::Expanded { len } else { 0 };
        attention.push(len - num_tokens..len, num_expanded, mode, |_| 0);
    }
    let num_tokens = attention.slot_mapping.len();
    batch.token_ids.resize(num_tokens, 0);
    batch.positions.resize(num_tokens, 0);
}
