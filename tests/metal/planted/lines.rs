//! The lines of `src/ops/gpu` that could be wrong, and the effects of that.

use tinyvllm::ops::gpu::Access;
use tinyvllm::self_test::Family;

use super::launches::Change::{self, *};

/// Lines of a file that decide on the launches of some kernels.
pub(super) struct Lines {
    pub(super) file: &'static str,
    pub(super) family: Family,
    /// How the names of the kernels begin.
    pub(super) kernels: &'static str,
    /// A text that the file has once; the wrong version; its effect.
    pub(super) defects: &'static [(&'static str, &'static str, Change)],
}

/// A single that is `x` in bits, times something.
fn times(x: u32, factor: f32) -> u32 {
    (f32::from_bits(x) * factor).to_bits()
}

pub(super) const LINES: [Lines; 30] = [
    Lines {
        file: "attention/grouped.rs",
        family: Family::Attention,
        kernels: "rope_kv_write",
        defects: &[
            ("num_pairs: self.num_pairs as u32,", "a pair too few", Word(6, |x| x - 1)),
            ("inverse_dim: 1.0 / head_dim as f32,", "the mean of half of them", Word(7, |x| times(x, 2.0))),
            ("eps: self.norms.map_or(0.0, |(_, _, eps)| eps),", "no eps", Word(8, |_| 0)),
            ("map_or((table, table), |(q, k, _)| (q, k));", "keys have the norm of queries", Buffer(5, 4)),
            ("Flags::of(rope.flags()),", "no norms", Flag(0)),
            ("Kernel::RopeKvWrite(pools.dtype),", "pairs are the other ones", Flag(1)),
            ("inputs.positions(),", "slots are positions", Buffer(2, 3)),
            ("inputs.slots(),", "positions are slots", Buffer(3, 2)),
            ("Binding::write(pools.v),", "values go to the keys", Buffer(8, 7)),
            ("Binding::write(pools.k),", "keys are said to be read", Declared(7, Access::Read)),
            ("let num_all_heads = ", "some heads too few", Grid(0, |n| n - 1)),
            (
                "grid: [num_all_heads.div_ceil(ROTATED_HEADS), rope.num_tokens, 1],",
                "a token too few",
                Grid(1, |n| n - 1),
            ),
        ],
    },
    Lines {
        file: "attention/grouped.rs",
        family: Family::Attention,
        // The merge of splits has other buffers.
        kernels: "paged_attention_f",
        defects: &[
            ("split_size: self.split_size as u32,", "a split is shorter", Word(7, |x| x - 32)),
            ("num_splits: num_splits as u32,", "there is one split", Word(8, |_| 1)),
            ("num_slices: num_slices as u32,", "there is one slice", Word(10, |_| 1)),
            (
                "scale: spec.scale as f32 * LOG2_E,",
                "weights are powers of e",
                Word(11, |x| times(x, std::f32::consts::LN_2)),
            ),
            ("let window = spec.window.unwrap_or(self.max_model_len);", "a token more", Word(9, |x| x + 1)),
            (
                "soft_cap: spec.soft_cap.map(|cap| cap as f32 * LOG2_E),",
                "a cap on powers of e",
                Word(12, |x| times(x, std::f32::consts::LN_2)),
            ),
            ("Flags::of(spec.flags()),", "no sinks", Flag(0)),
            ("[self.sinks.is_some(), self.soft_cap.is_some()]", "no cap", Flag(1)),
            ("spec.sinks_or(Binding::read(q)),", "sinks are queries", Buffer(8, 1)),
            (
                "let num_splits = tokens.max_len().div_ceil(self.split_size);",
                "whole ones",
                Grid(0, |n| n - 1),
            ),
            (
                "(Binding::read(out), Binding::write(&self.partials).at(partials_offset))",
                "always the first",
                Offset(7, |_| 0),
            ),
            (
                "(Binding::write(out), Binding::read(&self.partials))",
                "results are said to be read",
                Declared(6, Access::Read),
            ),
            ("grid: [num_splits, pools.num_kv_heads, rows.len()],", "a row too few", Grid(2, |n| n - 1)),
            ("let num_slices = (8 / num_chunks).clamp(1, 4);", "a slice too few", Threads(|n| n - n / 4)),
            (
                "threadgroup_memory: (2 * num_chunks * heads + scores.max(results)) * 4,",
                "half of it",
                Memory(|n| n / 2),
            ),
            ("scores.max(results)", "no maxima and sums", Memory(|n| n - 16)),
            (
                "let lanes_per_key = (pools.head_dim / 8).next_power_of_two().max(8);",
                "too few",
                Ending("_16", "_8"),
            ),
            (
                "let heads = heads_per_kv_head.next_power_of_two().min(4);",
                "two for four",
                Ending("_4_8", "_2_8"),
            ),
        ],
    },
    Lines {
        file: "attention/grouped.rs",
        family: Family::Attention,
        kernels: "paged_attention_merge",
        defects: &[
            (
                "merge(gpu, &args, spec.sinks, decode_rows, num_rows, partials, out, cost)?;",
                "never merged",
                LeftOut,
            ),
            (
                "let partials = Binding::read(&self.partials).at(partials_offset);",
                "always the first",
                Offset(2, |_| 0),
            ),
            ("grid: [args.num_heads as usize, num_rows,", "a head too few", Grid(0, |n| n - 1)),
            (
                "(args.pages.head_dim as usize).div_ceil(MERGED * 32)],",
                "whole ones",
                Grid(2, |n| n.max(2) - 1),
            ),
            (
                "buffers: &[decode_rows, partials, Binding::write(out), sinks.unwrap_or(partials)],",
                "a row too few",
                Grid(1, |n| n - 1),
            ),
            ("Flags::of([sinks.is_some()]),", "no sinks", Flag(0)),
        ],
    },
    Lines {
        file: "step_inputs.rs",
        family: Family::Attention,
        kernels: "paged_attention_",
        defects: &[
            (
                "self.decode.extend((start..end).map(row_of));",
                "the token before",
                List(5, [3, 0], 2, |x| x.max(1) - 1),
            ),
            (
                "seq_len: (seq_len - (end - 1 - token)) as u32,",
                "a key too few",
                List(5, [3, 1], 2, |x| x.max(2) - 1),
            ),
            (
                "table_start: table_start as u32,\n            };",
                "the first table",
                List(5, [3, 2], 2, |_| 0),
            ),
            (
                "block_tables: list(&mut |words| words.extend_from_slice(&attention.block_tables)),",
                "other blocks",
                List(4, [1, 0], 3, |x| x ^ 1),
            ),
        ],
    },
    Lines {
        file: "step_inputs.rs",
        family: Family::Attention,
        kernels: "flash_attention",
        defects: &[
            ("first_token: first as u32,", "the token before", List(5, [4, 0], 0, |x| x.max(1) - 1)),
            ("num_tokens: num_tokens as u32,", "a token too few", List(5, [4, 1], 0, |x| x.max(2) - 1)),
            (
                "first_position: (seq_len - (end - first)) as u32,",
                "a position further",
                List(5, [4, 2], 0, |x| x + 1),
            ),
            (
                "table_start: table_start as u32,\n                });",
                "the first table",
                List(5, [4, 3], 0, |_| 0),
            ),
        ],
    },
    Lines {
        file: "step_inputs.rs",
        family: Family::Attention,
        kernels: "",
        defects: &[
            ("gpu.wait(ticket)?;", "lists are written that are still read", NotWaitedFor),
            (
                "slots: list(&mut |words| as_words(&attention.slot_mapping, words)),",
                "a slot further",
                List(3, [1, 0], 1, |x| x ^ 1),
            ),
        ],
    },
    Lines {
        file: "attention/grouped.rs",
        family: Family::Attention,
        kernels: "flash_attention",
        defects: &[
            ("fn tokens_per_tile(", "a token less than are in a tile", List(5, [4, 1], 0, |x| x.max(2) - 1)),
            ("inputs.prefill_tiles(tiles.start + chunk.start);", "the first", Offset(5, |n| n / 1024 * 1024)),
            ("grid: [chunk.len(), num_kv_heads, 1],", "a tile too few", Grid(0, |n| n - 1)),
            (
                "let flash = Flash::of(dtype, head_dim.max(value_dim));",
                "for smaller heads",
                Ending("_128_16", "_64_32"),
            ),
            (
                "let keys = flash.keys(gpu.tuning());",
                "more than there is space for",
                Ending("_128_16", "_128_32"),
            ),
            (
                "Kernel::FlashAttention { dtype, max_dim: flash.max_dim, keys, head_dim, value_dim },",
                "eight values too few",
                Number(|n| n.max(16) - 8),
            ),
            ("threadgroup_memory: flash.threadgroup_memory(keys),", "too little", Memory(|n| n - 16)),
            ("num_threads: flash.simdgroups * 32,", "half of them", Threads(|n| n / 2)),
        ],
    },
    Lines {
        file: "attention/latent.rs",
        family: Family::Latent,
        kernels: "latent_kv_write",
        defects: &[
            ("query_width: write.query_width as u32,", "a value further", Word(6, |x| x + 1)),
            ("query_stride: write.query_stride as u32,", "heads overlap", Word(7, |x| x - 1)),
            ("kv_width: write.kv_width as u32,", "a value further", Word(8, |x| x + 1)),
            ("rank: (rows.row_dim - 2 * num_pairs) as u32,", "eight values too few", Word(9, |x| x - 8)),
            ("num_pairs: num_pairs as u32,", "a pair too few", Word(10, |x| x - 1)),
            ("eps: write.eps,", "no eps", Word(11, |_| 0)),
            ("Flags::of([write.is_interleaved]),", "pairs are the other ones", Flag(0)),
            ("inputs.positions(),", "slots are positions", Buffer(3, 4)),
            ("inputs.slots(),", "positions are slots", Buffer(4, 3)),
            ("Binding::write(rows.rows),", "rows are said to be read", Declared(7, Access::Read)),
            ("Binding::write(write.out),", "queries are said to be read", Declared(8, Access::Read)),
            (
                "grid: [(num_heads + 1).div_ceil(ROTATED_HEADS), num_tokens, 1],",
                "rows are not written",
                Grid(0, |n| n - 1),
            ),
            ("let LatentWrite { num_tokens,", "a token too few", Grid(1, |n| n - 1)),
        ],
    },
    Lines {
        file: "attention/latent.rs",
        family: Family::Latent,
        kernels: "latent_attention",
        defects: &[
            ("value_dim: value_dim as u32,", "eight values too few", Word(6, |x| x - 8)),
            (
                "num_splits: num_splits as u32,\n            scale,\n        };\n        let merge_args",
                "there is one",
                Word(9, |_| 1),
            ),
            (
                "let scale = scale * LOG2_E;",
                "weights are powers of e",
                Word(10, |x| times(x, std::f32::consts::LN_2)),
            ),
            (
                "let num_splits = tokens.max_len().div_ceil(split_size.max(1));",
                "whole ones",
                Grid(1, |n| n - 1),
            ),
            ("let num_chunks = num_heads.div_ceil(HEADS);", "whole ones", Grid(0, |n| n - 1)),
            ("grid: [num_chunks, num_splits, num_rows],", "a row too few", Grid(2, |n| n - 1)),
            ("num_threads: num_simdgroups * 32,", "a slab too few", Threads(|n| n - 32)),
            ("let threadgroup_memory = 4 * (partial_scores + 3 * HEADS)", "half of it", Memory(|n| n / 2)),
            (
                "(Binding::read(out), Binding::write(&self.partials).at(partials_offset))",
                "always the first",
                Offset(6, |_| 0),
            ),
            ("inputs.rows_from(tokens, first);", "always the first", Offset(4, |n| n / 256 * 256)),
        ],
    },
    Lines {
        file: "step_inputs.rs",
        family: Family::Latent,
        kernels: "latent_attention",
        defects: &[
            (
                "self.prefill_rows.extend((start..end).map(row_of));",
                "a key too few",
                List(4, [3, 1], 2, |x| x.max(2) - 1),
            ),
            (
                "words.extend_from_slice(cast_slice(&self.prefill_rows));",
                "a row further",
                Offset(4, |n| n + 12),
            ),
        ],
    },
    Lines {
        file: "attention/expanded.rs",
        family: Family::Latent,
        kernels: "latent_read",
        defects: &[
            ("rank: rank as u32,", "eight values too few", Word(5, |x| x - 8)),
            ("num_heads: num_heads as u32,", "a head too few", Word(6, |x| x - 1)),
            ("head_dim: shape.head_dim() as u32,\n            capacity", "eight too few", Word(7, |x| x - 8)),
            ("capacity: capacity as u32,\n", "as many as a tile too few", Word(8, |x| x - 32)),
            ("begin: span.start as u32,\n            end", "always the first", Word(9, |_| 0)),
            ("end: span.end as u32,\n        };", "a position too few", Word(10, |x| x.max(2) - 1)),
            ("inputs.block_table(row),", "the first", Offset(2, |n| n / 256 * 256)),
            ("Binding::write(&self.latent),", "said to be read", Declared(3, Access::Read)),
            ("Binding::write(&self.keys),\n", "said to be read", Declared(4, Access::Read)),
            ("grid: [num_positions, 1, 1],", "a tile too few", Grid(0, |n| n.max(33) - 32)),
        ],
    },
    Lines {
        file: "attention/expanded.rs",
        family: Family::Latent,
        kernels: "matmul",
        defects: &[
            ("is_half: Self::dtype(dtype) == KvCacheDType::F16,", "the other", Flag(4)),
            ("x_stride: 0, out_stride: capacity * width }", "a tile too few", Word(5, |x| x - x / 64)),
        ],
    },
    Lines {
        file: "attention/expanded.rs",
        family: Family::Latent,
        kernels: "flash_attention",
        defects: &[
            ("block_size: capacity as u32,", "as many as a tile too few", Word(1, |x| x - 32)),
            ("q_stride: operands.query_width as u32,", "eight values too few", Word(6, |x| x - 8)),
            (
                "scale: scale * LOG2_E,",
                "weights are powers of e",
                Word(8, |x| times(x, std::f32::consts::LN_2)),
            ),
            ("begin: span.start as u32,\n                end", "always the first", Word(9, |_| 0)),
            ("end: span.end as u32,\n                num", "a position too few", Word(10, |x| x.max(2) - 1)),
            ("num_plain: shape.nope as u32,", "eight too many", Word(11, |x| x + 8)),
            ("rotated_width: operands.rows.row_dim as u32,", "eight too few", Word(12, |x| x - 8)),
            (
                "(true, false) => (Binding::write(operands.out), Binding::write(&self.totals)),",
                "totals are said to be read",
                Declared(8, Access::Read),
            ),
            (
                "(false, false) => (Binding::read_write(operands.out), Binding::read_write(&self.totals)),",
                "results are said to be written",
                Declared(6, Access::Write),
            ),
            ("row.tiles.start + num_before..row.tiles.end", "always the first", Offset(5, |n| n / 256 * 256)),
        ],
    },
    Lines {
        file: "matmul/operands.rs",
        family: Family::Latent,
        kernels: "mat",
        defects: &[
            ("x_next: x_next as u32,", "the first head for all", Word(4, |_| 0)),
            ("out_next: out_next as u32,", "all results at one address", Word(5, |_| 0)),
        ],
    },
    Lines {
        file: "matmul/operands.rs",
        family: Family::Experts,
        kernels: "mat",
        defects: &[
            ("let is_grouped = matches!(self.stacked, Stacked::Groups(_));", "they are not", Flag(3)),
            ("gathers: gathers.into(),", "rows are not gathered", Word(6, |_| 0)),
            ("fn rows_each(&self)", "a kernel for fewer rows", Ending("_4", "_2")),
        ],
    },
    Lines {
        file: "routing.rs",
        family: Family::Experts,
        kernels: "choose_experts",
        defects: &[
            ("num_rows: num_rows as u32,", "a token too few", Word(0, |x| x.max(2) - 1)),
            ("num_chosen: num_chosen as u32,", "a choice too few", Word(2, |x| x - 1)),
            ("num_groups: num_groups as u32,", "one", Word(4, |_| 1)),
            ("num_open_groups: router.num_open_groups as u32,", "a group more", Word(5, |x| x + 1)),
            (
                "max_group_rows: self.max_group_rows as u32,",
                "groups of half as many",
                Word(6, |x| x.max(2) / 2),
            ),
            ("max_groups: self.num_groups as u32,", "those of the step before stay", Word(7, |_| 0)),
            ("scale: router.scale,", "no factor", Word(8, |_| 1_f32.to_bits())),
            ("is_sigmoid: router.is_sigmoid.into(),", "the others", Word(9, |x| 1 - x)),
            ("normalizes: router.normalizes.into(),", "the others", Word(10, |x| 1 - x)),
            ("has_bias: router.bias.is_some().into(),", "no bias", Word(11, |_| 0)),
            ("threadgroup_memory: 4 * scores.max(counts),", "half of it", Memory(|n| n / 2)),
            (
                "(true, true) => (Binding::read_write, Binding::write),",
                "said to be read",
                Declared(3, Access::Read),
            ),
            ("num_threads: SIMDGROUPS * 32,", "half of them", Threads(|n| n / 2)),
        ],
    },
    Lines {
        file: "routing.rs",
        family: Family::Experts,
        kernels: "combine_experts",
        defects: &[
            (
                "let args = [width as u32, self.per_token as u32, has_bias.into()];",
                "a choice too few",
                Word(1, |x| x - 1),
            ),
            ("let has_bias = bias.is_some();", "no biases", Word(2, |_| 0)),
            ("bias.unwrap_or(Binding::read(&self.weights)),", "biases are shifted", Offset(6, |n| n + 4)),
            ("grid: [width.div_ceil(32), num_rows, 1],", "a token too few", Grid(1, |n| n - 1)),
            ("Binding::read_write(x),", "said to be written", Declared(4, Access::Write)),
        ],
    },
    Lines {
        file: "routing.rs",
        family: Family::Experts,
        kernels: "gated_experts",
        defects: &[
            ("let args = GatedExpertsArgs {", "a choice too few", Word(1, |x| x - 1)),
            ("has_bias: biases.is_some().into(),", "no biases", Word(2, |_| 0)),
            ("formula: activation.formula().to_array(),", "a slope of 0", Word(3, |_| 0)),
            ("let grid = [width.div_ceil(32), num_rows, 1];", "a token too few", Grid(1, |n| n - 1)),
            (
                "Binding { access: Access::ReadWrite, ..gate },",
                "said to be written",
                Declared(6, Access::Write),
            ),
            ("let [gate_bias, up_bias] =", "biases are shifted", Offset(4, |n| n + 4)),
        ],
    },
    Lines {
        file: "embed.rs",
        family: Family::Rows,
        kernels: "embed",
        defects: &[
            ("planes: table.planes(),", "scales are codes", Word(1, |_| 0)),
            ("num_units: table.num_units() as u32,", "a unit too few", Word(3, |x| x - 1)),
            ("num_rows: table.rows() as u32,", "the last row is none", Word(4, |x| x - 1)),
            ("            scale,\n        };", "half the factor", Word(5, |x| times(x, 0.5))),
            (
                "let buffers = [table.binding(), token_ids, buffer::write(self, out)?];",
                "shifted",
                Offset(2, |n| n + 4),
            ),
            (
                "(Kernel::Embed(table.dtype()), table.num_units().div_ceil(32))",
                "whole ones",
                Grid(0, |n| n - 1),
            ),
            ("let grid = [num_groups, step.num_tokens(), 1];", "a token too few", Grid(1, |n| n - 1)),
        ],
    },
    Lines {
        file: "gated.rs",
        family: Family::Rows,
        kernels: "gated",
        defects: &[
            ("formula: activation.formula().to_array()", "no third power", Word(2, |_| 0)),
            ("let buffers = [Binding::read(halves", "shifted", Offset(1, |n| n + 4)),
            ("let grid = [width.div_ceil(32), num_rows, 1];", "a row too few", Grid(1, |n| n - 1)),
        ],
    },
    Lines {
        file: "norm_part.rs",
        family: Family::Rows,
        kernels: "norm_part",
        defects: &[
            ("inverse_len: 1.0 / len as f32,", "the mean of half of them", Word(1, |x| times(x, 2.0))),
            ("            eps,\n", "no eps", Word(2, |_| 0)),
            ("first: first as u32,", "the first values", Word(3, |_| 0)),
            ("width: x.width() as u32,", "rows are as long as the norm", Word(4, |x| x - 7)),
            ("Binding::read_write(x.held()", "rows are said to be written", Declared(2, Access::Write)),
            ("grid: [num_rows, 1, 1],", "a row too few", Grid(0, |n| n - 1)),
            ("threadgroup_memory: 4 * SIMDGROUPS,", "half of it", Memory(|n| n / 2)),
        ],
    },
    Lines {
        file: "norm_residual.rs",
        family: Family::Rows,
        kernels: "norm_residual",
        defects: &[
            ("inverse_width: 1.0 / width as f32,", "the mean of half of them", Word(1, |x| times(x, 2.0))),
            ("let args = NormResidualArgs {", "no eps", Word(2, |_| 0)),
            ("Binding::read_write(x)],", "rows are said to be read", Declared(3, Access::Read)),
            ("grid: [num_rows, 1, 1],", "a row too few", Grid(0, |n| n - 1)),
            ("threadgroup_memory: 4 * SIMDGROUPS,", "half of it", Memory(|n| n / 2)),
        ],
    },
    Lines {
        file: "gather_rows.rs",
        family: Family::Rows,
        kernels: "gather_rows",
        defects: &[
            ("let args = [num_rows as u32, width as u32];", "a row too few", Word(0, |x| x - 1)),
            (
                "let buffers = [step.lists(self)?.outputs(), Binding::read_write(x)];",
                "shifted",
                Offset(1, |n| n + 4),
            ),
            ("let grid = [width.div_ceil(32), 1, 1];", "whole threadgroups", Grid(0, |n| n - 1)),
        ],
    },
    Lines {
        file: "kv_cache.rs",
        family: Family::Attention,
        kernels: "rope_kv_write",
        defects: &[
            ("block_size: block_size as u32,", "all blocks have 16 tokens", Word(1, |_| 16)),
            ("scales: (self.num_blocks * values / 16) as u32,", "a unit before", Word(4, |x| x.max(1) - 1)),
            (
                "block_rows: row_block_rows(&self.layout) as u32,",
                "rows that lie over others",
                Word(3, |x| x - 1),
            ),
        ],
    },
    Lines {
        file: "kv_cache.rs",
        family: Family::Attention,
        kernels: "paged_attention_f",
        defects: &[("block_size: block_size as u32,", "all blocks have 16 tokens", Word(1, |_| 16))],
    },
    Lines {
        file: "kv_cache.rs",
        family: Family::Latent,
        kernels: "latent_kv_write",
        defects: &[
            ("block_size: block_size as u32,", "all blocks have 16 tokens", Word(1, |_| 16)),
            ("scales: (self.num_blocks * values / 16) as u32,", "a unit before", Word(4, |x| x.max(1) - 1)),
        ],
    },
    Lines {
        file: "kv_cache.rs",
        family: Family::Latent,
        kernels: "latent_attention",
        defects: &[("block_size: block_size as u32,", "all blocks have 16 tokens", Word(1, |_| 16))],
    },
    Lines {
        file: "kv_cache.rs",
        family: Family::Latent,
        kernels: "latent_read",
        defects: &[("block_size: block_size as u32,", "all blocks have 16 tokens", Word(1, |_| 16))],
    },
    Lines {
        file: "kv_cache.rs",
        family: Family::Attention,
        kernels: "copy_block",
        defects: &[
            ("let args = [source, target, num_words as u32];", "the block before", Word(0, |x| x - 1)),
            ("let num_words = block_bytes / 16;", "half a block", Word(2, |x| x / 2)),
            ("&buffers, [num_words.div_ceil(32), 1, 1], cost)", "whole threadgroups", Grid(0, |n| n - 1)),
            (
                "let buffers = [Binding::read_write(pool).at(begin)];",
                "said to be written",
                Declared(1, Access::Write),
            ),
            ("gpu.launch_simdgroups(Kernel::CopyBlock", "never", LeftOut),
        ],
    },
    Lines {
        file: "sample.rs",
        family: Family::Sampling,
        kernels: "sample",
        defects: &[
            ("vocab_size: vocab_size as u32,", "the last token is none", Word(0, |x| x - 1)),
            ("num_rows: self.num_rows as u32,", "a row too few", Word(1, |x| x - 1)),
            ("step: self.tickets.len() as u32,", "always the first", Word(2, |_| 0)),
            ("inverse_temperature: params.inverse_temperature,", "none", row(0, |x| x.min(1))),
            ("top_k: u32::try_from(params.top_k)", "one more", row(1, |x| if x > 0 { x + 1 } else { 0 })),
            ("top_p: params.top_p,", "all", row(2, |_| 1_f32.to_bits())),
            ("min_p: params.min_p,", "none", row(3, |_| 0)),
            ("repetition_penalty: params.repetition_penalty,", "none", row(4, |_| 1_f32.to_bits())),
            ("presence_penalty: params.presence_penalty,", "none", row(5, |_| 0)),
            ("frequency_penalty: params.frequency_penalty,", "none", row(6, |_| 0)),
            ("seed_low: params.seed as u32,", "16 bits", row(7, |x| x & 0xFFFF)),
            ("seed_high: (params.seed >> 32) as u32,", "none", row(8, |_| 0)),
            ("stream: params.stream,", "the first", row(9, |_| 0)),
            ("num_output_tokens: params.output_token_ids.len() as u32,", "16 bits", row(10, |x| x & 0xFFFF)),
            ("min_tokens: u32::try_from(params.min_tokens)", "one more", row(11, |x| x + 1)),
            ("history_start: starts[0] as u32,", "the first", row(12, |_| 0)),
            ("history_len: (history.len() - starts[0]) as u32,", "one less", row(13, |x| x.max(1) - 1)),
            ("bias_start: starts[1] as u32,", "the first", row(14, |_| 0)),
            ("bias_len: (biases.len() - starts[1]) as u32,", "one less", row(15, |x| x.max(1) - 1)),
            ("ban_start: starts[2] as u32,", "the first", row(16, |_| 0)),
            ("ban_len: (banned.len() - starts[2]) as u32,", "one less", row(17, |x| x.max(1) - 1)),
            ("Seen { token_id, count: 1 }", "output is prompt", List(2, [2, 1], 3, |_| 0)),
            ("Seen { token_id, count: 0 }", "prompt is output", List(2, [2, 1], 3, |x| x.max(1))),
            (
                "history[end - 1].count += seen.count;",
                "counts are not merged",
                List(2, [2, 1], 3, |x| x.min(1)),
            ),
            ("Bias { token_id, bias }", "biases turned round", List(3, [2, 1], 3, |x| x ^ 1 << 31)),
            ("banned.extend_from_slice(params.banned);", "the next token", List(4, [1, 0], 3, |x| x + 1)),
            (".at(first * size_of::<SampleRow>())", "the first rows' parameters", Offset(1, |_| 0)),
            (".at(4 * first * vocab_size)", "the first rows' logits", Offset(5, |_| 0)),
            (
                "Binding::read_write(&self.sampled.0).at(4 * first)",
                "the first rows' tokens",
                Offset(6, |_| 0),
            ),
            ("grid: [len, 1, 1],", "a row too few", Grid(0, |n| n - 1)),
        ],
    },
];

/// A word of the parameters of each row.
const fn row(word: usize, change: fn(u32) -> u32) -> Change {
    List(1, [18, word], 0, change)
}
