//! Rotation, the write to the cache, and attention over it: checked together, because attention reads what the cache
//! holds.

use std::fmt;
use std::ops::Range;

use super::oracle::{Rows, buffer, noise, rms_norm, unwritten};
use super::{Effort, Report};
use crate::Result;
use crate::config::{
    ARCHITECTURES, Activation, LayerAttention, ModelConfig, QueryGrowth, RopeConfig, RopeScaling, RopeStyle,
};
use crate::ops::{
    AttentionHeads, AttentionLimits, AttentionMetadata, AttentionScratch, AttentionSpec, Buffer, Context,
    DeviceInputs, HeadNorms, KvCache, KvCacheDType, RmsNorm, RopeTable, RowMode, StepInputs, Vector,
    paged_attention, rope_attention, rope_kv_write,
};

const EPS: f32 = 1e-6;

/// Sequences that compute their first tokens in one step and some more in the next, over shuffled blocks.
#[derive(Debug, Clone)]
struct Case {
    heads: (usize, usize),
    head_dim: usize,
    num_pairs: usize,
    style: RopeStyle,
    has_norms: bool,
    /// Whether queries grow with their position.
    grows: bool,
    window: Option<usize>,
    has_sinks: bool,
    soft_cap: Option<f64>,
    dtype: KvCacheDType,
    block_size: usize,
    /// The factor of queries, keys and values, and a further one of queries.
    size: f32,
    query_size: f32,
    /// Whether the second step reads copies of all blocks.
    is_forked: bool,
    /// Whether the first step only fills the cache.
    is_filled: bool,
    /// Whether unrotated queries attend to the same positions again, so that a wrong write of the second step to the
    /// cache shows.
    is_read_again: bool,
    /// Tokens of each sequence in each step.
    sequences: Vec<[usize; 2]>,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            heads: (4, 2),
            head_dim: 64,
            num_pairs: 32,
            style: RopeStyle::HalfSplit,
            has_norms: false,
            grows: false,
            window: None,
            has_sinks: false,
            soft_cap: None,
            dtype: KvCacheDType::F16,
            block_size: 16,
            size: 1.0,
            query_size: 1.0,
            is_forked: false,
            is_filled: false,
            is_read_again: false,
            sequences: vec![[37, 1], [5, 1], [0, 1], [40, 1]],
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { heads, head_dim, num_pairs, dtype, block_size, sequences, .. } = self;
        write!(
            f,
            "attention {dtype}, {} heads over {} of {head_dim}, blocks of {block_size}",
            heads.0, heads.1
        )?;
        if *num_pairs != head_dim / 2 {
            write!(f, ", {num_pairs} pairs")?;
        }
        for (is_so, what) in [
            (self.has_norms, "norms"),
            (self.grows, "growing queries"),
            (self.style == RopeStyle::Interleaved, "interleaved"),
            (self.size < 1.0, "small heads"),
            (self.query_size > 1.0, "large queries"),
            (self.is_forked, "copied blocks"),
            (self.is_filled, "a filled cache"),
            (self.is_read_again, "read again"),
        ] {
            if is_so {
                write!(f, ", {what}")?;
            }
        }
        if let Some(window) = self.window {
            write!(f, ", window {window}")?;
        }
        if self.has_sinks {
            write!(f, ", sinks")?;
        }
        if let Some(cap) = self.soft_cap {
            write!(f, ", scores up to {cap}")?;
        }
        write!(f, ", tokens {sequences:?}")
    }
}

