//! Operands that ops reject, on every device. [`crate::self_test`] checks results against candle.

use super::reference::ReferenceBackend;
use super::*;
use crate::Result;
use crate::config::RopeStyle;
use crate::ops::cpu::CpuLevel;
use crate::self_test::one_layer;
use crate::weights::DType;

const HIDDEN: usize = 48;
const ROWS: usize = 11;

fn everywhere(check: impl Fn(&Context)) {
    check(&Context::cpu(2, CpuLevel::detect()));
    check(&Context::reference(ReferenceBackend::cpu()));
}

fn dense(context: &Context, rows: usize, cols: usize) -> Matrix {
    Matrix::from_bytes(context, DType::F32, &vec![0; 4 * rows * cols], rows, cols).unwrap()
}

fn norm(context: &Context, len: usize) -> RmsNorm {
    RmsNorm { weight: Vector::new(context, vec![1.0; len]).unwrap(), eps: 1e-6 }
}

fn refuses(result: Result<()>, what: &str) {
    let error = result.expect_err(what);
    assert!(error.message().contains(what), "{error}, wanted {what}");
}

#[test]
fn matmuls_refuse_shapes_that_do_not_fit() {
    everywhere(|context| {
        let mut scratch = LinearScratch::new(context, ROWS, HIDDEN).unwrap();
        let x = Buffer::new(context, ROWS, HIDDEN).unwrap();
        let linear = |rows: usize, cols: usize, bias: Option<usize>| Linear {
            weight: dense(context, rows, cols),
            bias: bias.map(|len| Vector::new(context, vec![0.0; len]).unwrap()),
        };
        let [q, k] = [linear(40, HIDDEN, None), linear(8, HIDDEN, Some(8))];
        let own = norm(context, HIDDEN);
        let mut out = Buffer::new(context, ROWS, 48).unwrap();
        norm_linear(context, &mut scratch, ROWS, &x, Some(&own), [&q, &k], &mut out).unwrap();
        refuses(
            norm_linear(context, &mut scratch, ROWS, &x, Some(&own), [&q], &mut out),
            "48 values in a row, not 40",
        );
        let short = norm(context, 47);
        refuses(
            norm_linear(context, &mut scratch, ROWS, &x, Some(&short), [&q, &k], &mut out),
            "its norm has 47",
        );
        let bad = linear(8, HIDDEN, Some(7));
        refuses(
            norm_linear(context, &mut scratch, ROWS, &x, Some(&own), [&q, &bad], &mut out),
            "its bias has 7",
        );

        let down = linear(HIDDEN, 32, None);
        let mut sum = Buffer::new(context, ROWS, HIDDEN).unwrap();
        let result = linear_residual(context, &mut scratch, ROWS, &x, &down, &mut sum);
        refuses(result, "its input has 32 values in a row, not 48");
        let (gate, up) = (dense(context, 70, HIDDEN), dense(context, 71, HIDDEN));
        let mut wide = Buffer::new(context, ROWS, 70).unwrap();
        let result = norm_swiglu(context, &mut scratch, ROWS, &x, &own, &gate, &up, None, &mut wide);
        refuses(result, "its output has 71 values in a row, not 70");
        let mut logits = Buffer::new(context, 4, 70).unwrap();
        let too_many = norm_logits(context, &mut scratch, 5, &x, &own, &gate, &mut logits);
        assert!(too_many.is_err(), "more rows than there is space for");
    });
}

#[test]
fn rows_that_do_not_exist_are_refused() {
    everywhere(|context| {
        let table = dense(context, 50, HIDDEN);
        let mut x = Buffer::new(context, ROWS, HIDDEN).unwrap();
        let metadata = AttentionMetadata::default();
        let step = |tokens, outputs| StepInputs::new(tokens, &[0], outputs, &metadata);
        refuses(embed(context, &step(&[50], &[]), &table, 1.0, &mut x), "token 50");
        refuses(gather_rows(context, &step(&[], &[ROWS]), &mut x), "no ascending rows of 11");
        refuses(gather_rows(context, &step(&[], &[1, 1]), &mut x), "no ascending rows");
        gather_rows(context, &step(&[], &[1, 4]), &mut x).unwrap();
    });
}

#[test]
fn positions_and_slots_that_do_not_exist_are_refused() {
    everywhere(|context| {
        let (num_heads, num_kv_heads, head_dim) = (6, 2, 24);
        let mut table = RopeTable::new(context, RopeStyle::HalfSplit, vec![0.3; 12], 1.0, 32).unwrap();
        assert!(table.extend_to(33).unwrap_err().message().contains("position 32"));
        table.extend_to(32).unwrap();
        let config = one_layer(num_heads, num_kv_heads, head_dim);
        let mut cache = KvCache::new(context, &config, 4, 8, KvCacheDType::F32).unwrap();
        let mut qkv = Buffer::new(context, 2, (num_heads + 2 * num_kv_heads) * head_dim).unwrap();
        let mut run = |positions: &[u32], slots: &[usize]| {
            let metadata = AttentionMetadata { slot_mapping: slots.to_vec(), ..Default::default() };
            let step = StepInputs::new(&[], positions, &[], &metadata);
            rope_kv_write(context, &mut qkv, &step, None, &table, &mut cache, 0)
        };
        refuses(run(&[1, 2], &[1]), "2 positions and 1 slots");
        refuses(run(&[32], &[0]), "position 32");
        refuses(run(&[0], &[32]), "slot 32");
        run(&[31, 0], &[0, 31]).unwrap();
    });
}

#[test]
fn blocks_are_copied_whole_and_only_where_they_exist() {
    everywhere(|context| {
        let mut cache = KvCache::new(context, &one_layer(2, 1, 8), 3, 4, KvCacheDType::F32).unwrap();
        refuses(cache.copy_block(0, 3), "block 0 to 3");
        cache.copy_block(2, 0).unwrap();
        let mut bytes = vec![0; cache.block_bytes()];
        refuses(cache.read_block(3, &mut bytes), "block 3");
        refuses(cache.read_block(0, &mut bytes[1..]), &format!("{} bytes", bytes.len() - 1));
        // The rows of the second block; the others are unchanged.
        bytes.chunks_exact_mut(4).enumerate().for_each(|(i, value)| {
            value.copy_from_slice(&(i as f32 + 0.5).to_le_bytes());
        });
        cache.write_block(1, &bytes).unwrap();
        cache.copy_block(1, 2).unwrap();
        for (block, expected) in [(0, &vec![0; bytes.len()]), (1, &bytes), (2, &bytes)] {
            let mut found = vec![1; bytes.len()];
            cache.read_block(block, &mut found).unwrap();
            assert_eq!(&found, expected, "block {block}");
        }
        let mut found = vec![vec![1; bytes.len()]; 3];
        cache.read_blocks(&[2, 0, 1], &mut found).unwrap();
        assert!(found[0] == bytes && found[1] == vec![0; bytes.len()] && found[2] == bytes);
        refuses(cache.read_blocks(&[0, 3], &mut found[..2]), "block 3");
    });
}
