//! Attention over latent rows, and the matmuls of experts.

use tinyvllm::Result;
use tinyvllm::config::{Activation, ExpertsConfig, LatentAttentionConfig, ModelConfig, RopeConfig, Scoring};
use tinyvllm::ops::{
    AttentionHeads, AttentionLimits, AttentionScratch, AttentionSpec, Buffer, Context, DeviceInputs,
    ExpandedLimits, ExpandedScratch, Heads, KvCache, KvCacheDType, Linear, LinearScratch, LinearStack,
    Matrix, MatrixStack, RmsNorm, RopeTable, Router, Routing, StepInputs, Vector, expanded_attention,
    experts_gated, experts_residual, heads_linear, latent_kv_write, paged_attention, route,
};
use tinyvllm::self_test::one_layer;
use tinyvllm::weights::DType;

use super::{BLOCK_SIZE, Bench, CONTEXT, NUM_SEQUENCES, filled, noise, noise_bytes, step};

const NUM_HEADS: usize = 16;
const RANK: usize = 512;
const ROTATED: usize = 64;
const ROW_DIM: usize = RANK + ROTATED;
const QUERY_DIM: usize = 192;
const NOPE: usize = 128;

/// Those of DeepSeek-V2-Lite.
const HIDDEN: usize = 2048;
const INTERMEDIATE: usize = 1408;
const NUM_EXPERTS: usize = 64;
const NUM_CHOSEN: usize = 6;

fn matrices(context: &Context, dtype: DType, num: usize, rows: usize, cols: usize) -> Result<Vec<Matrix>> {
    let len = dtype.row_bytes(cols)? * rows;
    let own =
        |index: usize| Matrix::from_bytes(context, dtype, &noise_bytes(index as u64 + 1, len), rows, cols);
    (0..num).map(own).collect()
}

fn stack(context: &Context, dtype: DType, num: usize, rows: usize, cols: usize) -> Result<MatrixStack> {
    MatrixStack::new(context, matrices(context, dtype, num, rows, cols)?)
}