pub(super) fn run(context: &Context, effort: Effort, report: &mut dyn Report) {
    let mut run_in = |context: &Context, variant: &str, case: &Case| {
        let name = format!("{case}{variant}");
        report.compare(context, name, case.limit(context), |context| case.run(context));
    };
    for (variant, context) in &context.alternatives() {
        // Tokens after others, of heads that fill their tiles and of heads that do not.
        for (head_dim, dtype) in [
            (80, KvCacheDType::F16),
            (128, KvCacheDType::F16),
            (112, KvCacheDType::Q8_0),
            (120, KvCacheDType::Fp8E4m3),
        ] {
            let sequences = vec![[40, 33], [0, 9]];
            let case = Case { dtype, head_dim, num_pairs: head_dim / 2, sequences, ..Case::default() };
            run_in(context, &format!(", {variant}"), &case);
        }
    }
    let mut run = |case: &Case| run_in(context, "", case);
    for dtype in KvCacheDType::ALL {
        run(&Case { dtype, ..Case::default() });
        for head_dim in [16, 24, 64, 128, 256] {
            for heads in [(2, 2), (4, 2), (4, 1)] {
                let sequences = vec![[20, 1], [0, 1]];
                run(&Case { dtype, heads, head_dim, num_pairs: head_dim / 2, sequences, ..Case::default() });
            }
        }
        // Prompts with heads of more than 128 values.
        for head_dim in [160, 256] {
            let case = Case { dtype, heads: (2, 1), head_dim, num_pairs: head_dim / 2, ..Case::default() };
            run(&Case { sequences: vec![[5, 20]], ..case });
        }
        // More heads for a key than a simdgroup takes.
        run(&Case { dtype, heads: (8, 1), head_dim: 16, num_pairs: 8, ..Case::default() });
        run(&Case { dtype, is_forked: true, block_size: 8, ..Case::default() });
    }
    // More heads for a key than there are simdgroups for, and numbers that are no powers of two.
    for heads in [(16, 1), (6, 2), (7, 1)] {
        run(&Case { heads, block_size: 24, ..Case::default() });
    }
    for (head_dim, num_pairs) in [(24, 12), (40, 8), (80, 40), (96, 48)] {
        for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
            run(&Case { head_dim, num_pairs, style, has_norms: true, ..Case::default() });
        }
    }
    // Norms of heads so small that the epsilon shows.
    run(&Case { dtype: KvCacheDType::F32, has_norms: true, size: 1e-3, ..Case::default() });
    // Scores of some hundreds, of both signs.
    run(&Case { dtype: KvCacheDType::F32, query_size: 1e3, ..Case::default() });
    if context.has_tensor_cores() {
        // Rotation within attention: fewer heads than warps, enough that warps have a second one, and several chunks of
        // heads, of which the first writes to the cache.
        for (dtype, heads, head_dim, num_pairs, style) in [
            (KvCacheDType::F16, (6, 2), 128, 64, RopeStyle::HalfSplit),
            (KvCacheDType::Bf16, (7, 1), 96, 20, RopeStyle::HalfSplit),
            (KvCacheDType::F16, (16, 2), 80, 40, RopeStyle::Interleaved),
            (KvCacheDType::Bf16, (9, 1), 64, 32, RopeStyle::HalfSplit),
            (KvCacheDType::F16, (8, 1), 256, 128, RopeStyle::HalfSplit),
            (KvCacheDType::Bf16, (2, 2), 176, 44, RopeStyle::Interleaved),
            (KvCacheDType::Q8_0, (6, 2), 128, 64, RopeStyle::HalfSplit),
            (KvCacheDType::Q8_0, (7, 1), 80, 20, RopeStyle::Interleaved),
            (KvCacheDType::Q8_0, (9, 1), 64, 32, RopeStyle::HalfSplit),
            (KvCacheDType::Q8_0, (8, 1), 256, 128, RopeStyle::HalfSplit),
            (KvCacheDType::Q8_0, (2, 2), 144, 44, RopeStyle::Interleaved),
            (KvCacheDType::Fp8E4m3, (6, 2), 128, 64, RopeStyle::HalfSplit),
            (KvCacheDType::Fp8E4m3, (9, 1), 80, 20, RopeStyle::Interleaved),
            (KvCacheDType::Fp8E4m3, (2, 2), 176, 44, RopeStyle::HalfSplit),
        ] {
            let sequences = vec![[16, 1], [0, 1], [30, 1], [15, 1], [540, 1]];
            let case = Case { dtype, heads, head_dim, num_pairs, style, sequences, ..Case::default() };
            run(&Case { has_norms: true, is_filled: true, is_read_again: true, block_size: 24, ..case });
        }
        // The running results of a warp are negligible compared with its next tile, and the reverse.
        for dtype in KvCacheDType::ALL.into_iter().filter(|dtype| *dtype != KvCacheDType::F32) {
            let sequences = vec![[400, 1], [33, 1]];
            run(&Case { dtype, query_size: 300.0, is_filled: true, sequences, ..Case::default() });
        }
    }
    // Chunks of prompts, of one token up to more than a tile, in one step with tokens that are generated.
    let sequences = vec![[3, 50], [33, 2], [30, 1], [0, 12]];
    run(&Case { sequences: sequences.clone(), block_size: 8, ..Case::default() });
    for window in [1, 7, 32] {
        run(&Case { window: Some(window), sequences: sequences.clone(), ..Case::default() });
    }
    // More than one KV split of the context, whole ones too, in one step with a chunk of a prompt.
    let small = Case { head_dim: 16, num_pairs: 8, heads: (2, 2), ..Case::default() };
    let splits = Case { sequences: vec![[520, 1], [3, 10], [255, 1], [10, 1], [256, 1]], ..small };
    run(&splits);
    run(&Case { dtype: KvCacheDType::F32, query_size: 1e3, heads: (6, 2), ..splits.clone() });
    for window in [100, 300] {
        run(&Case { window: Some(window), ..splits.clone() });
    }
    // Sinks and caps: for contexts with one and with several KV splits, for prompts and for single tokens.
    for (has_sinks, soft_cap) in [(true, None), (false, Some(2.0)), (true, Some(30.0))] {
        for dtype in KvCacheDType::ALL {
            let sequences = vec![[37, 1], [0, 12], [40, 1]];
            run(&Case { has_sinks, soft_cap, dtype, heads: (6, 2), sequences, ..Case::default() });
        }
        run(&Case { has_sinks, soft_cap, ..splits.clone() });
    }
    // Queries that grow with their position, in tokens by themselves and in prompts.
    for sequences in [vec![[37, 1], [5, 1], [70, 1]], vec![[37, 30], [0, 12]]] {
        run(&Case { grows: true, has_norms: true, sequences, ..Case::default() });
    }
    // No rotation at all.
    run(&Case { num_pairs: 0, ..Case::default() });
    // Two KV splits, more values than one simdgroup merges.
    let wide = Case { dtype: KvCacheDType::F32, head_dim: 136, num_pairs: 68, ..Case::default() };
    run(&Case { sequences: vec![[270, 1], [3, 1]], ..wide });
    // More KV splits than lanes; on tensor cores too, and KV splits of more than the usual length.
    let long = Case { heads: (1, 1), is_filled: true, ..Case::default() };
    run(&Case { head_dim: 8, num_pairs: 4, sequences: vec![[8460, 1]], ..long.clone() });
    let sequences = vec![[8460, 1], [8100, 1]];
    run(&Case { head_dim: 16, num_pairs: 8, sequences, ..long.clone() });
    // Contexts of about a tile, of about the longest one without splits, and of about whole KV splits; with windows
    // whose first positions matter, at the start of KV splits.
    let num_windows = if context.has_tensor_cores() { 4 } else { 1 };
    let sequences: Vec<_> = [14, 15, 16, 511, 512, 767, 768].into_iter().map(|len| [len, 1]).collect();
    for (dtype, head_dim, heads, block_size, windows) in [
        (KvCacheDType::F16, 64, (8, 1), 16, [None, Some(1), Some(512), Some(520)]),
        (KvCacheDType::Bf16, 128, (3, 1), 7, [None, Some(17), Some(513), Some(600)]),
        (KvCacheDType::F16, 80, (12, 1), 16, [None, Some(100), Some(528), Some(529)]),
        (KvCacheDType::Bf16, 256, (2, 2), 32, [None, Some(256), Some(514), Some(750)]),
        (KvCacheDType::F16, 176, (16, 1), 48, [None, Some(16), Some(517), Some(700)]),
        (KvCacheDType::Q8_0, 128, (3, 1), 7, [None, Some(17), Some(513), Some(600)]),
        (KvCacheDType::Q8_0, 192, (2, 1), 16, [None, Some(256), Some(514), Some(750)]),
        (KvCacheDType::Q8_0, 16, (16, 8), 16, [None, Some(600), Some(700), Some(767)]),
        (KvCacheDType::Fp8E4m3, 96, (3, 1), 7, [None, Some(17), Some(513), Some(600)]),
        (KvCacheDType::Fp8E4m3, 208, (2, 1), 16, [None, Some(256), Some(514), Some(750)]),
    ] {
        for window in windows.into_iter().take(num_windows) {
            let sequences = sequences.clone();
            let num_pairs = head_dim / 2;
            let shape = Case { dtype, head_dim, num_pairs, heads, block_size, ..long.clone() };
            run(&Case { window, sequences, ..shape });
        }
    }
    if context.has_tensor_cores() {
        // Ends at and around those of tiles of keys, in tiles of rows that are full and that are not.
        for dtype in KvCacheDType::ALL.into_iter().filter(|dtype| *dtype != KvCacheDType::F32) {
            for (heads, head_dim) in [((8, 1), 64), ((2, 1), 72), ((4, 1), 128), ((2, 2), 192), ((3, 1), 256)]
            {
                for window in [None, Some(70)] {
                    let sequences = vec![[63, 66], [64, 65], [130, 2], [0, 129]];
                    let num_pairs = head_dim / 2;
                    let case =
                        Case { dtype, heads, head_dim, num_pairs, window, sequences, ..Case::default() };
                    run(&Case { block_size: 24, ..case });
                }
            }
        }
    }
    if effort == Effort::Full {
        let sequences = vec![[3000, 1], [1, 1], [700, 65], [2047, 1]];
        for heads in [(32, 8), (32, 4), (16, 16)] {
            run(&Case {
                heads,
                head_dim: 128,
                num_pairs: 64,
                block_size: 32,
                sequences: sequences.clone(),
                ..Case::default()
            });
        }
    }
}

