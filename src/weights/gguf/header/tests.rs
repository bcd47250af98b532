use proptest::prelude::*;

use super::*;
use crate::ErrorKind;
use crate::weights::DType;
use crate::weights::gguf::test_file::{TestFile, text};

fn check_error(bytes: &[u8], kind: ErrorKind, expected: &str) {
    let error = parse_header(bytes).expect_err(expected);
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(format!("{error:?}").contains(expected), "{error:?} does not contain {expected:?}");
}

/// Applies `change` to a valid file and expects the header to be refused with `expected` in the message.
fn check_broken(change: impl FnOnce(&mut TestFile), expected: &str) {
    let mut file = TestFile::sample();
    change(&mut file);
    check_error(&file.bytes(), ErrorKind::InvalidModel, expected);
}

#[test]
fn sample_is_read() {
    for version in [2, 3] {
        let bytes = TestFile { version, ..TestFile::sample() }.bytes();
        let header = parse_header(&bytes).unwrap();
        assert_eq!(header.version, version);
        let metadata = &header.metadata;
        assert_eq!(metadata.str("general.architecture"), Some("llama"));
        assert_eq!(metadata.usize("llama.block_count"), Some(2));
        assert_eq!(metadata.f64("llama.rope.freq_base"), Some(1e4));
        assert_eq!(metadata.strings("tokenizer.ggml.tokens").unwrap(), ["a", "bc", ""]);
        assert_eq!(metadata.floats("tokenizer.ggml.scores").unwrap(), [0.0, 0.0]);
        assert_eq!(metadata.integers("tokenizer.ggml.token_type").unwrap(), [1, 3]);
        assert_eq!(metadata.bool("tokenizer.ggml.add_bos_token"), Some(true));
        let tensors: Vec<_> = header
            .tensors
            .iter()
            .map(|tensor| {
                (tensor.name.as_str(), tensor.tensor_type, tensor.shape.as_slice(), tensor.range.len())
            })
            .collect();
        assert_eq!(
            tensors,
            [
                ("output_norm.weight", TensorType::Known(DType::F32.into()), [4].as_slice(), 16),
                ("token_embd.weight", TensorType::Known(DType::Q8_0.into()), &[3, 32], 102),
                ("output.weight", TensorType::Known(DType::F32.into()), &[3, 2, 4], 96),
            ]
        );
        assert_eq!(header.tensors[2].range.end, bytes.len());
        assert!(header.tensors.iter().all(|tensor| tensor.range.start.is_multiple_of(32)));
    }
}

#[test]
fn version_1_has_short_lengths() {
    let mut file = TestFile { version: 1, ..TestFile::new() };
    file.entry("general.file_type", 4, &[0; 4]);
    file.entry("name", 8, &[&[2, 0, 0, 0], b"ab".as_slice()].concat());
    file.tensor("x", &[8, 2], 1, &[0; 32]);
    let header = parse_header(&file.bytes()).unwrap();
    assert_eq!(header.metadata.str("name"), Some("ab"));
    assert_eq!(header.tensors[0].shape, [2, 8]);
}

#[test]
fn every_value_type_is_read() {
    let mut file = TestFile::new();
    let long = (-2_i64).to_le_bytes();
    let scalars: [(u32, usize, Value); 12] = [
        (0, 1, Value::Unsigned(254)),
        (1, 1, Value::Signed(-2)),
        (2, 2, Value::Unsigned(65534)),
        (3, 2, Value::Signed(-2)),
        (4, 4, Value::Unsigned(0xFFFF_FFFE)),
        (5, 4, Value::Signed(-2)),
        (7, 1, Value::Bool(true)),
        (10, 8, Value::Unsigned(u64::MAX - 1)),
        (11, 8, Value::Signed(-2)),
        (8, 0, Value::String("naïve".into())),
        (6, 0, Value::Float(0.5)),
        (12, 0, Value::Float(0.1)),
    ];
    for (value_type, width, _) in &scalars {
        let value = match value_type {
            8 => text("naïve"),
            6 => 0.5_f32.to_le_bytes().to_vec(),
            12 => 0.1_f64.to_le_bytes().to_vec(),
            _ => long[..*width].to_vec(),
        };
        file.entry(&format!("scalar.{value_type}"), *value_type, &value);
    }
    for (value_type, width) in [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (5, 4), (10, 8), (11, 8)] {
        file.array(
            &format!("array.{value_type}"),
            value_type,
            2,
            &[&long[..width], &[0; 8][..width]].concat(),
        );
    }
    file.array("bools", 7, 2, &[0, 1]);
    file.array("doubles", 12, 1, &0.5_f64.to_le_bytes());
    let inner = [&4_u32.to_le_bytes()[..], &1_u64.to_le_bytes(), &[0; 4]].concat();
    file.array("nested", 9, 2, &[inner.clone(), inner].concat());
    let header = parse_header(&file.bytes()).unwrap();
    for (value_type, _, expected) in &scalars {
        assert_eq!(header.metadata.get(&format!("scalar.{value_type}")), Some(expected));
    }
    for (value_type, expected) in
        [(0, 254), (1, -2), (2, 65534), (3, -2), (4, 0xFFFF_FFFE), (5, -2), (10, i64::MAX), (11, -2)]
    {
        let values = header.metadata.integers(&format!("array.{value_type}")).unwrap();
        assert_eq!(values, [expected, 0], "type {value_type}");
    }
    assert_eq!(header.metadata.get("bools"), Some(&Value::Bools(vec![false, true])));
    assert_eq!(header.metadata.floats("doubles").unwrap(), [0.5]);
    assert_eq!(header.metadata.get("nested"), Some(&Value::Nested(2)));
}

