//! The block formats, against the files of other programs, candle's encoders, and themselves.

use ::safetensors::SafeTensors;
use proptest::prelude::*;

use super::blocks::{can_quantize, can_repack, dequantize, quantize, repack};
use super::{DType, FileType, RepackedType};

fn fixture(path: &str) -> Vec<u8> {
    let path = format!("{}/tests/fixtures/{path}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0xAA; dtype.row_bytes(values.len()).unwrap()];
    quantize(dtype, values, &mut bytes).unwrap();
    bytes
}

fn decode(file_type: impl Into<FileType>, bytes: &[u8]) -> Vec<f32> {
    let file_type = file_type.into();
    let mut values = vec![f32::NAN; bytes.len() / file_type.block_bytes() * file_type.block_len()];
    dequantize(file_type, bytes, &mut values).unwrap();
    values
}

/// Repeatable values with the shape of weights: a sum of uniform numbers, with a few outliers.
fn weights(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5
    };
    (0..len)
        .map(|i| {
            let normal = (0..12).map(|_| uniform()).sum::<f32>() * 0.02;
            if i % 997 == 0 { normal * 6.0 } else { normal }
        })
        .collect()
}

fn mean_square_error(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / a.len() as f64
}

#[test]
fn random_blocks_decode_bit_for_bit() {
    let file = fixture("blocks.safetensors");
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let mut checked = 0;
    for file_type in FileType::all().filter(|file_type| file_type.block_len() > 1) {
        // The package that made the fixture does not decode these.
        if ["Q1_0", "Q2_0"].contains(&file_type.name()) {
            continue;
        }
        let raw = tensors.tensor(&format!("{file_type}.raw")).unwrap();
        let expected = floats(tensors.tensor(&format!("{file_type}.f32")).unwrap().data());
        let values = decode(file_type, raw.data());
        assert!(!values.is_empty() && values.len() == expected.len());
        for (index, (value, expected)) in values.iter().zip(&expected).enumerate() {
            assert_eq!(value.to_bits(), expected.to_bits(), "{file_type} value {index}: {value} {expected}");
        }
        checked += 1;
    }
    assert_eq!(checked, 22);
}

/// Neighbouring values are in neighbouring bits.
#[test]
fn bits_of_a_sign_and_of_four_levels_decode() {
    let block = |bytes: &[u8]| [&half::f16::from_f32(0.5).to_le_bytes(), bytes].concat();
    let q1_0 = FileType::Repacked(RepackedType::Q1_0);
    let values = decode(q1_0, &block(&[0b0000_0101; 16]));
    assert_eq!(values[..9], [0.5, -0.5, 0.5, -0.5, -0.5, -0.5, -0.5, -0.5, 0.5]);
    assert_eq!(values[8..16], values[120..]);
    let q2_0 = FileType::Repacked(RepackedType::Q2_0);
    let values = decode(q2_0, &block(&[0b11_10_01_00; 16]));
    assert_eq!(values[..5], [-0.5, 0.0, 0.5, 1.0, -0.5]);
    assert_eq!(values[60..], values[..4]);
}

/// For every type of files, everything that it can be repacked to.
#[test]
fn repacked_blocks_have_the_same_values() {
    let mut checked = 0;
    for file_type in FileType::all() {
        // Any bytes are a block; few have a factor that is no number.
        let mut state = 7_u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let bytes: Vec<u8> = (0..64 * file_type.block_bytes()).map(|_| random()).collect();
        let values = decode(file_type, &bytes);
        for target in DType::ALL.into_iter().filter(|target| can_repack(file_type, *target)) {
            let mut repacked = vec![0xAA; target.row_bytes(values.len()).unwrap()];
            repack(file_type, target, &bytes, &mut repacked).unwrap();
            let decoded = decode(target, &repacked);
            for (index, (value, decoded)) in values.iter().zip(&decoded).enumerate() {
                let same = value == decoded || !value.is_finite();
                assert!(same, "{file_type} as {target}, value {index}: {value} {decoded}");
            }
            assert!(values.iter().filter(|value| value.is_finite()).count() > values.len() / 2);
            checked += 1;
        }
    }
    // Each to itself or to the type that it is kept as.
    assert_eq!(checked, FileType::all().count());
    let no_way = repack(DType::Q4K.into(), DType::Q8_0, &[0; 144], &mut [0; 272]).unwrap_err();
    assert_eq!(no_way.kind(), crate::ErrorKind::Internal);
}

