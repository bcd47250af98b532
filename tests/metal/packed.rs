//! Matmuls of several and many rows: that no bit depends on the size of tiles, nor on which kernel rounds the activations.

use std::sync::Arc;

use tinyvllm::config::RopeStyle;
use tinyvllm::ops::gpu::{CUDA_LIBRARIES, ChipClass};
use tinyvllm::ops::{
    AttentionHeads, AttentionLimits, AttentionMetadata, AttentionScratch, AttentionSpec, Buffer, Context,
    DeviceInputs, KvCache, KvCacheDType, Linear, LinearScratch, Matrix, RmsNorm, RopeTable, RowMode,
    StepInputs, Vector, linear_residual, norm_linear, norm_swiglu, rope_attention,
};
use tinyvllm::self_test::one_layer;
use tinyvllm::weights::DType;

use crate::emulator::{Emulator, Variant};

/// More than are few.
const NUM_ROWS: usize = 70;

/// This many rows, which on this many cores are tiles of 160 rows: seven tiles, one for each core.
const MORE_ROWS: usize = 520;
const MORE_CORES: usize = 7;

pub(crate) fn is_of_a_size_for_more_cores(kernel: &str) -> bool {
    kernel.starts_with("many_rows_") && kernel.ends_with("_160")
}

fn gpu(num_cores: Option<usize>) -> Option<Arc<Emulator>> {
    let gpu = Emulator::new(Variant::Fast)?.with_class(ChipClass::Nvidia);
    Some(Arc::new(match num_cores {
        Some(num_cores) => gpu.with_num_cores(num_cores),
        None => gpu,
    }))
}