/// A model of one layer with this attention and little else, to check and to measure attention with.
#[must_use]
pub fn one_layer(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> ModelConfig {
    ModelConfig {
        architecture: &ARCHITECTURES[0],
        vocab_size: 1,
        hidden_size: 1,
        num_layers: 1,
        num_nextn_layers: 0,
        num_heads,
        num_kv_heads,
        head_dim,
        intermediate_size: 1,
        rms_norm_eps: EPS,
        activation: Activation::Silu,
        rope: RopeConfig {
            theta: 1e4,
            dim: head_dim,
            style: RopeStyle::HalfSplit,
            scaling: RopeScaling::None,
            query_growth: None,
        },
        local_rope: None,
        max_position_embeddings: 1 << 16,
        usual_model_len: 1 << 16,
        context_hint: None,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        has_sinks: false,
        tie_word_embeddings: true,
        embedding_scale: 1.0,
        logits_scale: 1.0,
        norm_offset: 0.0,
        attention_scale: 1.0 / (head_dim as f64).sqrt(),
        layer_attention: LayerAttention::all(1, None),
        latent_attention: None,
        experts: None,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        notices: Vec::new(),
    }
}

impl Case {
    /// A few times the errors of the kernels. Queries are rounded to half precision where keys are in half precision, a
    /// rotated key may fall on the other side of a rounding boundary, and large scores have large errors. On tensor
    /// cores the weights of keys are rounded too: 3.8e-7 in the worst of 8,460 rows of eight values.
    fn limit(&self, context: &Context) -> f64 {
        match self.dtype {
            // The error of exponents from queries in half precision.
            KvCacheDType::F16 | KvCacheDType::Bf16 if self.query_size > 1.0 => 1e-3,
            // And a code more or less of a key, where the device's quotient falls on the other side of a half.
            KvCacheDType::Q8_0 | KvCacheDType::Fp8E4m3 if self.query_size > 1.0 => 1e-2,
            KvCacheDType::F16 if context.has_tensor_cores() => 8e-7,
            KvCacheDType::F16 => 2e-7,
            KvCacheDType::Bf16 => 2e-6,
            // A step of a group is as large for small values as for large ones.
            KvCacheDType::Q8_0 | KvCacheDType::Fp8E4m3 => 2e-5,
            KvCacheDType::F32 if self.query_size > 1.0 => 2e-7,
            // A capped score has the error of a number as large as the cap.
            KvCacheDType::F32 if self.soft_cap.is_some() => 3e-11,
            KvCacheDType::F32 => 1e-12,
        }
    }

    /// Values of one token before rotation.
    fn width(&self) -> usize {
        (self.heads.0 + 2 * self.heads.1) * self.head_dim
    }

    fn max_len(&self) -> usize {
        self.sequences.iter().map(|steps| steps[0] + steps[1]).max().unwrap_or(1).max(self.block_size)
    }

    /// Blocks of the sequences, and in front of them those that they are copied to.
    fn num_blocks(&self) -> usize {
        self.max_len().div_ceil(self.block_size) * self.sequences.len()
    }

    /// The block of a position of a sequence: neighbours in a sequence are not neighbours in the cache.
    fn block(&self, index: usize, position: usize) -> usize {
        2 * self.num_blocks() - 1 - (position / self.block_size * self.sequences.len() + index)
    }

    /// The results of attention for each token and head.
    fn run(&self, context: &Context) -> Result<Rows> {
        let tokens: Vec<Vec<f32>> = (0..self.sequences.len())
            .map(|index| {
                let mut tokens =
                    noise(100 + index as u64, self.sequences[index].iter().sum::<usize>() * self.width());
                tokens.iter_mut().for_each(|value| *value *= self.size);
                for token in tokens.chunks_exact_mut(self.width()) {
                    token[..self.heads.0 * self.head_dim]
                        .iter_mut()
                        .for_each(|value| *value *= self.query_size);
                }
                tokens
            })
            .collect();
        let mut layer = Layer::new(context, self)?;
        // Padding that a kernel reads is NaN. The definition may read more.
        if !context.is_reference() {
            layer.poison()?;
        }
        // All steps are queued before the results of any are looked at, so writing buffers, which waits, comes first.
        let mut steps = Vec::new();
        for step in 0..2 {
            let rows = self.sequences.iter().enumerate().filter(|(_, steps)| steps[step] > 0);
            let rows: Vec<(usize, Range<usize>)> =
                rows.map(|(index, steps)| (index, step * steps[0]..steps[0] + step * steps[1])).collect();
            let qkv: Vec<f32> = rows
                .iter()
                .flat_map(|(index, range)| {
                    &tokens[*index][range.start * self.width()..range.end * self.width()]
                })
                .copied()
                .collect();
            let num_tokens = qkv.len() / self.width();
            let qkv = buffer(context, &qkv, self.width(), num_tokens)?;
            let out = unwritten(context, self.heads.0 * self.head_dim, num_tokens)?;
            steps.push((rows, qkv, out, num_tokens));
        }
        let mut nothing = unwritten(context, self.width(), self.block_size)?;
        for (step, (rows, qkv, out, _)) in steps.iter_mut().enumerate() {
            if step == 1 && self.is_forked {
                layer.fork()?;
            }
            let has_results = step == 1 || !self.is_filled;
            layer.step(&layer.metadata(rows), qkv, has_results.then_some(out))?;
        }
        if let (true, Some((rows, _, _, num_tokens))) = (self.is_read_again, steps.last()) {
            let rows = rows.clone();
            let queries = buffer(context, &noise(7, num_tokens * self.width()), self.width(), *num_tokens)?;
            let mut out = unwritten(context, self.heads.0 * self.head_dim, *num_tokens)?;
            layer.attend(&layer.metadata(&rows), &queries, &mut out)?;
            steps.push((rows, queries, out, *num_tokens));
        }
        // The host continues with other steps, whose batch metadata replaces that of the first ones.
        for block in 0..3 {
            let unused = if self.is_forked { self.num_blocks() + block } else { block };
            layer.step(&layer.metadata_of_block(unused), &mut nothing, None)?;
        }
        let mut results = Rows { values: Vec::new(), width: self.head_dim };
        for (_, _, out, num_tokens) in &steps[usize::from(self.is_filled)..] {
            results.values.extend(out.read_exact(*num_tokens)?);
        }
        Ok(results)
    }
}

/// One layer of attention with its cache, for a case.
struct Layer<'a> {
    context: &'a Context,
    case: &'a Case,
    cache: KvCache,
    scratch: AttentionScratch,
    spec: AttentionSpec,
    inputs: DeviceInputs,
    table: RopeTable,
    norms: [RmsNorm; 2],
    is_forked: bool,
}