#[test]
fn dense_types_decode() {
    assert_eq!(decode(DType::F32, &[0, 0, 0x80, 0x3F]), [1.0]);
    assert_eq!(decode(DType::F16, &[0x00, 0x3C, 0x00, 0xC0]), [1.0, -2.0]);
    assert_eq!(decode(DType::BF16, &[0x80, 0x3F, 0x00, 0xC0]), [1.0, -2.0]);
}

#[test]
fn dense_types_round_to_nearest_even() {
    // 1 + 2⁻¹¹ is halfway between two halves, 1 + 2⁻⁸ between two bf16 numbers.
    assert_eq!(encode(DType::F16, &[1.0 + 0.5_f32.powi(11)]), [0x00, 0x3C]);
    assert_eq!(encode(DType::BF16, &[1.0 + 0.5_f32.powi(8)]), [0x80, 0x3F]);
    assert_eq!(encode(DType::F32, &[-2.5]), (-2.5_f32).to_le_bytes());
}

#[test]
fn types_without_an_encoder_are_an_error() {
    let error = quantize(DType::Q3K, &[0.0; 256], &mut [0; 110]).unwrap_err();
    assert_eq!(error.kind(), crate::ErrorKind::Unsupported);
}

#[test]
fn block_of_zeros_decodes_to_zeros() {
    for dtype in DType::ALL.into_iter().filter(|dtype| can_quantize(*dtype)) {
        let zeros = vec![0.0; 512];
        let values = decode(dtype, &encode(dtype, &zeros));
        assert!(values.iter().all(|value| *value == 0.0), "{dtype}");
    }
}

#[test]
fn known_q4_0_block() {
    let bytes: [u8; 18] = [
        0x00, 0x34, 0x80, 0x91, 0x91, 0xA2, 0xA2, 0xB3, 0xB3, 0xC4, 0xC4, 0xD5, 0xD5, 0xE6, 0xE6, 0xF7, 0xF7,
        0xF8,
    ];
    let values = decode(DType::Q4_0, &bytes);
    assert_eq!([values[0], values[1], values[15], values[16], values[31]], [-2.0, -1.75, 0.0, 0.0, 1.75]);
    assert_eq!(encode(DType::Q4_0, &values), bytes);
}

/// candle's encoder is a port of ggml's: ours has to be at least as good.
#[test]
fn blocks_are_as_exact_as_those_of_the_reference() {
    use candle_core::quantized::{GgmlDType, QTensor};
    use candle_core::{Device, Tensor};
    for (dtype, reference, skewed) in [
        (DType::Q4_1, GgmlDType::Q4_1, false),
        (DType::Q4_1, GgmlDType::Q4_1, true),
        (DType::Q5_0, GgmlDType::Q5_0, false),
        (DType::Q5_1, GgmlDType::Q5_1, false),
        (DType::Q5_1, GgmlDType::Q5_1, true),
        (DType::Q4K, GgmlDType::Q4K, false),
        (DType::Q4K, GgmlDType::Q4K, true),
        (DType::Q5K, GgmlDType::Q5K, false),
        (DType::Q5K, GgmlDType::Q5K, true),
        (DType::Q6K, GgmlDType::Q6K, false),
    ] {
        let mut values = weights(256 * 64, 3);
        if skewed {
            values.iter_mut().for_each(|value| *value = value.abs() * 3.0 + 0.01);
        }
        let tensor = Tensor::from_slice(&values, (64, 256), &Device::Cpu).unwrap();
        let theirs = QTensor::quantize(&tensor, reference).unwrap().dequantize(&Device::Cpu).unwrap();
        let theirs = theirs.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let ours = decode(dtype, &encode(dtype, &values));
        let (ours, theirs) = (mean_square_error(&ours, &values), mean_square_error(&theirs, &values));
        println!("{dtype} skewed={skewed} ours {ours:e} theirs {theirs:e}");
        let bar = if matches!(dtype, DType::Q4_1 | DType::Q5_1) { 0.97 } else { 1.005 };
        assert!(ours <= theirs * bar, "{dtype}: {ours:e} against {theirs:e}");
    }
}