fn noise(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Bits of which neither weights nor scales are anything but small numbers.
fn matrix(context: &Context, dtype: DType, rows: usize, cols: usize, seed: u32) -> Matrix {
    let len = rows * cols / dtype.block_len() * dtype.block_bytes();
    let mut bytes: Vec<u8> =
        noise(seed, len).into_iter().map(|value| ((value + 1.0) * 127.0) as u8 & 0x2f).collect();
    if dtype == DType::BF16 {
        // Smaller ones would be zeros as halves.
        bytes.iter_mut().skip(1).step_by(2).for_each(|byte| *byte = *byte & 3 | 0x3c);
    }
    Matrix::from_bytes(context, dtype, &bytes, rows, cols).unwrap()
}

fn linear(context: &Context, dtype: DType, rows: usize, cols: usize, seed: u32) -> Linear {
    Linear { weight: matrix(context, dtype, rows, cols, seed), bias: None }
}

fn buffer(context: &Context, seed: u32, num_rows: usize, width: usize) -> Buffer {
    let mut buffer = Buffer::new(context, num_rows, width).unwrap();
    buffer.write(num_rows, |values| values.copy_from_slice(&noise(seed, num_rows * width))).unwrap();
    buffer
}

fn norm(context: &Context, width: usize) -> RmsNorm {
    RmsNorm { weight: Vector::new(context, noise(7, width)).unwrap(), eps: 1e-5 }
}

fn bits(buffer: &Buffer, num_rows: usize) -> Vec<u32> {
    buffer.read(num_rows, |values| values.iter().map(|value| value.to_bits()).collect()).unwrap()
}

/// Whether the rows are packed for the matmul that reads them; no other op can read them then.
fn is_packed(buffer: &Buffer) -> bool {
    buffer.read(1, <[f32]>::len).is_err_and(|error| error.message().contains("packed for a matmul"))
}

/// A feed-forward network whose intermediate activations may be packed by the kernel that computes it, and whether it was.
fn network(context: &Context, dtype: DType, num_rows: usize, may_round: bool) -> (Vec<u32>, bool) {
    // Of no whole steps where the format allows it.
    let (hidden, inside) = match dtype.block_len() {
        1 => (48, 80),
        32 => (96, 160),
        len => (len, len),
    };
    let mut scratch = LinearScratch::new(context, num_rows, hidden.max(inside)).unwrap();
    let [gate, up] = [1, 2].map(|seed| matrix(context, dtype, inside, hidden, seed));
    let down = linear(context, dtype, hidden, inside, 3);
    let mut x = buffer(context, 4, num_rows, hidden);
    let mut out = Buffer::new(context, num_rows, inside).unwrap();
    let norm = norm(context, hidden);
    let next = may_round.then_some(&down);
    norm_swiglu(context, &mut scratch, num_rows, &x, &norm, &gate, &up, next, &mut out).unwrap();
    let is_packed = is_packed(&out);
    linear_residual(context, &mut scratch, num_rows, &out, &down, &mut x).unwrap();
    (bits(&x, num_rows), is_packed)
}

#[test]
fn intermediate_activations_have_the_same_bits_whichever_kernel_packs_them() {
    let Some(gpu) = gpu(None) else { return };
    let context = Context::gpu(gpu);
    for dtype in context.own_types() {
        let (plain, is_packed) = network(&context, dtype, NUM_ROWS, false);
        assert!(!is_packed);
        assert!(plain.iter().any(|bits| *bits != plain[0]));
        let (packed, is_packed) = network(&context, dtype, NUM_ROWS, true);
        assert_eq!(is_packed, dtype != DType::F32, "{dtype}");
        assert!(plain == packed, "{dtype}");
        let (_, is_packed) = network(&context, dtype, 64, true);
        assert!(!is_packed, "{dtype}: few rows");
    }
}

/// Attention and the matmul after it, of sequences with this many tokens of which all after `cached` are computed, and whether
/// the results of the former were packed by its kernel.
fn attention(
    context: &Context,
    (num_heads, num_kv_heads, head_dim): (usize, usize, usize),
    (lens, cached): (&[usize], usize),
    dtype: DType,
    may_round: bool,
) -> (Vec<u32>, bool) {
    const BLOCK_SIZE: usize = 16;
    let num_tokens: usize = lens.iter().map(|len| len - cached).sum();
    let max_len = lens.iter().copied().max().unwrap();
    let width = num_heads * head_dim;
    let heads = AttentionHeads::new(num_heads, num_kv_heads, head_dim);
    let spec = AttentionSpec::plain(heads, 0.1);
    let limits = AttentionLimits {
        heads,
        max_window: None,
        max_model_len: max_len,
        max_num_tokens: num_tokens,
        max_num_rows: lens.len(),
    };
    let config = one_layer(num_heads, num_kv_heads, head_dim);
    let mut metadata = AttentionMetadata { block_size: BLOCK_SIZE, ..Default::default() };
    metadata.clear();
    let (mut num_blocks, mut positions) = (0, Vec::new());
    for &len in lens {
        metadata.slot_mapping.extend((cached..len).map(|at| num_blocks * BLOCK_SIZE + at));
        positions.extend((cached..len).map(|at| at as u32));
        metadata.query_start_loc.push(metadata.slot_mapping.len());
        metadata.seq_lens.push(len);
        metadata.modes.push(RowMode::of(len - cached));
        metadata.block_tables.extend((0..len.div_ceil(BLOCK_SIZE)).map(|block| (num_blocks + block) as u32));
        num_blocks += len.div_ceil(BLOCK_SIZE);
        metadata.block_table_starts.push(metadata.block_tables.len());
    }
    let mut cache = KvCache::new(context, &config, num_blocks, BLOCK_SIZE, KvCacheDType::F16).unwrap();
    let mut scratch = AttentionScratch::new(context, limits).unwrap();
    let mut qkv = buffer(context, 5, num_tokens, width + 2 * num_kv_heads * head_dim);
    let mut out = Buffer::new(context, num_tokens, width).unwrap();
    let mut inputs = DeviceInputs::new(context, &limits, BLOCK_SIZE).unwrap();
    let ids = vec![0; num_tokens];
    let step = inputs.upload(context, StepInputs::new(&ids, &positions, &[], &metadata), &cache).unwrap();
    let output = linear(context, dtype, 32, width, 3);
    let next = may_round.then_some(&output);
    let frequencies = (0..head_dim / 2).map(|pair| 0.9_f32.powi(pair as i32)).collect();
    let mut table = RopeTable::new(context, RopeStyle::HalfSplit, frequencies, 1.0, max_len).unwrap();
    table.extend_to(max_len).unwrap();
    rope_attention(
        context,
        &mut scratch,
        &spec,
        &mut qkv,
        &step,
        None,
        &table,
        &mut cache,
        0,
        next,
        &mut out,
    )
    .unwrap();
    let is_packed = is_packed(&out);
    let mut x = buffer(context, 6, num_tokens, 32);
    let mut scratch = LinearScratch::new(context, num_tokens, width).unwrap();
    linear_residual(context, &mut scratch, num_tokens, &out, &output, &mut x).unwrap();
    (bits(&x, num_tokens), is_packed)
}

#[test]
fn results_of_attention_have_the_same_bits_whichever_kernel_packs_them() {
    let Some(gpu) = gpu(None) else { return };
    let context = Context::gpu(gpu);
    for (shape, dtype) in [
        ((4, 2, 64), DType::BF16),
        ((4, 1, 64), DType::Q4_0),
        ((2, 1, 64), DType::Q8_0),
        ((3, 1, 128), DType::F16),
        ((2, 1, 128), DType::Q6K),
        ((2, 2, 128), DType::Q8_0),
        ((1, 1, 256), DType::Q4K),
    ] {
        // Prompts, and sequences of one token.
        let single = [20; NUM_ROWS];
        for (lens, cached, rounds) in [
            (&[NUM_ROWS][..], 0, true),
            (&[20, 51], 0, true),
            (&[NUM_ROWS, 1], 0, false),
            (&[64], 0, false),
            (&single, 19, true),
            (&single[..64], 19, false),
        ] {
            let (plain, is_packed) = attention(&context, shape, (lens, cached), dtype, false);
            assert!(!is_packed);
            let (packed, is_packed) = attention(&context, shape, (lens, cached), dtype, true);
            assert_eq!(is_packed, rounds, "{shape:?} {lens:?}");
            assert!(plain == packed, "{shape:?} {lens:?} {dtype}");
        }
    }
    // Contexts that are cut, and heads of which lanes have no whole words.
    assert!(!attention(&context, (2, 1, 64), (&[520; NUM_ROWS], 519), DType::BF16, true).1);
    assert!(!attention(&context, (4, 2, 32), (&[NUM_ROWS], 0), DType::BF16, true).1);
}

/// All matmuls of many rows with weights of a format.
fn matmuls(context: &Context, formats: [DType; 2], num_rows: usize) -> Vec<u32> {
    let cols = if formats[0].block_len() == 1 { 48 } else { formats[0].block_len() };
    matmuls_of(context, formats, num_rows, cols).concat()
}

/// The results of each, `[row, columns]`.
fn matmuls_of(context: &Context, formats: [DType; 2], num_rows: usize, cols: usize) -> [Vec<u32>; 3] {
    let mut scratch = LinearScratch::new(context, num_rows, cols).unwrap();
    let norm = norm(context, cols);
    let x = buffer(context, 4, num_rows, cols);
    let [first, last] = formats;
    let linears = [linear(context, first, 30, cols, 1), linear(context, first, 8, cols, 2)];
    let third = linear(context, last, 17, cols, 3);
    let mut out = Buffer::new(context, num_rows, 55).unwrap();
    let linears = [&linears[0], &linears[1], &third];
    norm_linear(context, &mut scratch, num_rows, &x, Some(&norm), linears, &mut out).unwrap();
    let results = bits(&out, num_rows);
    // Added to the previous values, without a norm, for each row alone.
    let mut sums = buffer(context, 9, num_rows, 17);
    linear_residual(context, &mut scratch, num_rows, &x, &third, &mut sums).unwrap();
    if first == last {
        let [gate, up] = [5, 6].map(|seed| matrix(context, first, 58, cols, seed));
        let mut out = Buffer::new(context, num_rows, 58).unwrap();
        norm_swiglu(context, &mut scratch, num_rows, &x, &norm, &gate, &up, None, &mut out).unwrap();
        return [results, bits(&out, num_rows), bits(&sums, num_rows)];
    }
    [results, Vec::new(), bits(&sums, num_rows)]
}

#[test]
fn a_row_has_the_same_bits_in_tiles_of_every_size() {
    let (Some(gpu), Some(larger)) = (gpu(None), gpu(Some(MORE_CORES))) else { return };
    let context = Context::gpu(gpu.clone());
    let same = context.own_types().filter(|dtype| *dtype != DType::F32).map(|dtype| [dtype; 2]);
    let mixed = [[DType::Q4K, DType::Q6K], [DType::Q5K, DType::Q6K]];
    for formats in same.chain(mixed) {
        let [few_cores, more_cores] =
            [&gpu, &larger].map(|gpu| matmuls(&Context::gpu(gpu.clone()), formats, MORE_ROWS));
        assert!(few_cores == more_cores, "{formats:?}");
    }
    let run = larger.num_dispatches();
    let kernels = CUDA_LIBRARIES.iter().flat_map(|library| larger.kernels(library).unwrap());
    let missing: Vec<_> =
        kernels.filter(|kernel| is_of_a_size_for_more_cores(kernel) && !run.contains_key(kernel)).collect();
    assert!(missing.is_empty(), "kernels that are not reached: {missing:?}");
}

/// Rows of each kernel and variant up to 64: alone, in one tile of tokens and in two, in four and in eight. Columns of more than
/// two K tiles of each slice, some slices with one more, and fewer columns than one.
#[test]
fn a_row_has_the_same_bits_alone_and_among_few_and_several_others() {
    // Threadgroups that share columns, and a device of so few cores that none do.
    let (Some(gpu), Some(smaller), Some(two)) = (gpu(Some(MORE_CORES)), gpu(Some(1)), gpu(Some(2))) else {
        return;
    };
    let context = Context::gpu(gpu.clone());
    let same = context.own_types().filter(|dtype| *dtype != DType::F32).map(|dtype| [dtype; 2]);
    let mixed = [[DType::Q4K, DType::Q6K], [DType::Q5K, DType::Q6K]];
    for formats in same.chain(mixed) {
        for cols in [formats[0].block_len().max(48).next_multiple_of(formats[0].block_len()), 4352] {
            let of_rows = |gpu: &Arc<Emulator>, num_rows| {
                matmuls_of(&Context::gpu(gpu.clone()), formats, num_rows, cols)
            };
            let most = of_rows(&gpu, 64);
            for (gpu, num_rows) in [
                (&gpu, 1),
                (&gpu, 8),
                (&gpu, 16),
                (&gpu, 20),
                (&gpu, 40),
                (&smaller, 20),
                (&smaller, 64),
                (&two, 40),
                (&two, 64),
            ] {
                for (own, most) in of_rows(gpu, num_rows).iter().zip(&most) {
                    assert!(*own == most[..own.len()], "{formats:?}, {num_rows} rows of {cols}");
                }
            }
        }
    }
}

/// From 65 to 256 rows, threadgroups share columns: two those of three tiles, four those of one. Their sums match those
/// of the kernels for 64, which add in another order.
#[test]
fn a_row_has_the_same_bits_among_many_others() {
    const COLS: usize = 2304;
    let Some(gpu) = gpu(Some(MORE_CORES)) else { return };
    let same = [DType::BF16, DType::Q4_0, DType::Q8_0, DType::Q6K].map(|dtype| [dtype; 2]);
    for formats in same.into_iter().chain([[DType::Q4K, DType::Q6K]]) {
        let of_rows = |num_rows| matmuls_of(&Context::gpu(gpu.clone()), formats, num_rows, COLS);
        let most = of_rows(256);
        for num_rows in [65, 150] {
            for (own, most) in of_rows(num_rows).iter().zip(&most) {
                assert!(*own == most[..own.len()], "{formats:?}, {num_rows} rows");
            }
        }
        assert!(gpu.num_dispatches().contains_key("reduce_splits"), "{formats:?}");
        for (own, most) in of_rows(64).iter().zip(&most) {
            let [own, most] = [&own[..], &most[..own.len()]]
                .map(|bits| bits.iter().map(|bits| f32::from_bits(*bits)).collect::<Vec<_>>());
            let largest = own.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            let error = own.iter().zip(&most).fold(0.0_f32, |error, (a, b)| error.max((a - b).abs()));
            assert!(own.is_empty() || error < 1e-3 * largest, "{formats:?}: {error}, {largest}");
        }
    }
}
