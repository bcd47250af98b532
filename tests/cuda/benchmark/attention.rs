//! Attention over the paged cache.

use tinyvllm::config::RopeStyle;
use tinyvllm::ops::{
    AttentionHeads, AttentionLimits, AttentionScratch, AttentionSpec, Buffer, Context, DeviceInputs, KvCache,
    KvCacheDType, RopeTable, StepInputs, paged_attention, rope_kv_write,
};
use tinyvllm::self_test::one_layer;
use tinyvllm::{Error, Result};

use super::{BLOCK_SIZE, Bench, filled, step};

/// Keys and values of this many bytes are not in a cache of the device when their turn comes again.
const COLD_BYTES: usize = 128 << 20;

/// Tokens that are put into the cache at a time.
const CHUNK: usize = 512;

/// The heads of a model.
#[derive(Debug, Clone, Copy)]
struct Heads {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

const LLAMA_3_8B: Heads = Heads { num_heads: 32, num_kv_heads: 8, head_dim: 128 };
const TINY_LLAMA: Heads = Heads { num_heads: 32, num_kv_heads: 4, head_dim: 64 };

impl Heads {
    /// Bytes of the keys and values of a token.
    fn bytes_per_token(self, dtype: KvCacheDType) -> usize {
        2 * self.num_kv_heads * dtype.row_bytes(self.head_dim)
    }

    fn limits(self, max_len: usize, max_num_tokens: usize, max_num_rows: usize) -> AttentionLimits {
        AttentionLimits {
            heads: AttentionHeads::new(self.num_heads, self.num_kv_heads, self.head_dim),
            max_window: None,
            max_model_len: max_len,
            max_num_tokens,
            max_num_rows,
        }
    }

    fn queries(self, context: &Context, num_tokens: usize) -> Result<Buffer> {
        filled(context, num_tokens, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim)
    }

    /// The cache of this many sequences of this length.
    fn cache(
        self,
        context: &Context,
        num_sequences: usize,
        len: usize,
        dtype: KvCacheDType,
    ) -> Result<KvCache> {
        let config = one_layer(self.num_heads, self.num_kv_heads, self.head_dim);
        let num_blocks = num_sequences * len.div_ceil(BLOCK_SIZE);
        let mut cache = KvCache::new(context, &config, num_blocks, BLOCK_SIZE, dtype)?;
        let frequencies = (0..self.head_dim / 2).map(|pair| 0.3 / (pair + 1) as f32).collect();
        let mut table = RopeTable::new(context, RopeStyle::HalfSplit, frequencies, 1.0, len)?;
        table.extend_to(len)?;
        let limits = self.limits(len, CHUNK, 1);
        let mut inputs = DeviceInputs::new(context, &limits, BLOCK_SIZE)?;
        for sequence in 0..num_sequences {
            for first in (0..len).step_by(CHUNK) {
                let end = len.min(first + CHUNK);
                let metadata = step(&[sequence], num_sequences, first, end);
                let positions: Vec<u32> = (first as u32..end as u32).collect();
                let lists = StepInputs::new(&positions, &positions, &[], &metadata);
                let mut qkv = self.queries(context, end - first)?;
                let lists = inputs.upload(context, lists, &cache)?;
                rope_kv_write(context, &mut qkv, &lists, None, &table, &mut cache, 0)?;
            }
        }
        Ok(cache)
    }
}

impl Bench<'_> {
    /// Attention of one token of many sequences, of one token of one sequence, and of a prompt.
    pub(super) fn attention(&mut self) -> Result<()> {
        let share = self.decode(LLAMA_3_8B, 32, 8192, KvCacheDType::F16)?;
        self.shares.push(share);
        for (heads, num_rows, len) in [
            (LLAMA_3_8B, 32, 1024),
            (LLAMA_3_8B, 1, 4096),
            (TINY_LLAMA, 32, 4000),
            (TINY_LLAMA, 1, 4000),
            (TINY_LLAMA, 1, 128),
        ] {
            self.decode(heads, num_rows, len, KvCacheDType::F16)?;
        }
        for (heads, num_rows, len) in [(LLAMA_3_8B, 64, 4000), (TINY_LLAMA, 64, 4000)] {
            for dtype in KvCacheDType::ALL.into_iter().filter(|dtype| *dtype != KvCacheDType::F32) {
                self.decode(heads, num_rows, len, dtype)?;
            }
        }
        Ok(())
    }

    /// One token of each of some sequences of this length; gives the name and the share of the bandwidth.
    fn decode(
        &mut self,
        heads: Heads,
        num_rows: usize,
        len: usize,
        dtype: KvCacheDType,
    ) -> Result<(String, f64)> {
        let num_bytes = num_rows * len * heads.bytes_per_token(dtype);
        // Each call is of other sequences.
        let num_calls = COLD_BYTES.div_ceil(num_bytes);
        let num_sequences = num_rows * num_calls;
        let cache = heads.cache(&self.context, num_sequences, len, dtype)?;
        let limits = heads.limits(len, num_rows, num_rows);
        let mut scratch = AttentionScratch::new(&self.context, limits)?;
        let spec = AttentionSpec::plain(limits.heads, 1.0 / (heads.head_dim as f64).sqrt());
        let qkv = heads.queries(&self.context, num_rows)?;
        let mut out = Buffer::new(&self.context, num_rows, heads.num_heads * heads.head_dim)?;
        let sequences: Vec<usize> = (0..num_sequences).collect();
        let steps = sequences.chunks(num_rows).map(|rows| step(rows, num_sequences, len - 1, len));
        let steps: Vec<_> = steps.collect();
        let mut inputs = (0..num_calls)
            .map(|_| DeviceInputs::new(&self.context, &limits, BLOCK_SIZE))
            .collect::<Result<Vec<_>>>()?;
        let last = vec![len as u32 - 1; num_rows];
        let lists = (steps.iter().zip(&mut inputs))
            .map(|(metadata, inputs)| {
                inputs.upload(&self.context, StepInputs::new(&last, &last, &[], metadata), &cache)
            })
            .collect::<Result<Vec<_>>>()?;
        let seconds = self.seconds(num_calls.max(20), |index| {
            let lists = &lists[index % num_calls];
            paged_attention(&self.context, &mut scratch, &spec, &qkv, &cache, 0, lists, None, &mut out)
        })?;
        let operations = 4 * num_rows * len * heads.num_heads * heads.head_dim;
        let Heads { num_heads, num_kv_heads, head_dim } = heads;
        let name = format!(
            "attention {dtype}, {num_rows} × {len} tokens, {num_heads} over {num_kv_heads} of {head_dim}"
        );
        let share = self.line(&name, seconds, num_bytes as f64, operations as f64);
        if out.read(num_rows, |rows| rows.iter().all(|value| value.is_finite()))? {
            Ok((name, share))
        } else {
            Err(Error::internal(format!("{name}: not finite, though keys and values are")))
        }
    }
}
