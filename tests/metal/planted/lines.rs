//! The lines of `src/ops/metal` that could be wrong, and what that would change.

use tinyvllm::ops::metal::Access;
use tinyvllm::self_test::Family;

use super::launches::Change::{self, *};

/// Lines of a file that decide on the launches of some kernels.
pub(super) struct Lines {
    pub(super) file: &'static str,
    pub(super) family: Family,
    /// How the names of the kernels begin.
    pub(super) kernels: &'static str,
    /// What is in the file, once; what is wrong with it; what that changes.
    pub(super) defects: &'static [(&'static str, &'static str, Change)],
}

/// A single that is `x` in bits, times something.
fn times(x: u32, factor: f32) -> u32 {
    (f32::from_bits(x) * factor).to_bits()
}

pub(super) const LINES: [Lines; 10] = [
    Lines {
        file: "attention.rs",
        family: Family::Attention,
        kernels: "rope_kv_write",
        defects: &[
            ("num_pairs: rope.num_pairs as u32,", "a pair too few", Word(3, |x| x - 1)),
            ("block_size: pools.block_size as u32,", "all blocks have 16 tokens", Word(4, |_| 16)),
            ("eps: rope.norms.map_or(0.0, |(_, _, eps)| eps),", "no eps", Word(5, |_| 0)),
            ("map_or((table, table), |(q, k, _)| (q, k));", "keys have the norm of queries", Buffer(5, 4)),
            ("let flags = [rope.norms.is_some(), rope.is_interleaved, false];", "no norms", Flag(0)),
            ("Kernel::RopeKvWrite(pools.dtype),", "pairs are the other ones", Flag(1)),
            ("inputs.positions(),", "slots are positions", Buffer(2, 3)),
            ("inputs.slots(),", "positions are slots", Buffer(3, 2)),
            ("Binding::write(pools.v),", "values go to the keys", Buffer(8, 7)),
            ("Binding::write(pools.k),", "keys are said to be read", Declared(7, Access::Read)),
            ("let num_all_heads = ", "a head too few", Grid(0, |n| n - 1)),
            ("grid: [num_all_heads, rope.num_tokens, 1],", "a token too few", Grid(1, |n| n - 1)),
        ],
    },
    Lines {
        file: "attention.rs",
        family: Family::Attention,
        kernels: "paged_attention_",
        defects: &[
            ("block_size: self.block_size as u32,", "all blocks have 16 tokens", Word(1, |_| 16)),
            ("piece_size: self.piece_size as u32,", "a piece is shorter", Word(5, |x| x - 32)),
            ("num_pieces: num_pieces as u32,", "there is one piece", Word(6, |_| 1)),
            ("num_slices: num_slices as u32,", "there is one slice", Word(8, |_| 1)),
            ("scale: sizes.scale * LOG2_E,", "weights are powers of e", Word(9, |x| times(x, 0.693_147_2))),
            ("window: sizes.sliding_window.unwrap_or(max_model_len),", "a token more", Word(7, |x| x + 1)),
            (
                "let num_pieces = inputs.max_decode_len().div_ceil(self.piece_size);",
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
            ("grid: [num_pieces, pools.num_kv_heads, rows.len()],", "a row too few", Grid(2, |n| n - 1)),
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
        file: "attention.rs",
        family: Family::Attention,
        kernels: "paged_attention_merge",
        defects: &[
            ("if num_pieces == 1 {\n                continue;", "never merged", LeftOut),
            (
                "let partials = Binding::read(&self.partials).at(partials_offset);",
                "always the first",
                Offset(2, |_| 0),
            ),
            ("grid: [self.num_heads, rows.len(), 1],", "a head too few", Grid(0, |n| n - 1)),
            ("buffers: &[decode_rows, partials, Binding::write(out)],", "a row too few", Grid(1, |n| n - 1)),
        ],
    },
    Lines {
        file: "inputs.rs",
        family: Family::Attention,
        kernels: "paged_attention_",
        defects: &[
            (
                "self.decode.push(DecodeRow { token, seq_len, table_start });",
                "the token before",
                List(5, [3, 0], 2, |x| x.max(1) - 1),
            ),
            (
                "let (token, seq_len) = (start as u32, seq_len as u32);",
                "a key too few",
                List(5, [3, 1], 2, |x| x.max(2) - 1),
            ),
            ("let table_start = table_start as u32;", "the first table", List(5, [3, 2], 2, |_| 0)),
            (
                "self.write(metal, self.block_tables, &attention.block_tables)?;",
                "other blocks",
                List(4, [1, 0], 3, |x| x ^ 1),
            ),
        ],
    },
    Lines {
        file: "inputs.rs",
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
            ("table_start,\n                });", "the first table", List(5, [4, 3], 0, |_| 0)),
        ],
    },
    Lines {
        file: "inputs.rs",
        family: Family::Attention,
        kernels: "",
        defects: &[
            ("metal.wait(ticket)?;", "lists are written that are still read", NotWaitedFor),
            (
                "self.write_all(metal, self.slots, &attention.slot_mapping)?;",
                "a slot further",
                List(3, [1, 0], 1, |x| x ^ 1),
            ),
        ],
    },
    Lines {
        file: "attention.rs",
        family: Family::Attention,
        kernels: "flash_attention",
        defects: &[
            ("fn tokens_per_tile(", "a token less than are in a tile", List(5, [4, 1], 0, |x| x.max(2) - 1)),
            ("inputs.prefill_tiles(tiles.start),", "always the first", Offset(5, |n| n / 1024 * 1024)),
            ("grid: [tiles.len(), pools.num_kv_heads, 1],", "a tile too few", Grid(0, |n| n - 1)),
            (
                "let flash = Flash::of(pools.dtype, pools.head_dim);",
                "for smaller heads",
                Ending("_128", "_64"),
            ),
            ("threadgroup_memory: flash.threadgroup_memory(),", "too little", Memory(|n| n - 16)),
            ("num_threads: flash.simdgroups * 32,", "half of them", Threads(|n| n / 2)),
        ],
    },
    Lines {
        file: "rows.rs",
        family: Family::Rows,
        kernels: "",
        defects: &[("num_units: table.num_units() as u32,", "a unit too few", Word(3, |x| x - 1))],
    },
    Lines {
        file: "rows.rs",
        family: Family::Attention,
        kernels: "copy_block",
        defects: &[
            ("let num_words = block_bytes / 16;", "half a block", Word(2, |x| x / 2)),
            ("let args = [source, target, num_words as u32];", "from the next block", Word(0, |x| x + 1)),
            ("&buffers, [num_words.div_ceil(32), 1, 1])", "without what is left", Grid(0, |n| n - 1)),
        ],
    },
    Lines {
        file: "sampling.rs",
        family: Family::Sampling,
        kernels: "sample",
        defects: &[("step: self.tickets.len() as u32,", "always the first", Word(2, |_| 0))],
    },
];
