//! Every type at every level of this machine, against f64 sums over values that [`crate::blocks`] decodes, which does
//! not use the packed layout.

use half::{bf16, f16};

use super::activations::{BLOCK, BLOCK_BYTES};
use super::prepare::{PanelRow, PrepareRows};
use super::*;
use crate::DType;
use crate::ErrorKind;
use crate::memory::AlignedBuffer;
use crate::noise::factors_of_block;
use crate::simd::SoftwareTiles;

/// A small generator of reproducible numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// In -1..1.
    fn value(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value()).collect()
    }
}

/// Random blocks as a file stores them: every code and scale occurs, the f16 factors are moderate.
fn random_weights(dtype: DType, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..rows * cols / dtype.block_len() {
        match dtype {
            DType::F32 => bytes.extend(random.value().to_le_bytes()),
            DType::F16 => bytes.extend(f16::from_f32(random.value()).to_le_bytes()),
            DType::BF16 => bytes.extend(bf16::from_f32(random.value()).to_le_bytes()),
            _ => {
                let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| random.next() as u8).collect();
                for &at in factors_of_block(dtype) {
                    block[at..at + 2].copy_from_slice(&f16::from_f32(random.value() * 0.01).to_le_bytes());
                }
                if dtype == DType::Mxfp4 {
                    block[0] = 118 + block[0] % 8;
                }
                bytes.extend(block);
            }
        }
    }
    bytes
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    crate::blocks::dequantize(dtype, bytes, &mut values).unwrap();
    values
}

/// A row after quantisation to 8 bits.
fn quantized(row: &[f32]) -> Vec<f32> {
    row.chunks(32)
        .flat_map(|block| {
            let largest = block.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            let inverse = if largest == 0.0 { 0.0 } else { 127.0 / largest };
            block.iter().map(move |value| (value * inverse).round_ties_even() * (largest / 127.0))
        })
        .collect()
}

/// Columns that are no multiple of anything larger than the type asks for.
fn test_cols(dtype: DType) -> usize {
    match dtype.block_len() {
        1 => 77,
        32 => 160,
        _ => 512,
    }
}

struct Case {
    dtype: DType,
    cols: usize,
    weights: Vec<f32>,
    matrix: PackedMatrix,
}

fn case(dtype: DType, rows: usize, cols: usize, level: CpuLevel) -> Case {
    let bytes = random_weights(dtype, rows, cols, &mut Random(0x9e37_79b9_7f4a_7c15));
    let matrix = PackedMatrix::pack(dtype, &bytes, rows, cols, &ThreadPool::new(2), level).unwrap();
    Case { dtype, cols, weights: decode(dtype, &bytes), matrix }
}

impl Case {
    fn activations(&self, x: &[f32], pool: &ThreadPool, level: CpuLevel) -> Activations {
        let mut activations = Activations::new();
        let rows = x.len() / self.cols;
        activations.prepare(
            x,
            self.cols,
            rows,
            self.cols,
            None,
            ActivationFormats::of([self.dtype], level),
            pool,
            level,
        );
        activations
    }

    fn multiply(&self, x: &[f32], pool: &ThreadPool, level: CpuLevel) -> Vec<f32> {
        let rows = x.len() / self.cols;
        let mut out = vec![f32::NAN; rows * self.matrix.rows()];
        let projections = [Projection::new(&self.matrix, 0)];
        let activations = self.activations(x, pool, level);
        matmul(&activations, &projections, &mut out, self.matrix.rows(), Mode::Store, pool, level);
        out
    }

    /// For every output the f64 dot product and the f64 sum of the magnitudes of its terms.
    fn oracle(&self, x: &[f32]) -> Vec<(f64, f64)> {
        x.chunks(self.cols)
            .flat_map(|x| {
                self.weights.chunks(self.cols).map(move |weights| {
                    let terms = weights.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x));
                    terms.fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()))
                })
            })
            .collect()
    }
}

