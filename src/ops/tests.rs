//! Every op against its definition in double precision, on every instruction set.

use super::*;
use crate::config::RopeStyle;
use crate::ops::cpu::CpuLevel;
use crate::self_test::one_layer;
use crate::weights::DType;

/// Deterministic values in -1..1.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn assert_close(what: &str, actual: &[f32], expected: &[f64]) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let error: f64 = actual.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
    let nmse = error / expected.iter().map(|b| b * b).sum::<f64>();
    assert!(nmse < 1e-12, "{what}: normalised mean square error {nmse}");
}

fn on_every_level(check: impl Fn(&Context)) {
    for &level in CpuLevel::available() {
        check(&Context::cpu(2, level));
    }
}

fn buffer(context: &Context, values: &[f32], width: usize) -> Buffer {
    let mut buffer = Buffer::new(context, values.len() / width + 1, width).unwrap();
    buffer.write(values.len() / width, |out| out.copy_from_slice(values)).unwrap();
    buffer
}

fn rows_of(buffer: &Buffer, num_rows: usize) -> Vec<f32> {
    buffer.read(num_rows, <[f32]>::to_vec).unwrap()
}

fn dense(context: &Context, values: &[f32], cols: usize) -> Matrix {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Matrix::from_bytes(context, DType::F32, &bytes, values.len() / cols, cols).unwrap()
}

fn norm_f64(x: &[f32], norm: &RmsNorm) -> Vec<f64> {
    let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(norm.eps)).sqrt();
    x.iter().zip(&*norm.weight).map(|(x, w)| f64::from(*x) * factor * f64::from(*w)).collect()
}

fn product_f64(matrix: &[f32], x: &[f64]) -> Vec<f64> {
    let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
    matrix.chunks_exact(x.len()).map(dot).collect()
}

const HIDDEN: usize = 48;
const ROWS: usize = 11;

#[test]
fn norm_linear_is_products_of_the_normalised_rows_side_by_side() {
    on_every_level(|context| {
        let mut scratch = LinearScratch::new(context, ROWS, HIDDEN).unwrap();
        let x = noise(1, ROWS * HIDDEN);
        let norm = RmsNorm { weight: Vector::new(context, noise(2, HIDDEN)).unwrap(), eps: 1e-5 };
        let weights = [noise(3, 40 * HIDDEN), noise(4, 8 * HIDDEN), noise(5, 17 * HIDDEN)];
        let bias = noise(6, 8);
        let linears = [0, 1, 2].map(|index| Linear {
            weight: dense(context, &weights[index], HIDDEN),
            bias: (index == 1).then(|| Vector::new(context, bias.clone()).unwrap()),
        });
        let mut out = Buffer::new(context, ROWS, 65).unwrap();
        let input = buffer(context, &x, HIDDEN);
        let [q, k, v] = &linears;
        norm_linear(context, &mut scratch, ROWS, &input, &norm, [q, k, v], &mut out).unwrap();
        let mut expected = Vec::new();
        for x in x.chunks_exact(HIDDEN) {
            let x = norm_f64(x, &norm);
            expected.extend(product_f64(&weights[0], &x));
            let product = product_f64(&weights[1], &x);
            expected.extend(product.iter().zip(&bias).map(|(y, b)| y + f64::from(*b)));
            expected.extend(product_f64(&weights[2], &x));
        }
        assert_close("norm_linear", &rows_of(&out, ROWS), &expected);
        assert!(norm_linear(context, &mut scratch, ROWS, &input, &norm, [q, k], &mut out).is_err());
    });
}

#[test]
fn linear_residual_adds_the_product() {
    on_every_level(|context| {
        let mut scratch = LinearScratch::new(context, ROWS, 32).unwrap();
        let (x, h, w) = (noise(1, ROWS * HIDDEN), noise(2, ROWS * 32), noise(3, HIDDEN * 32));
        let linear = Linear { weight: dense(context, &w, 32), bias: None };
        let mut out = buffer(context, &x, HIDDEN);
        let input = buffer(context, &h, 32);
        linear_residual(context, &mut scratch, ROWS, &input, &linear, &mut out).unwrap();
        let products = h
            .chunks_exact(32)
            .flat_map(|h| product_f64(&w, &h.iter().map(|h| f64::from(*h)).collect::<Vec<_>>()));
        let expected: Vec<f64> = products.zip(&x).map(|(y, x)| y + f64::from(*x)).collect();
        assert_close("linear_residual", &rows_of(&out, ROWS), &expected);
        assert!(
            linear_residual(context, &mut scratch, ROWS, &out, &linear, &mut buffer(context, &x, 24))
                .is_err()
        );
    });
}