impl Bench<'_> {
    /// Attention of one token of many sequences and of one, and of a prompt; and the matmuls around it.
    pub(super) fn latent(&mut self) -> Result<()> {
        const PROMPT: usize = 2048;
        let latent = LatentAttentionConfig {
            q_lora_rank: None,
            kv_lora_rank: RANK,
            qk_nope_head_dim: NOPE,
            v_head_dim: NOPE,
            softmax_scale: 0.1,
            lora_norm_eps: 1e-6,
        };
        let layer = one_layer(NUM_HEADS, 1, QUERY_DIM);
        let rope = RopeConfig { dim: ROTATED, ..layer.rope.clone() };
        let config = ModelConfig { latent_attention: Some(latent), rope, ..layer };
        let num_blocks = NUM_SEQUENCES * CONTEXT / BLOCK_SIZE;
        let mut cache = KvCache::new(&self.context, &config, num_blocks, BLOCK_SIZE, KvCacheDType::F16)?;
        let heads =
            AttentionHeads { num_heads: NUM_HEADS, num_kv_heads: 1, head_dim: ROW_DIM, value_dim: RANK };
        let spec = AttentionSpec::plain(heads, 0.1);
        let limits = AttentionLimits {
            heads,
            max_window: None,
            max_model_len: CONTEXT,
            max_num_tokens: CONTEXT,
            max_num_rows: NUM_SEQUENCES,
        };
        let mut scratch = AttentionScratch::new(&self.context, limits)?;
        let frequencies = (0..ROTATED / 2).map(|pair| 0.3 / (pair + 1) as f32).collect();
        let mut table = RopeTable::new(&self.context, layer.rope.style, frequencies, 1.0, CONTEXT)?;
        table.extend_to(CONTEXT)?;
        let norm = RmsNorm { weight: Vector::new(&self.context, noise(3, RANK))?, eps: 1e-6 };
        let rows = filled(&self.context, CONTEXT, NUM_HEADS * QUERY_DIM + ROW_DIM)?;
        let mut absorbed = filled(&self.context, CONTEXT, NUM_HEADS * ROW_DIM)?;
        let mut out = Buffer::new(&self.context, CONTEXT, NUM_HEADS * RANK)?;
        let positions: Vec<u32> = (0..CONTEXT as u32).collect();
        let queries = Heads { rows: &rows, stride: QUERY_DIM };
        for sequence in 0..NUM_SEQUENCES {
            let metadata = step(&[sequence], NUM_SEQUENCES, 0, CONTEXT);
            let mut inputs = DeviceInputs::new(&self.context, &limits, BLOCK_SIZE)?;
            let lists = StepInputs::new(&positions, &positions, &[], &metadata);
            let lists = inputs.upload(&self.context, lists, &cache)?;
            latent_kv_write(
                &self.context,
                queries,
                &rows,
                &lists,
                &norm,
                &table,
                &mut cache,
                0,
                &mut absorbed,
            )?;
        }
        let row_bytes = (CONTEXT * ROW_DIM * 2) as f64;
        let operations = (2 * NUM_HEADS * (ROW_DIM + RANK) * CONTEXT) as f64;
        let all: Vec<usize> = (0..NUM_SEQUENCES).collect();
        let last = [CONTEXT as u32 - 1; NUM_SEQUENCES];
        let mut run = |name: &str, sequences: &[usize], share: (f64, f64)| {
            let metadata = step(sequences, NUM_SEQUENCES, CONTEXT - 1, CONTEXT);
            let mut inputs = DeviceInputs::new(&self.context, &limits, BLOCK_SIZE)?;
            let ids = &last[..sequences.len()];
            let lists = StepInputs::new(ids, ids, &[], &metadata);
            let lists = inputs.upload(&self.context, lists, &cache)?;
            let seconds = self.seconds(20, |_| {
                paged_attention(
                    &self.context,
                    &mut scratch,
                    &spec,
                    &absorbed,
                    &cache,
                    0,
                    &lists,
                    None,
                    &mut out,
                )
            })?;
            Ok::<_, tinyvllm::Error>(self.line(name, seconds, share.0, share.1))
        };
        let num = NUM_SEQUENCES as f64;
        let name = format!("latent attention, {NUM_SEQUENCES} × {CONTEXT} tokens, {NUM_HEADS} heads");
        let share = run(&name, &all, (num * row_bytes, num * operations))?;
        run(&format!("latent attention, 1 × {CONTEXT} tokens"), &all[..1], (row_bytes, operations))?;
        self.shares.push((name, share));

        let keys = stack(&self.context, DType::Q8_0, NUM_HEADS, RANK, NOPE)?;
        let keys = keys
            .with_transposed(&self.context, matrices(&self.context, DType::Q8_0, NUM_HEADS, NOPE, RANK)?)?;
        let values = stack(&self.context, DType::Q8_0, NUM_HEADS, NOPE, RANK)?;
        let mut expanded = ExpandedScratch::new(
            &self.context,
            ExpandedLimits {
                num_heads: NUM_HEADS,
                rank: RANK,
                nope: NOPE,
                rotated: ROTATED,
                value_dim: NOPE,
                scale: 0.1,
                max_model_len: CONTEXT,
                max_num_tokens: CONTEXT,
                max_num_rows: NUM_SEQUENCES,
            },
        )?;
        let mut out = Buffer::new(&self.context, CONTEXT, NUM_HEADS * NOPE)?;
        for (first, end) in [(0, PROMPT), (CONTEXT - 512, CONTEXT)] {
            let metadata = step(&all[..1], NUM_SEQUENCES, first, end);
            let mut inputs = DeviceInputs::new(&self.context, &limits, BLOCK_SIZE)?;
            let ids = &positions[first..end];
            let lists = StepInputs::new(ids, ids, &[], &metadata);
            let lists = inputs.upload(&self.context, lists, &cache)?;
            let seconds = self.seconds(3, |_| {
                let (scratch, out) = (&mut expanded, &mut out);
                expanded_attention(
                    &self.context,
                    scratch,
                    queries,
                    &absorbed,
                    &cache,
                    0,
                    &lists,
                    &keys,
                    &values,
                    out,
                )
            })?;
            let num_keys = (first + 1..=end).sum::<usize>();
            let multiplications = (QUERY_DIM + NOPE) * num_keys + 2 * NOPE * RANK * end;
            let name = format!("expanded attention, tokens {first}..{end}");
            let bytes = row_bytes / CONTEXT as f64 * end as f64;
            self.line(&name, seconds, bytes, (2 * NUM_HEADS * multiplications) as f64);
        }

        for dtype in [DType::Q4_0, DType::Q8_0, DType::F16] {
            for (what, inputs, outputs) in [("into", NOPE, RANK), ("out of", RANK, NOPE)] {
                // As many as no cache holds.
                let num_stacks = (96 << 20) / (NUM_HEADS * dtype.row_bytes(inputs)? * outputs);
                let stacks = (0..num_stacks)
                    .map(|_| stack(&self.context, dtype, NUM_HEADS, outputs, inputs))
                    .collect::<Result<Vec<_>>>()?;
                for num_rows in [1, 512] {
                    let mut scratch = LinearScratch::new(&self.context, NUM_HEADS * num_rows, inputs)?;
                    let x = filled(&self.context, num_rows, NUM_HEADS * inputs)?;
                    let mut out = Buffer::new(&self.context, num_rows, NUM_HEADS * outputs)?;
                    let x = Heads { rows: &x, stride: inputs };
                    let seconds = self.seconds(2 * num_stacks, |index| {
                        let stack = &stacks[index % num_stacks];
                        heads_linear(&self.context, &mut scratch, 0..num_rows, x, stack, &mut out, outputs)
                    })?;
                    let name = format!("heads {what} the latent row, {dtype}, {num_rows} rows");
                    let operations = (2 * NUM_HEADS * inputs * outputs * num_rows) as f64;
                    self.line(&name, seconds, stacks[0].num_bytes() as f64, operations);
                }
            }
        }
        Ok(())
    }

    /// The experts of one token and of more.
    pub(super) fn experts(&mut self) -> Result<()> {
        const NUM_LAYERS: usize = 6;
        let dtype = DType::Q4_0;
        let config = ExpertsConfig {
            num_dense_layers: 0,
            num_experts: NUM_EXPERTS,
            num_experts_per_tok: NUM_CHOSEN,
            intermediate_size: INTERMEDIATE,
            shared_intermediate_size: None,
            scoring: Scoring::Softmax,
            has_selection_bias: false,
            has_router_bias: false,
            has_biases: false,
            is_interleaved: false,
            num_groups: 1,
            num_groups_per_tok: 1,
            normalize: false,
            scale: 1.0,
        };
        let layers = (0..NUM_LAYERS)
            .map(|_| {
                let own = |rows: usize, cols: usize| {
                    let weight = stack(&self.context, dtype, NUM_EXPERTS, rows, cols)?;
                    Ok::<_, tinyvllm::Error>(LinearStack::unbiased(weight))
                };
                Ok((own(INTERMEDIATE, HIDDEN)?, own(INTERMEDIATE, HIDDEN)?, own(HIDDEN, INTERMEDIATE)?))
            })
            .collect::<Result<Vec<_>>>()?;
        let weights: Vec<u8> = noise(9, NUM_EXPERTS * HIDDEN).iter().flat_map(|v| v.to_le_bytes()).collect();
        let weight = Matrix::from_bytes(&self.context, DType::F32, &weights, NUM_EXPERTS, HIDDEN)?;
        let router = Router {
            linear: Linear { weight, bias: None },
            selection_bias: None,
            config: config.clone(),
            num_shared: 0,
        };
        let norm = RmsNorm { weight: Vector::new(&self.context, noise(3, HIDDEN))?, eps: 1e-6 };
        for num_rows in [1, 4, 8, 32, 512, 4096] {
            let max_slots = Routing::max_slots(&config, num_rows);
            let mut routing = Routing::new(&self.context, &config, num_rows)?;
            let mut scratch = LinearScratch::new(&self.context, max_slots, HIDDEN.max(INTERMEDIATE))?;
            let mut x = filled(&self.context, num_rows, HIDDEN)?;
            let mut inside = Buffer::new(&self.context, max_slots, INTERMEDIATE)?;
            let mut projected = Buffer::new(&self.context, max_slots, HIDDEN)?;
            let context = &self.context;
            let num_calls = if num_rows < 100 { 4 * NUM_LAYERS } else { NUM_LAYERS };
            let routed = self.seconds(num_calls, |_| {
                route(context, &mut scratch, num_rows, &x, &norm, &router, &mut routing)
            })?;
            let gated = self.seconds(num_calls, |index| {
                let (gate, up, _) = &layers[index % NUM_LAYERS];
                let activation = Activation::Silu;
                experts_gated(context, &mut scratch, &routing, &x, &norm, gate, up, activation, &mut inside)
            })?;
            let down = self.seconds(num_calls, |index| {
                let (_, _, down) = &layers[index % NUM_LAYERS];
                experts_residual(context, &mut scratch, &routing, &inside, down, &mut projected, &mut x)
            })?;
            let of_one = dtype.row_bytes(HIDDEN)? * INTERMEDIATE;
            // Those that are chosen, if tokens choose by themselves.
            let missed = (1.0 - NUM_CHOSEN as f64 / NUM_EXPERTS as f64).powi(num_rows as i32);
            let bytes = NUM_EXPERTS as f64 * (1.0 - missed) * of_one as f64;
            let operations = (2 * num_rows * NUM_CHOSEN * HIDDEN * INTERMEDIATE) as f64;
            let what = format!("{NUM_CHOSEN} of {NUM_EXPERTS} experts, {num_rows} rows");
            self.line(&format!("choice of {what}"), routed, (4 * NUM_EXPERTS * HIDDEN) as f64, 0.0);
            let share = self.line(&format!("gate and up of {what}"), gated, 2.0 * bytes, 2.0 * operations);
            let down_share = self.line(&format!("down and sum of {what}"), down, bytes, operations);
            if num_rows == 1 {
                self.shares
                    .push((format!("experts of one token, {dtype}"), (2.0 * share + down_share) / 3.0));
            }
        }
        Ok(())
    }
}