fn each_type_and_level(check: impl Fn(DType, CpuLevel)) {
    for dtype in DType::ALL {
        for &level in CpuLevel::available() {
            check(dtype, level);
        }
    }
}

#[test]
fn packed_rows_have_the_values_of_the_file() {
    each_type_and_level(|dtype, level| {
        for rows in [1, 16, 37] {
            let cols = test_cols(dtype);
            let case = case(dtype, rows, cols, level);
            let mut row = vec![0.0; cols];
            for (index, expected) in case.weights.chunks(cols).enumerate() {
                case.matrix.dequantize_row(index, &mut row);
                assert_eq!(row, expected, "{dtype} row {index}");
            }
        }
    });
}

#[test]
fn packed_matrices_have_the_size_of_the_file() {
    for dtype in DType::ALL {
        let case = case(dtype, 32, 512, CpuLevel::Portable);
        assert_eq!(case.matrix.num_bytes(), 32 * dtype.row_bytes(512).unwrap(), "{dtype}");
    }
}

#[test]
fn matmuls_are_exact_up_to_the_rounding_of_f32() {
    each_type_and_level(|dtype, level| {
        let cols = test_cols(dtype);
        let case = case(dtype, 37, cols, level);
        let x = Random(3).values(13 * cols);
        let rounded: Vec<f32> = match ActivationFormats::of([dtype], level) {
            ActivationFormats { int8: true, .. } => x.chunks(cols).flat_map(quantized).collect(),
            ActivationFormats { bf16: true, .. } => x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
            _ => x.clone(),
        };
        let results = case.multiply(&x, &ThreadPool::new(2), level);
        for (index, (result, (expected, magnitude))) in
            results.into_iter().zip(case.oracle(&rounded)).enumerate()
        {
            // Types with minima add terms of opposite sign that the oracle has already joined.
            let error = (f64::from(result) - expected).abs();
            assert!(
                error <= 2e-6 * magnitude + 1e-6,
                "{dtype} {level:?} output {index}: {result} is not {expected} ± {magnitude}"
            );
        }
    });
}

#[test]
fn rounded_activations_cost_little_accuracy() {
    each_type_and_level(|dtype, level| {
        let cols = test_cols(dtype);
        let case = case(dtype, 64, cols, level);
        let x = Random(4).values(8 * cols);
        let results = case.multiply(&x, &ThreadPool::new(2), level);
        let (error, power) = results.into_iter().zip(case.oracle(&x)).fold(
            (0.0, 0.0),
            |(error, power), (result, (expected, _))| {
                (error + (f64::from(result) - expected).powi(2), power + expected.powi(2))
            },
        );
        let bound = match ActivationFormats::of([dtype], level) {
            ActivationFormats { int8: true, .. } => 1e-4,
            ActivationFormats { bf16: true, .. } => 5e-6,
            _ => 1e-12,
        };
        assert!(error <= bound * power, "{dtype} {level:?}: normalised error {}", error / power);
    });
}

#[test]
fn a_row_does_not_depend_on_its_batch_or_the_threads() {
    let pools = [1, 2, 3].map(ThreadPool::new);
    each_type_and_level(|dtype, level| {
        let cols = test_cols(dtype);
        let case = case(dtype, 149, cols, level);
        let x = Random(5).values(64 * cols);
        let alone: Vec<f32> = x.chunks(cols).flat_map(|x| case.multiply(x, &pools[0], level)).collect();
        for num_rows in [1, 2, 3, 7, 8, 9, 17, 47, 48, 63, 64] {
            for pool in &pools {
                let x = &x[(64 - num_rows) * cols..];
                let together = case.multiply(x, pool, level);
                let alone = &alone[(64 - num_rows) * 149..];
                let equal = together.iter().zip(alone).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(equal, "{dtype} {level:?}, {num_rows} rows, {pool:?}");
            }
        }
    });
}

