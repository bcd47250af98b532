//! What a cache of eight-bit floats stores of a value, where rounding is decided: attention of a token to itself alone.

use half::f16;

use super::Report;
use super::attention::one_layer;
use super::oracle::{Rows, buffer, unwritten};
use crate::Result;
use crate::config::RopeStyle;
use crate::ops::cpu::fp8::E4m3;
use crate::ops::{
    AttentionHeads, AttentionLimits, AttentionMetadata, AttentionScratch, AttentionSpec, Context,
    DeviceInputs, KvCache, KvCacheDType, RopeTable, RowMode, StepInputs, paged_attention, rope_kv_write,
};

const HEAD_DIM: usize = 128;
const BLOCK_SIZE: usize = 16;

pub(super) fn run(context: &Context, report: &mut dyn Report) {
    for is_prompt in [false, true] {
        let name = format!("values of fp8_e4m3, {}", if is_prompt { "a prompt" } else { "single tokens" });
        // A value that is rounded otherwise differs by a hundredth and more.
        report.compare(context, name, 1e-10, |context| stored(context, is_prompt));
    }
}

/// All finite halves; the middles of two neighbours of the format, and the singles before and after them. Zeros follow
/// to whole heads.
fn values() -> Vec<f32> {
    let halves = (0..=u16::MAX).map(|bits| f16::from_bits(bits).to_f32()).filter(|half| half.is_finite());
    let middles = (0..0x7E).flat_map(|bits| {
        let [below, above] = [bits, bits + 1].map(|bits| E4m3::from_bits(bits).to_f32());
        let middle = f32::midpoint(below, above);
        [middle.next_down(), middle, middle.next_up()].into_iter().flat_map(|value| [value, -value])
    });
    let mut values: Vec<f32> = halves.chain(middles).collect();
    values.resize(values.len().next_multiple_of(HEAD_DIM), 0.0);
    values
}

/// The values of attention in the order of [`values`], each by itself.
fn stored(context: &Context, is_prompt: bool) -> Result<Rows> {
    let values = values();
    let num_tokens = values.len() / HEAD_DIM;
    let mut qkv = vec![0.0; 3 * values.len()];
    for (token, value) in qkv.chunks_exact_mut(3 * HEAD_DIM).zip(values.chunks_exact(HEAD_DIM)) {
        token[2 * HEAD_DIM..].copy_from_slice(value);
    }
    // A prompt whose tokens see themselves alone, or sequences of one token with a block each.
    let (len, num_sequences) = if is_prompt { (num_tokens, 1) } else { (1, num_tokens) };
    let blocks_each = len.div_ceil(BLOCK_SIZE);
    let mut metadata = AttentionMetadata { block_size: BLOCK_SIZE, ..Default::default() };
    metadata.clear();
    for sequence in 0..num_sequences {
        let first = sequence * blocks_each;
        metadata.slot_mapping.extend(first * BLOCK_SIZE..first * BLOCK_SIZE + len);
        metadata.query_start_loc.push(metadata.slot_mapping.len());
        metadata.seq_lens.push(len);
        metadata.modes.push(RowMode::of(len));
        metadata.block_tables.extend((first..first + blocks_each).map(|block| block as u32));
        metadata.block_table_starts.push(metadata.block_tables.len());
    }
    let heads = AttentionHeads::new(1, 1, HEAD_DIM);
    let spec = AttentionSpec { window: is_prompt.then_some(1), ..AttentionSpec::plain(heads, 1.0) };
    let limits = AttentionLimits {
        heads,
        max_window: spec.window,
        max_model_len: len,
        max_num_tokens: num_tokens,
        max_num_rows: num_sequences,
    };
    let (config, num_blocks) = (one_layer(1, 1, HEAD_DIM), num_sequences * blocks_each);
    let mut cache = KvCache::new(context, &config, num_blocks, BLOCK_SIZE, KvCacheDType::Fp8E4m3)?;
    let mut scratch = AttentionScratch::new(context, limits)?;
    let mut table = RopeTable::new(context, RopeStyle::HalfSplit, Vec::new(), 1.0, len)?;
    table.extend_to(len)?;
    let mut qkv = buffer(context, &qkv, 3 * HEAD_DIM, num_tokens)?;
    let mut out = unwritten(context, HEAD_DIM, num_tokens)?;
    let positions: Vec<u32> = (0..num_tokens).map(|token| (token % len) as u32).collect();
    let mut inputs = DeviceInputs::new(context, &limits, BLOCK_SIZE)?;
    let step = StepInputs::new(&positions, &positions, &[], &metadata);
    let step = inputs.upload(context, step, &cache)?;
    rope_kv_write(context, &mut qkv, &step, None, &table, &mut cache, 0)?;
    paged_attention(context, &mut scratch, &spec, &qkv, &cache, 0, &step, None, &mut out)?;
    Ok(Rows { values: out.read_exact(num_tokens)?, width: 1 })
}
