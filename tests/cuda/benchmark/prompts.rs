//! Attention of prompts.

use tinyvllm::config::RopeStyle;
use tinyvllm::ops::{
    AttentionHeads, AttentionLimits, AttentionScratch, AttentionSpec, Buffer, DeviceInputs, KvCache,
    KvCacheDType, RopeTable, StepInputs, paged_attention, rope_kv_write,
};
use tinyvllm::self_test::one_layer;
use tinyvllm::{Error, Result};

use super::{BLOCK_SIZE, Bench, filled, step};

const PROMPT: usize = 2048;
const NUM_PROMPTS: usize = 8;

impl Bench<'_> {
    /// One prompt and several in a step, of Llama 3 8B and of TinyLlama.
    pub(super) fn prompts(&mut self) -> Result<()> {
        for (num_heads, num_kv_heads, head_dim, dtype) in [
            (32, 8, 128, KvCacheDType::F16),
            (32, 8, 128, KvCacheDType::Bf16),
            (32, 4, 64, KvCacheDType::F16),
        ] {
            self.prompts_of(num_heads, num_kv_heads, head_dim, dtype)?;
        }
        Ok(())
    }

    fn prompts_of(
        &mut self,
        num_heads: usize,
        num_kv_heads: usize,
        head_dim: usize,
        dtype: KvCacheDType,
    ) -> Result<()> {
        let max_num_tokens = NUM_PROMPTS * PROMPT;
        let heads = AttentionHeads::new(num_heads, num_kv_heads, head_dim);
        let spec = AttentionSpec::plain(heads, 1.0 / (head_dim as f64).sqrt());
        let limits = AttentionLimits {
            heads,
            max_window: None,
            max_model_len: PROMPT,
            max_num_tokens,
            max_num_rows: NUM_PROMPTS,
        };
        let config = one_layer(num_heads, num_kv_heads, head_dim);
        let num_blocks = NUM_PROMPTS * PROMPT / BLOCK_SIZE;
        let mut cache = KvCache::new(&self.context, &config, num_blocks, BLOCK_SIZE, dtype)?;
        let frequencies = (0..head_dim / 2).map(|pair| 0.3 / (pair + 1) as f32).collect();
        let mut table = RopeTable::new(&self.context, RopeStyle::HalfSplit, frequencies, 1.0, PROMPT)?;
        table.extend_to(PROMPT)?;
        let mut qkv = filled(&self.context, max_num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)?;
        let mut out = Buffer::new(&self.context, max_num_tokens, num_heads * head_dim)?;
        let mut scratch = AttentionScratch::new(&self.context, limits)?;
        for num_prompts in [NUM_PROMPTS, 1] {
            let sequences: Vec<usize> = (0..num_prompts).collect();
            let metadata = step(&sequences, NUM_PROMPTS, 0, PROMPT);
            let positions: Vec<u32> = sequences.iter().flat_map(|_| 0..PROMPT as u32).collect();
            let mut inputs = DeviceInputs::new(&self.context, &limits, BLOCK_SIZE)?;
            let lists = StepInputs::new(&positions, &positions, &[], &metadata);
            let lists = inputs.upload(&self.context, lists, &cache)?;
            if num_prompts == NUM_PROMPTS {
                rope_kv_write(&self.context, &mut qkv, &lists, None, &table, &mut cache, 0)?;
            }
            let seconds = self.seconds(5, |_| {
                paged_attention(&self.context, &mut scratch, &spec, &qkv, &cache, 0, &lists, None, &mut out)
            })?;
            let num = num_prompts as f64;
            let bytes = (2 * PROMPT * num_kv_heads * dtype.row_bytes(head_dim)) as f64;
            let operations = (2 * num_heads * head_dim * PROMPT * (PROMPT + 1)) as f64;
            let name = format!(
                "{num_prompts} × {PROMPT} tokens, {num_heads} over {num_kv_heads} of {head_dim}, {dtype}"
            );
            self.line(&name, seconds, num * bytes, num * operations);
        }
        if out.read(1, |row| row.iter().all(|value| value.is_finite()))? {
            Ok(())
        } else {
            Err(Error::internal("attention of finite values is not finite"))
        }
    }
}