/// Sixteen rows as a panel for a matrix unit, made at any level.
fn wide_panel(x: &[f32], cols: usize, level: CpuLevel) -> AlignedBuffer {
    let mut panel = AlignedBuffer::zeroed(MAX_PANEL * cols / BLOCK * BLOCK_BYTES).unwrap();
    for (index, row) in x.chunks(cols).enumerate() {
        let target = PanelRow { panel: panel.as_mut_ptr(), width: MAX_PANEL, index };
        level.run(PrepareRows { rows: &[row], norm: None, targets: &[target] });
    }
    panel
}

/// On machines without a matrix unit this test covers its kernels: software emulates the unit, and the code around it
/// is that of the level.
#[test]
fn a_matrix_unit_has_the_bits_of_vectors() {
    let pool = ThreadPool::new(1);
    let has_unit = CpuLevel::available().iter().any(|level| level.has_matrix_unit());
    println!(
        "matrix unit: {}",
        if has_unit { "in software and this machine's own" } else { "in software only" }
    );
    let each = |dtype: DType, level: CpuLevel, num_blocks: usize| {
        let cols = num_blocks * dtype.block_len();
        let case = case(dtype, 37, cols, level);
        let x = Random(16).values(MAX_PANEL * cols);
        let alone: Vec<f32> = x.chunks(cols).flat_map(|x| case.multiply(x, &pool, level)).collect();
        let panel = wide_panel(&x, cols, level);
        for tile_row in 0..case.matrix.num_tile_rows() {
            let unpacked = UnpackedRows::new([&case.matrix], tile_row, level);
            let mut results = vec![ZERO_OUTPUTS];
            // SAFETY: the panel has the matrix's columns.
            unsafe { unpacked.multiply(&mut SoftwareTiles::new(), 0, panel.as_ptr(), &mut results[0]) };
            if let Some(mut unit) = level.matrix_unit() {
                results.push(ZERO_OUTPUTS);
                // SAFETY: as above.
                unsafe { unpacked.multiply(&mut unit, 0, panel.as_ptr(), &mut results[1]) };
            }
            for (row, lane) in (0..MAX_PANEL).flat_map(|row| (0..TILE_ROWS).map(move |lane| (row, lane))) {
                let output = tile_row * TILE_ROWS + lane;
                let expected = if output < 37 { alone[row * 37 + output] } else { 0.0 };
                for outputs in &results {
                    let result = outputs[row][lane];
                    assert_eq!(
                        result.to_bits(),
                        expected.to_bits(),
                        "{dtype} {level:?}, {num_blocks} blocks, row {row} output {output}: {result} {expected}"
                    );
                }
            }
        }
    };
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_quantized()) {
        for &level in CpuLevel::available() {
            for num_blocks in [1, 2, 5] {
                each(dtype, level, num_blocks);
            }
        }
    }
}

#[test]
fn blocks_of_rows_leave_no_gap() {
    // Wide rows, so that several blocks of rows and several tasks are needed.
    for dtype in [DType::Q4_0, DType::F16, DType::BF16] {
        let level = CpuLevel::detect();
        let case = case(dtype, 50, 10_944, level);
        let x = Random(6).values(100 * 10_944);
        let all = case.multiply(&x, &ThreadPool::new(3), level);
        for row in [0, 7, 8, 31, 32, 63, 64, 99] {
            let alone = case.multiply(&x[row * 10_944..][..10_944], &ThreadPool::new(1), level);
            assert_eq!(all[row * 50..][..50], alone, "{dtype} row {row}");
        }
    }
}