impl<'a> Layer<'a> {
    fn new(context: &'a Context, case: &'a Case) -> Result<Self> {
        let ((num_heads, num_kv_heads), head_dim, max_len) = (case.heads, case.head_dim, case.max_len());
        let num_tokens = |step: usize| case.sequences.iter().map(|steps| steps[step]).sum::<usize>();
        let heads = AttentionHeads::new(num_heads, num_kv_heads, head_dim);
        // Of about the size of scores, and one that is larger.
        let mut sinks = noise(10, num_heads);
        sinks[num_heads - 1] += 9.0;
        let spec = AttentionSpec {
            window: case.window,
            soft_cap: case.soft_cap,
            sinks: case.has_sinks.then(|| Vector::new(context, sinks)).transpose()?,
            ..AttentionSpec::plain(heads, 1.0 / (head_dim as f64).sqrt())
        };
        let limits = AttentionLimits {
            heads,
            max_window: case.window,
            max_model_len: max_len,
            max_num_tokens: num_tokens(0).max(num_tokens(1)).max(case.block_size),
            max_num_rows: case.sequences.len(),
        };
        let config = one_layer(num_heads, num_kv_heads, head_dim);
        let frequencies = (0..case.num_pairs).map(|pair| 0.3 / (pair + 1) as f32).collect();
        let growth = case.grows.then_some(QueryGrowth { beta: 0.5, period: 16 });
        let mut table = RopeTable::new(context, case.style, frequencies, 1.0, max_len)?.with_growth(growth);
        table.extend_to(max_len)?;
        Ok(Self {
            context,
            case,
            cache: KvCache::new(context, &config, 2 * case.num_blocks(), case.block_size, case.dtype)?,
            scratch: AttentionScratch::new(context, limits)?,
            spec,
            inputs: DeviceInputs::new(context, &limits, case.block_size)?,
            table,
            norms: [rms_norm(context, 8, head_dim, EPS)?, rms_norm(context, 9, head_dim, EPS)?],
            is_forked: false,
        })
    }

