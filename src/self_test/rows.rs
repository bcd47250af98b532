//! Embeddings and moved rows.

use super::oracle::{Rows, buffer, compare, matrix, noise};
use super::{Check, check};
use crate::Result;
use crate::ops::{AttentionLimits, AttentionMetadata, Buffer, Context, DeviceInputs, KvCache, StepInputs};
use crate::ops::{KvCacheDType, embed, gather_rows};
use crate::weights::DType;

use super::attention::one_layer;

pub(super) fn run(context: &Context, report: &mut dyn FnMut(Check)) {
    for dtype in DType::ALL {
        let cols = dtype.block_len().max(48).next_multiple_of(dtype.block_len());
        let error = compare(context, |context| embedding(context, dtype, cols));
        report(check(format!("embed {dtype}"), 0.0, error));
    }
    report(check("gather_rows".to_owned(), 0.0, compare(context, gathering)));
}

/// Calls `run` with the lists of a step where the device wants them.
fn with_step<R>(
    context: &Context,
    token_ids: &[u32],
    outputs: &[usize],
    run: impl FnOnce(&StepInputs<'_>) -> Result<R>,
) -> Result<R> {
    let limits = AttentionLimits {
        num_heads: 1,
        num_kv_heads: 1,
        head_dim: 16,
        sliding_window: None,
        max_model_len: 16,
        max_num_tokens: token_ids.len(),
        max_num_rows: 1,
    };
    let cache = KvCache::new(context, &one_layer(1, 1, 16), 1, 16, KvCacheDType::F16)?;
    let mut inputs = DeviceInputs::new(context, &limits, 16)?;
    let mut metadata = AttentionMetadata::default();
    metadata.clear();
    let step = StepInputs::new(token_ids, token_ids, outputs, &metadata);
    run(&inputs.upload(context, step, &cache)?)
}

fn embedding(context: &Context, dtype: DType, cols: usize) -> Result<Rows> {
    const VOCABULARY: usize = 21;
    let table = matrix(context, dtype, VOCABULARY, cols, 1)?;
    let token_ids: Vec<u32> = (0..11).map(|index| index * 17 % VOCABULARY as u32).collect();
    let mut out = Buffer::new(context, token_ids.len(), cols)?;
    with_step(context, &token_ids, &[], |step| embed(context, step, &table, &mut out))?;
    Rows::of(&out, token_ids.len())
}

fn gathering(context: &Context) -> Result<Rows> {
    const WIDTH: usize = 50;
    const OUTPUTS: [usize; 4] = [1, 2, 5, 8];
    let mut x = buffer(context, &noise(1, 9 * WIDTH), WIDTH, 9)?;
    with_step(context, &[0; 9], &OUTPUTS, |step| gather_rows(context, step, &mut x))?;
    Rows::of(&x, OUTPUTS.len())
}