#[test]
fn norm_swiglu_is_silu_of_the_gate_times_up() {
    on_every_level(|context| {
        let mut scratch = LinearScratch::new(context, ROWS, HIDDEN).unwrap();
        let x = noise(1, ROWS * HIDDEN);
        let norm = RmsNorm { weight: Vector::new(context, noise(2, HIDDEN)).unwrap(), eps: 1e-5 };
        let (gate, up) = (noise(3, 70 * HIDDEN), noise(4, 70 * HIDDEN));
        let mut out = Buffer::new(context, ROWS, 70).unwrap();
        norm_swiglu(
            context,
            &mut scratch,
            ROWS,
            &buffer(context, &x, HIDDEN),
            &norm,
            &dense(context, &gate, HIDDEN),
            &dense(context, &up, HIDDEN),
            &mut out,
        )
        .unwrap();
        let expected: Vec<f64> = x
            .chunks_exact(HIDDEN)
            .flat_map(|x| {
                let x = norm_f64(x, &norm);
                let silu = |v: f64| v / (1.0 + (-v).exp());
                let products: Vec<_> = product_f64(&gate, &x).into_iter().zip(product_f64(&up, &x)).collect();
                products.into_iter().map(move |(gate, up)| silu(gate) * up)
            })
            .collect();
        assert_close("norm_swiglu", &rows_of(&out, ROWS), &expected);
    });
}

#[test]
fn embed_gather_rows_and_norm_logits() {
    on_every_level(|context| {
        let vocab = 50;
        let mut scratch = LinearScratch::new(context, ROWS, HIDDEN).unwrap();
        let table = noise(1, vocab * HIDDEN);
        let matrix = dense(context, &table, HIDDEN);
        let tokens: Vec<u32> = (0..ROWS as u32).map(|i| i * 17 % 50).collect();
        let mut x = Buffer::new(context, ROWS, HIDDEN).unwrap();
        let metadata = AttentionMetadata::default();
        let positions = vec![0; ROWS];
        let step = |tokens, outputs| StepInputs::new(tokens, &positions, outputs, &metadata);
        embed(context, &step(&tokens, &[]), &matrix, &mut x).unwrap();
        let embedded = rows_of(&x, ROWS);
        for (row, &token) in embedded.chunks_exact(HIDDEN).zip(&tokens) {
            assert_eq!(row, &table[token as usize * HIDDEN..][..HIDDEN]);
        }
        assert!(
            embed(context, &step(&[50], &[]), &matrix, &mut x).unwrap_err().message().contains("token 50")
        );

        let norm = RmsNorm { weight: Vector::new(context, noise(2, HIDDEN)).unwrap(), eps: 1e-6 };
        let wanted = [2, 3, ROWS - 1];
        let mut logits = Buffer::new(context, 4, vocab).unwrap();
        assert!(gather_rows(context, &step(&[], &[ROWS]), &mut x).is_err(), "a row that does not exist");
        assert!(gather_rows(context, &step(&[], &[1, 1]), &mut x).is_err(), "a row that comes twice");
        gather_rows(context, &step(&[], &wanted), &mut x).unwrap();
        norm_logits(context, &mut scratch, 3, &x, &norm, &matrix, &mut logits).unwrap();
        let expected: Vec<f64> = wanted
            .iter()
            .flat_map(|row| product_f64(&table, &norm_f64(&embedded[row * HIDDEN..][..HIDDEN], &norm)))
            .collect();
        assert_close("norm_logits", &rows_of(&logits, 3), &expected);
        let too_many = norm_logits(context, &mut scratch, 5, &x, &norm, &matrix, &mut logits);
        assert!(too_many.is_err(), "more rows than there is room for");
    });
}