#[test]
fn values_of_the_format_survive_a_round_trip() {
    // Codes that use the whole range in every sub-block have one best encoding: themselves.
    let values: Vec<f32> = (0..256).map(|i| ((i * 7) % 16) as f32 * 0.5 - 3.0).collect();
    let decoded = decode(DType::Q4K, &encode(DType::Q4K, &values));
    for (value, decoded) in values.iter().zip(&decoded) {
        assert!((value - decoded).abs() < 0.02, "{value} {decoded}");
    }
}

#[test]
fn blocks_of_fewer_levels_survive_in_types_with_a_minimum() {
    for (num_levels, dtype) in [(16, DType::Q4_1), (16, DType::Q5_1), (32, DType::Q5_1), (31, DType::Q5_1)] {
        // Values of all levels in each block.
        let values: Vec<f32> =
            (0..256).map(|i| (i * 7 % num_levels) as f32 * 0.125 + (i / 32) as f32 - 3.0).collect();
        assert_eq!(decode(dtype, &encode(dtype, &values)), values, "{num_levels} levels in {dtype}");
    }
}

#[test]
fn wrong_lengths_are_errors() {
    let mut values = [0.0; 32];
    for (num_values, num_bytes) in [(31, 18), (32, 17), (32, 19), (32, 0), (0, 18)] {
        let error = dequantize(DType::Q4_0, &[0; 64][..num_bytes], &mut values[..num_values]).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::InvalidModel, "{num_values} {num_bytes}");
        let error = quantize(DType::Q4_0, &values[..num_values], &mut [0; 64][..num_bytes]).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::InvalidModel, "{num_values} {num_bytes}");
    }
}

#[test]
fn values_that_cannot_be_stored_are_errors() {
    for dtype in DType::ALL.into_iter().filter(|dtype| can_quantize(*dtype)) {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![0.5; 512];
            values[300] = bad;
            let mut out = vec![0; dtype.row_bytes(512).unwrap()];
            let error = quantize(dtype, &values, &mut out).unwrap_err();
            assert!(error.message().contains("value 300"), "{dtype}: {error}");
        }
        if !matches!(dtype, DType::F32 | DType::BF16) {
            for huge in [f32::MAX, 1e20, 1e9] {
                let mut values = vec![0.5; 512];
                values[300] = huge;
                let mut out = vec![0; dtype.row_bytes(512).unwrap()];
                let error = quantize(dtype, &values, &mut out).unwrap_err();
                assert!(error.message().contains("beyond the range of f16"), "{dtype} {huge}: {error}");
            }
        }
    }
}

proptest! {
    /// No step of a code is larger than the range over the number of codes, within rounding of the scales.
    #[test]
    fn error_is_bounded_by_the_step(
        values in prop::collection::vec(-4.0_f32..4.0, 256),
        magnitude in -2_i32..3,
    ) {
        let factor = 10.0_f32.powi(magnitude);
        let values: Vec<f32> = values.iter().map(|value| value * factor).collect();
        for (dtype, steps) in [
            (DType::Q8_0, 250.0), (DType::Q6K, 58.0), (DType::Q5_0, 30.0), (DType::Q5_1, 30.0), (DType::Q5K, 20.0),
            (DType::Q4_0, 14.0), (DType::Q4_1, 14.0), (DType::Q4K, 10.0)
        ] {
            let decoded = decode(dtype, &encode(dtype, &values));
            for (value, decoded) in values.iter().zip(&decoded) {
                // The factor of a super-block is rounded to multiples of 6e-8 at least, times 63 · 15.
                let bound = 8.0 * factor / steps + 6e-5;
                prop_assert!((value - decoded).abs() <= bound, "{} {} {}", dtype, value, decoded);
            }
        }
    }

    #[test]
    fn any_bytes_decode(bytes in prop::collection::vec(any::<u8>(), 274)) {
        for file_type in FileType::all().chain([DType::Q8S.into()]) {
            let num_blocks = bytes.len() / file_type.block_bytes();
            let mut values = vec![0.0; num_blocks * file_type.block_len()];
            dequantize(file_type, &bytes[..num_blocks * file_type.block_bytes()], &mut values)?;
        }
    }
}