    /// Fills the unused slots of the cache, and the memory of partial results, with NaN.
    fn poison(&mut self) -> Result<()> {
        let Self { context, case, .. } = *self;
        let mut block_of_nothing = unwritten(context, case.width(), case.block_size)?;
        // Those blocks that have slots without tokens.
        for (index, steps) in case.sequences.iter().enumerate() {
            for len in [steps[0], steps[0] + steps[1]] {
                let block = case.block(index, len.max(1) - 1);
                self.step(&self.metadata_of_block(block), &mut block_of_nothing, None)?;
            }
        }
        let num_rows = case.sequences.len();
        let mut nothing = unwritten(context, case.width(), num_rows)?;
        let mut out = unwritten(context, case.heads.0 * case.head_dim, num_rows)?;
        // Sequences take turns in being long, so that with a window each KV split of each has been there.
        for long in 0..2 {
            let len =
                |index: usize| if index % 2 == long { case.max_len() } else { case.max_len().div_ceil(2) };
            let rows: Vec<_> = (0..num_rows).map(|index| (index, len(index) - 1..len(index))).collect();
            self.step(&self.metadata(&rows), &mut nothing, Some(&mut out))?;
        }
        // Reading waits for all of it, as buffers have to live so long.
        out.read_exact(1).map(drop)
    }