#[test]
fn projections_bias_and_residual() {
    let pool = ThreadPool::new(2);
    for &level in CpuLevel::available() {
        let q = case(DType::Q4K, 40, 256, level);
        let k = case(DType::Q6K, 17, 256, level);
        let v = case(DType::F16, 20, 256, level);
        let x = Random(7).values(3 * 256);
        let bias = Random(8).values(17);
        let mut activations = Activations::new();
        let formats = ActivationFormats::of([DType::Q4K, DType::Q6K, DType::F16], level);
        activations.prepare(&x, 256, 3, 256, None, formats, &pool, level);
        let projections = [
            Projection::new(&q.matrix, 0),
            Projection { matrix: &k.matrix, out_offset: 43, bias: Some(&bias) },
            Projection::new(&v.matrix, 60),
        ];
        let stride = 90;
        let mut out = vec![7.0_f32; 3 * stride];
        matmul(&activations, &projections, &mut out, stride, Mode::Store, &pool, level);
        let mut sum = out.clone();
        matmul(&activations, &projections, &mut sum, stride, Mode::Add, &pool, level);
        let separate = [&q, &k, &v].map(|case| case.multiply(&x, &pool, level));
        for row in 0..3 {
            for col in 0..stride {
                let expected = match col {
                    0..40 => Some(separate[0][row * 40 + col]),
                    43..60 => Some(separate[1][row * 17 + col - 43] + bias[col - 43]),
                    60..80 => Some(separate[2][row * 20 + col - 60]),
                    _ => None,
                };
                let at = row * stride + col;
                assert_eq!(out[at], expected.unwrap_or(7.0), "row {row} column {col}");
                assert_eq!(sum[at], expected.map_or(7.0, |value| value + value), "row {row} column {col}");
            }
        }
    }
}

#[test]
fn swiglu_joins_two_matmuls() {
    let pool = ThreadPool::new(2);
    each_type_and_level(|dtype, level| {
        let cols = test_cols(dtype);
        let gate = case(dtype, 37, cols, level);
        let bytes = random_weights(dtype, 37, cols, &mut Random(11));
        let up = PackedMatrix::pack(dtype, &bytes, 37, cols, &pool, level).unwrap();
        let up = Case { dtype, cols, weights: decode(dtype, &bytes), matrix: up };
        let x = Random(9).values(11 * cols);
        let mut out = vec![f32::NAN; 11 * 40];
        let activations = gate.activations(&x, &pool, level);
        matmul_swiglu(&activations, &gate.matrix, &up.matrix, &mut out, 40, &pool, level);
        let (gates, ups) = (gate.multiply(&x, &pool, level), up.multiply(&x, &pool, level));
        for row in 0..11 {
            for col in 0..37 {
                let (g, u) = (f64::from(gates[row * 37 + col]), f64::from(ups[row * 37 + col]));
                let expected = g / (1.0 + (-g).exp()) * u;
                let result = f64::from(out[row * 40 + col]);
                assert!(
                    (result - expected).abs() <= 1e-6 * expected.abs() + 1e-30,
                    "{dtype} {level:?} row {row} column {col}: {result} is not {expected}"
                );
            }
            assert!(out[row * 40 + 37..][..3].iter().all(|value| value.is_nan()));
        }
    });
}

#[test]
fn swiglu_of_two_types() {
    let pool = ThreadPool::new(2);
    for &level in CpuLevel::available() {
        for (first, second) in [
            (DType::Q8_0, DType::BF16),
            (DType::BF16, DType::Q4_0),
            (DType::F16, DType::Q5_1),
            (DType::BF16, DType::BF16),
        ] {
            let (gate, up) = (case(first, 37, 160, level), case(second, 37, 160, level));
            let x = Random(17).values(67 * 160);
            let mut activations = Activations::new();
            activations.prepare(
                &x,
                160,
                67,
                160,
                None,
                ActivationFormats::of([first, second], level),
                &pool,
                level,
            );
            let (mut out, mut alone) = (vec![f32::NAN; 67 * 37], vec![f32::NAN; 67 * 37]);
            matmul_swiglu(&activations, &gate.matrix, &up.matrix, &mut out, 37, &pool, level);
            for (x, alone) in x.chunks(160).zip(alone.chunks_mut(37)) {
                activations.prepare(
                    x,
                    160,
                    1,
                    160,
                    None,
                    ActivationFormats::of([first, second], level),
                    &pool,
                    level,
                );
                matmul_swiglu(&activations, &gate.matrix, &up.matrix, alone, 37, &pool, level);
            }
            assert_eq!(out, alone, "{first} {second} {level:?}");
        }
    }
}