#[test]
fn alignment_of_the_file_is_used() {
    let mut file = TestFile { alignment: 64, ..TestFile::new() };
    file.entry("general.alignment", 4, &64_u32.to_le_bytes());
    file.tensor("a", &[1], 0, &[0; 4]);
    file.tensor("b", &[1], 0, &[0; 4]);
    let header = parse_header(&file.bytes()).unwrap();
    assert!(header.tensors.iter().all(|tensor| tensor.range.start.is_multiple_of(64)));
}

#[test]
fn tensors_of_unknown_type_are_listed() {
    let mut file = TestFile::sample();
    file.tensor("blk.0.attn_q.weight", &[256], 40, &[]);
    file.tensor("blk.0.attn_k.weight", &[256], 99, &[]);
    let header = parse_header(&file.bytes()).unwrap();
    let types: Vec<_> = header.tensors.iter().skip(3).map(|tensor| tensor.tensor_type.to_string()).collect();
    assert_eq!(types, ["NVFP4", "number 99"]);
}

#[test]
fn text_with_broken_utf_8_is_replaced_but_names_are_refused() {
    let mut file = TestFile::new();
    file.entry("general.name", 8, &[&2_u64.to_le_bytes()[..], &[b'a', 0xFF]].concat());
    let header = parse_header(&file.bytes()).unwrap();
    assert_eq!(header.metadata.str("general.name"), Some("a\u{FFFD}"));
    let mut bytes = file.bytes();
    bytes[32] = 0xFF;
    check_error(&bytes, ErrorKind::InvalidModel, "not UTF-8");
}