    /// The batch metadata of a step that fills a block.
    fn metadata_of_block(&self, block: usize) -> AttentionMetadata {
        let block_size = self.case.block_size;
        AttentionMetadata {
            query_start_loc: vec![0, block_size],
            seq_lens: vec![block_size],
            block_tables: vec![block as u32],
            block_table_starts: vec![0, 1],
            slot_mapping: (block * block_size..(block + 1) * block_size).collect(),
            block_size,
            modes: vec![RowMode::of(block_size)],
        }
    }

    /// The batch metadata of a step that computes some tokens of some sequences.
    fn metadata(&self, rows: &[(usize, Range<usize>)]) -> AttentionMetadata {
        let Self { case, is_forked, .. } = *self;
        let block_size = case.block_size;
        let mut metadata = AttentionMetadata { block_size, ..Default::default() };
        metadata.clear();
        for (index, range) in rows {
            let block = |position: usize| {
                let original = case.block(*index, position);
                if is_forked { original - case.num_blocks() } else { original }
            };
            let slot = |position: usize| block(position) * block_size + position % block_size;
            metadata.slot_mapping.extend(range.clone().map(slot));
            metadata.query_start_loc.push(metadata.slot_mapping.len());
            metadata.seq_lens.push(range.end);
            metadata.modes.push(RowMode::of(range.len()));
            metadata
                .block_tables
                .extend((0..range.end).step_by(block_size).map(|position| block(position) as u32));
            metadata.block_table_starts.push(metadata.block_tables.len());
        }
        metadata
    }