#[test]
fn the_norm_is_that_of_the_definition() {
    let pool = ThreadPool::new(2);
    for &level in CpuLevel::available() {
        for cols in [77, 256] {
            // The matmul with the identity shows the rows.
            let identity: Vec<u8> = (0..cols * cols)
                .flat_map(|at| f32::from(u8::from(at / cols == at % cols)).to_le_bytes())
                .collect();
            let identity = PackedMatrix::pack(DType::F32, &identity, cols, cols, &pool, level).unwrap();
            let x = Random(12).values(9 * (cols + 3));
            let weights = Random(13).values(cols);
            let mut activations = Activations::new();
            activations.prepare(
                &x,
                cols + 3,
                9,
                cols,
                Some((&weights, 1e-5)),
                ActivationFormats::of([DType::F32], level),
                &pool,
                level,
            );
            let mut out = vec![0.0; 9 * cols];
            matmul(&activations, &[Projection::new(&identity, 0)], &mut out, cols, Mode::Store, &pool, level);
            for row in 0..9 {
                let x = &x[row * (cols + 3)..][..cols];
                let squares: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
                let factor = 1.0 / (squares / cols as f64 + 1e-5).sqrt();
                for col in 0..cols {
                    let expected = f64::from(weights[col]) * f64::from(x[col]) * factor;
                    let result = f64::from(out[row * cols + col]);
                    assert!((result - expected).abs() < 1e-6, "{level:?} row {row} column {col}");
                }
            }
        }
    }
}

#[test]
fn activations_can_be_reused() {
    let pool = ThreadPool::new(1);
    let level = CpuLevel::detect();
    let small = case(DType::Q8_0, 16, 160, level);
    let x = Random(14).values(9 * 160);
    let mut activations = Activations::new();
    let mut results = Vec::new();
    for rows in [9, 2, 0, 1, 9] {
        activations.prepare(
            &x,
            160,
            rows,
            160,
            None,
            ActivationFormats::of([DType::Q8_0], level),
            &pool,
            level,
        );
        let mut out = vec![0.0; rows * 16];
        matmul(&activations, &[Projection::new(&small.matrix, 0)], &mut out, 16, Mode::Store, &pool, level);
        results.push(out);
    }
    for out in &results {
        assert_eq!(out[..], results[0][..out.len()]);
    }
}

#[test]
fn invalid_numbers_are_not_lost() {
    let pool = ThreadPool::new(1);
    each_type_and_level(|dtype, level| {
        let cols = test_cols(dtype);
        let case = case(dtype, 16, cols, level);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = Random(15).values(2 * cols);
            x[5] = bad;
            let out = case.multiply(&x, &pool, level);
            assert!(out[..16].iter().all(|value| !value.is_finite()), "{dtype} {level:?} {bad}");
            assert!(out[16..].iter().all(|value| value.is_finite()), "{dtype} {level:?} {bad}");
        }
    });
}

#[test]
fn extreme_activations() {
    let pool = ThreadPool::new(1);
    for &level in CpuLevel::available() {
        let case = case(DType::Q8_0, 16, 32, level);
        for magnitude in [0.0, 1e-45, 1e-38, 1e-34, 1e30] {
            let x = vec![magnitude; 32];
            let out = case.multiply(&x, &pool, level);
            for (result, (expected, terms)) in out.into_iter().zip(case.oracle(&x)) {
                let error = (f64::from(result) - expected).abs();
                assert!(error <= 1e-5 * terms + 1e-33, "{level:?} {magnitude}: {result} is not {expected}");
            }
        }
    }
}