/// Rotation as it is defined, after the norm.
fn rotated(
    head: &[f32],
    norm: Option<&RmsNorm>,
    style: RopeStyle,
    num_pairs: usize,
    position: u32,
) -> Vec<f64> {
    let mut head: Vec<f64> = match norm {
        Some(norm) => norm_f64(head, norm),
        None => head.iter().map(|x| f64::from(*x)).collect(),
    };
    for pair in 0..num_pairs {
        let angle = f64::from(position) * 0.3 / (pair + 1) as f64;
        let (first, second) = match style {
            RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
            RopeStyle::HalfSplit => (pair, pair + num_pairs),
        };
        let (a, b) = (head[first], head[second]);
        head[first] = a * angle.cos() - b * angle.sin();
        head[second] = a * angle.sin() + b * angle.cos();
    }
    head
}

#[test]
fn rope_kv_write_rotates_and_fills_the_slots() {
    let (num_heads, num_kv_heads, block_size) = (6, 2, 8);
    on_every_level(|context| {
        for (head_dim, num_pairs, has_norms) in [(24, 12, false), (64, 32, true), (40, 8, true)] {
            for style in [RopeStyle::Interleaved, RopeStyle::HalfSplit] {
                let width = (num_heads + 2 * num_kv_heads) * head_dim;
                let values = noise(7, ROWS * width);
                let norms = [noise(8, head_dim), noise(9, head_dim)]
                    .map(|weight| RmsNorm { weight: Vector::new(context, weight).unwrap(), eps: 1e-6 });
                let norm = |index: usize| has_norms.then_some(&norms[index]);
                let positions: Vec<u32> = (0..ROWS as u32).map(|i| i * 5 % 31).collect();
                let slots: Vec<usize> = (0..ROWS).map(|i| i * 7 % 32).collect();
                let frequencies = (0..num_pairs).map(|pair| 0.3 / (pair + 1) as f32).collect();
                let mut table = RopeTable::new(context, style, frequencies, 1.0, 32).unwrap();
                assert!(table.extend_to(33).is_err());
                table.extend_to(32).unwrap();
                let config = one_layer(num_heads, num_kv_heads, head_dim);
                let mut cache = KvCache::new(context, &config, 4, block_size, KvCacheDType::F32).unwrap();
                let mut qkv = buffer(context, &values, width);
                let head_norms = has_norms.then_some(HeadNorms { q: &norms[0], k: &norms[1] });
                let mut run = |positions: &[u32], slots: &[usize]| {
                    let metadata = AttentionMetadata { slot_mapping: slots.to_vec(), ..Default::default() };
                    let step = StepInputs::new(&[], positions, &[], &metadata);
                    rope_kv_write(context, &mut qkv, &step, head_norms, &table, &mut cache, 0)
                };
                assert!(run(&positions, &slots[1..]).is_err());
                assert!(run(&[32], &[0]).unwrap_err().message().contains("position 32"));
                assert!(run(&[0], &[32]).unwrap_err().message().contains("slot 32"));
                run(&positions, &slots).unwrap();

                let rows = rows_of(&qkv, ROWS);
                let layout = cache.layout();
                let (k_pool, v_pool) = cache.pools(0).unwrap();
                for (token, row) in values.chunks_exact(width).enumerate() {
                    let head = |index: usize| &row[index * head_dim..][..head_dim];
                    for index in 0..num_heads {
                        let expected = rotated(head(index), norm(0), style, num_pairs, positions[token]);
                        let actual = &rows[token * width + index * head_dim..][..head_dim];
                        assert_close("query", actual, &expected);
                    }
                    for kv_head in 0..num_kv_heads {
                        let (block, slot) = (slots[token] / block_size, slots[token] % block_size);
                        // SAFETY: the offsets are those of slots that exist.
                        let (key, value): (Vec<f32>, &[f32]) = unsafe {
                            let group = k_pool.cast::<f32>().add(layout.k_group(block, kv_head, 0));
                            let row = v_pool.cast::<f32>().add(layout.v_row(block, kv_head, slot));
                            (
                                (0..head_dim).map(|d| *group.add(d * 16 + slot)).collect(),
                                std::slice::from_raw_parts(row, head_dim),
                            )
                        };
                        let expected =
                            rotated(head(num_heads + kv_head), norm(1), style, num_pairs, positions[token]);
                        assert_close("key", &key, &expected);
                        assert_eq!(value, head(num_heads + num_kv_heads + kv_head));
                    }
                }
            }
        }
    });
}