    /// Attention alone.
    fn attend(&mut self, metadata: &AttentionMetadata, queries: &Buffer, out: &mut Buffer) -> Result<()> {
        let positions = vec![0; metadata.num_tokens()];
        let step = StepInputs::new(&positions, &positions, &[], metadata);
        let step = self.inputs.upload(self.context, step, &self.cache)?;
        paged_attention(
            self.context,
            &mut self.scratch,
            &self.spec,
            queries,
            &self.cache,
            0,
            &step,
            None,
            out,
        )
    }

    /// Rotates queries and keys and puts keys and values into the cache; then attention, if there is space for it.
    fn step(
        &mut self,
        metadata: &AttentionMetadata,
        qkv: &mut Buffer,
        out: Option<&mut Buffer>,
    ) -> Result<()> {
        let Self { context, case, .. } = *self;
        let rows = metadata.query_start_loc.windows(2).zip(&metadata.seq_lens);
        let positions: Vec<u32> = rows
            .flat_map(|(tokens, seq_len)| (seq_len - (tokens[1] - tokens[0])) as u32..*seq_len as u32)
            .collect();
        let step = StepInputs::new(&positions, &positions, &[], metadata);
        let step = self.inputs.upload(context, step, &self.cache)?;
        let head_norms = case.has_norms.then_some(HeadNorms { q: &self.norms[0], k: &self.norms[1] });
        let Self { table, cache, scratch, spec, .. } = self;
        match out {
            None => rope_kv_write(context, qkv, &step, head_norms, table, cache, 0),
            Some(out) => {
                rope_attention(context, scratch, spec, qkv, &step, head_norms, table, cache, 0, None, out)
                    .map(drop)
            }
        }
    }

    /// Copies all blocks and continues with the copies, the last ones first: a copy that is too long damages the next
    /// one.
    fn fork(&mut self) -> Result<()> {
        let num_blocks = self.case.num_blocks();
        for target in (0..num_blocks).rev() {
            self.cache.copy_block((num_blocks + target) as u32, target as u32)?;
        }
        self.is_forked = true;
        Ok(())
    }
}