#[test]
fn files_of_other_kinds_are_named() {
    let safetensors = [&100_u64.to_le_bytes()[..], b"{\"a\":{}}"].concat();
    for (bytes, expected) in [
        (b"".as_slice(), "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b"\n<HTML lang=en>", "an HTML page"),
        (&safetensors, "a safetensors file"),
        (b"PK\x03\x04....", "PyTorch"),
        (b"tjgg\x01\0\0\0", "before GGUF"),
        (b"{\"error\":\"not found\"}", "a JSON text"),
        (b"GGU", "47, 47, 55"),
        (b"\x01\x02\x03", "01, 02, 03"),
    ] {
        check_error(bytes, ErrorKind::InvalidModel, expected);
    }
}

#[test]
fn versions_and_byte_orders_that_cannot_be_read() {
    for (version, expected) in [(0_u32, "version 0"), (4, "version 4"), (3_u32.swap_bytes(), "big-endian")] {
        let bytes = TestFile { version, ..TestFile::sample() }.bytes();
        check_error(&bytes, ErrorKind::Unsupported, expected);
    }
}

#[test]
fn counts_beyond_the_file() {
    for huge in [u64::MAX, u64::MAX / 24, 1 << 40, 1000] {
        check_broken(|file| file.num_tensors = Some(huge), "tensors");
        check_broken(|file| file.num_entries = Some(huge), "metadata entries");
        for element_type in [0, 4, 8, 9, 10] {
            check_broken(|file| file.array("x", element_type, huge, &[]), "array elements");
        }
    }
}

#[test]
fn lengths_beyond_the_file() {
    for huge in [u64::MAX, 1 << 63, 1 << 32, 10_000] {
        check_broken(|file| file.entry("x", 8, &huge.to_le_bytes()), "\"x\"");
        check_broken(|file| file.array("x", 8, 1, &huge.to_le_bytes()), "\"x\"");
    }
}

#[test]
fn broken_metadata() {
    check_broken(|file| file.entry("x", 13, &[0; 8]), "13 is not a metadata type");
    check_broken(|file| file.array("x", 13, 1, &[0; 8]), "13 is not a metadata type");
    check_broken(|file| file.string("general.architecture", "twice"), "occurs twice");
    for alignment in [0_u32, 3, 33, u32::MAX] {
        check_broken(
            |file| file.entry("general.alignment", 4, &alignment.to_le_bytes()),
            "general.alignment",
        );
    }
    let text = "general.alignment is the text \"32\", expected a power of two";
    check_broken(|file| file.string("general.alignment", "32"), text);
}

#[test]
fn nested_arrays_end_somewhere() {
    let mut value = [&4_u32.to_le_bytes()[..], &0_u64.to_le_bytes()].concat();
    for _ in 0..100 {
        value = [&9_u32.to_le_bytes()[..], &1_u64.to_le_bytes(), &value].concat();
    }
    let mut file = TestFile::new();
    file.entry("x", 9, &value);
    check_error(&file.bytes(), ErrorKind::Unsupported, "nested more than 4 deep");
}

#[test]
fn broken_tensors() {
    check_broken(|file| file.tensors[0].num_dims = 5, "5 dimensions");
    check_broken(|file| file.tensors[0].num_dims = u32::MAX, "dimensions");
    check_broken(|file| file.tensors[0].dims = vec![0], "is empty");
    check_broken(|file| file.tensors[2].dims = vec![1 << 32, 1 << 32, 1], "overflows");
    check_broken(|file| file.tensors[2].dims = vec![u64::MAX, u64::MAX, u64::MAX], "overflows");
    // The number of elements fits, that of bytes does not.
    check_broken(|file| file.tensors[2].dims = vec![1 << 31, 1 << 31, 1], "overflows");
    check_broken(|file| file.tensors[1].dims = vec![33, 3], "not a whole number of Q8_0 blocks");
    check_broken(|file| file.tensors[0].offset = 1, "not a multiple of 32");
    check_broken(|file| file.tensors[2].offset = file.tensors[1].offset, "have bytes in common");
    check_broken(|file| file.tensors[2].offset = 1 << 30, "beyond the file");
    check_broken(|file| file.tensors[2].offset = u64::MAX - 31, "beyond the file");
    check_broken(|file| file.tensors[2].dims = vec![4, 2, 4], "beyond the file");
    check_broken(|file| file.tensors[1].name = file.tensors[0].name.clone(), "occurs twice");
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = TestFile::sample().bytes();
    for len in 0..bytes.len() {
        assert!(parse_header(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
    }
}

#[test]
fn fixtures_are_read() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
    for (path, num_tensors) in [
        ("tiny/llama/llama.f32.gguf", 30),
        ("tiny/llama3/llama3.q4_0.gguf", 30),
        ("kquant/qwen3/qwen3.q4_k_mix.gguf", 35),
    ] {
        let header = parse_header(&std::fs::read(format!("{root}/{path}")).unwrap()).unwrap();
        assert_eq!(header.tensors.len(), num_tensors, "{path}");
        assert_eq!(header.metadata.strings("tokenizer.ggml.tokens").unwrap().len(), 288);
    }
}

/// Bytes to overwrite, as (position scaled to the file, value).
fn mutations() -> impl Strategy<Value = Vec<(f64, u8)>> {
    prop::collection::vec((0.0..1.0, prop_oneof![any::<u8>(), Just(0), Just(0xFF), Just(0x7F)]), 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_headers_never_panic(mutations in mutations(), keep in 0.3..1.3) {
        let mut bytes = TestFile::sample().bytes();
        let len = bytes.len();
        for (position, value) in mutations {
            bytes[(position * len as f64) as usize] = value;
        }
        bytes.truncate((keep * len as f64) as usize);
        if let Ok(header) = parse_header(&bytes) {
            for tensor in &header.tensors {
                prop_assert!(bytes.get(tensor.range.clone()).is_some(), "{:?}", tensor);
            }
        }
    }

    #[test]
    fn random_bytes_after_the_magic_never_panic(tail in prop::collection::vec(any::<u8>(), 0..200)) {
        let bytes = [b"GGUF\x03\0\0\0".as_slice(), &tail].concat();
        let _ = parse_header(&bytes);
    }
}