#[test]
fn the_extreme_codes_do_not_saturate() {
    let pool = ThreadPool::new(1);
    let cols = 256;
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_quantized()) {
        for &level in CpuLevel::available() {
            for fill in [0x00, 0x7f, 0x80, 0xff] {
                let mut bytes = vec![fill; 16 * dtype.row_bytes(cols).unwrap()];
                for block in bytes.chunks_mut(dtype.block_bytes()) {
                    for &at in factors_of_block(dtype) {
                        block[at..at + 2].copy_from_slice(&f16::from_f32(0.25).to_le_bytes());
                    }
                    if dtype == DType::Mxfp4 {
                        block[0] = 125;
                    }
                }
                let matrix = PackedMatrix::pack(dtype, &bytes, 16, cols, &pool, level).unwrap();
                let case = Case { dtype, cols, weights: decode(dtype, &bytes), matrix };
                for sign in [1.0, -1.0] {
                    let x = vec![sign; cols];
                    let out = case.multiply(&x, &pool, level);
                    for (result, (expected, _)) in out.into_iter().zip(case.oracle(&x)) {
                        let error = (f64::from(result) - expected).abs();
                        assert!(
                            error <= 1e-5 * expected.abs() + 1e-2,
                            "{dtype} {level:?} {fill:#x}: {result} is not {expected}"
                        );
                    }
                }
            }
        }
    }
}

/// All exponents of `MXFP4` with which every value is finite, and exact sums.
#[test]
fn every_power_of_two_is_a_scale() {
    let pool = ThreadPool::new(1);
    for &level in CpuLevel::available() {
        let bytes: Vec<u8> = (0..=250).flat_map(|exponent| [exponent; 17]).collect();
        let matrix = PackedMatrix::pack(DType::Mxfp4, &bytes, 251, 32, &pool, level).unwrap();
        let case = Case { dtype: DType::Mxfp4, cols: 32, weights: decode(DType::Mxfp4, &bytes), matrix };
        let mut x = vec![0.0; 32];
        x[3] = 127.0;
        let out = case.multiply(&x, &pool, level);
        for (exponent, (result, (expected, _))) in out.into_iter().zip(case.oracle(&x)).enumerate() {
            assert_eq!(result, expected as f32, "{level:?} {exponent}");
        }
    }
}

#[test]
fn empty_shapes() {
    let pool = ThreadPool::new(2);
    let level = CpuLevel::detect();
    for dtype in DType::ALL {
        let none = PackedMatrix::pack(dtype, &[], 0, 256, &pool, level).unwrap();
        let mut activations = Activations::new();
        activations.prepare(
            &[1.0; 256],
            256,
            1,
            256,
            None,
            ActivationFormats::of([dtype], level),
            &pool,
            level,
        );
        matmul(&activations, &[Projection::new(&none, 0)], &mut [], 0, Mode::Store, &pool, level);
        matmul(&activations, &[], &mut [], 0, Mode::Store, &pool, level);
        assert_eq!(none.num_bytes(), 0);
    }
}

#[test]
fn wrong_sizes_are_errors() {
    let pool = ThreadPool::new(1);
    for (dtype, rows, cols, num_bytes) in [
        (DType::Q4_0, 1, 33, 18),
        (DType::Q4_0, 2, 32, 35),
        (DType::Q4K, 1, 128, 144),
        (DType::F32, 2, 3, 25),
        (DType::F32, usize::MAX, 2, 8),
        (DType::F32, 1, usize::MAX, 8),
    ] {
        let error = PackedMatrix::pack(dtype, &vec![0; num_bytes], rows, cols, &pool, CpuLevel::Portable)
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidModel, "{dtype} {rows} × {cols}: {error}");
    }
}
