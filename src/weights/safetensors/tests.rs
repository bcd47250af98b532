use proptest::prelude::*;

use std::fs;

use super::*;
use crate::ErrorKind;

fn file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// A tensor entry of a header.
fn entry(name: &str, dtype: &str, shape: &[usize], start: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#)
}

fn sample() -> Vec<u8> {
    let header = format!(
        r#"{{"__metadata__":{{"format":"pt"}},{},{},{}}}"#,
        entry("model.norm.weight", "F32", &[2], 0, 8),
        entry("lm_head.weight", "BF16", &[2, 2], 8, 16),
        entry("model.layers.0.self_attn.q_proj.bias", "F16", &[1], 16, 18),
    );
    let data = [
        &1.0_f32.to_le_bytes()[..],
        &(-2.0_f32).to_le_bytes(),
        &[0x80, 0x3F, 0, 0, 0, 0, 0x80, 0x3F],
        &[0, 0x3C],
    ];
    file(&header, &data.concat())
}

fn check_error(bytes: &[u8], kind: ErrorKind, expected: &str) {
    let error = parse_header(bytes).expect_err(expected);
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(format!("{error:?}").contains(expected), "{error:?} does not contain {expected:?}");
}

fn check_folder_error(folder: &Path, kind: ErrorKind, expected: &str) {
    let error = SafetensorsFiles::open(folder, &QuantConfig::default()).expect_err(expected);
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(format!("{error:?}").contains(expected), "{error:?} does not contain {expected:?}");
}

#[test]
fn single_file_is_read_under_canonical_names() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(SINGLE_FILE), sample()).unwrap();
    let files = SafetensorsFiles::open(folder.path(), &QuantConfig::default()).unwrap();
    let read = |name| {
        let tensor = files.tensor(name).unwrap();
        (tensor.dtype, tensor.shape.to_vec(), tensor.to_f32().unwrap())
    };
    assert_eq!(read("output_norm.weight"), (DType::F32, vec![2], vec![1.0, -2.0]));
    assert_eq!(read("output.weight"), (DType::BF16, vec![2, 2], vec![1.0, 0.0, 0.0, 1.0]));
    assert_eq!(read("blk.0.attn_q.bias"), (DType::F16, vec![1], vec![1.0]));
    let error = files.tensor("blk.0.attn_q.weight").unwrap_err();
    for name in ["blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"] {
        assert!(error.message().contains(name), "{error}");
    }
}

#[test]
fn shards_are_found_through_the_index() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
    let one = format!("{{{}}}", entry("model.norm.weight", "F32", &[1], 0, 4));
    let two = format!("{{{}}}", entry("lm_head.weight", "F32", &[1], 0, 4));
    write("one.safetensors", &file(&one, &1.0_f32.to_le_bytes()));
    write("two.safetensors", &file(&two, &2.0_f32.to_le_bytes()));
    let index = |norm: &str, head: &str| {
        let text = format!(r#"{{"weight_map":{{"model.norm.weight":"{norm}","lm_head.weight":"{head}"}}}}"#);
        write(INDEX_FILE, text.as_bytes());
    };

    index("one.safetensors", "two.safetensors");
    let files = SafetensorsFiles::open(folder.path(), &QuantConfig::default()).unwrap();
    assert_eq!(files.tensor("output_norm.weight").unwrap().to_f32().unwrap(), [1.0]);
    assert_eq!(files.tensor("output.weight").unwrap().to_f32().unwrap(), [2.0]);

    index("one.safetensors", "three.safetensors");
    check_folder_error(folder.path(), ErrorKind::NotFound, "a shard is missing");
    index("four.safetensors", "three.safetensors");
    check_folder_error(folder.path(), ErrorKind::NotFound, "has no four.safetensors, three.safetensors");
    index("two.safetensors", "one.safetensors");
    check_folder_error(folder.path(), ErrorKind::InvalidModel, "which does not hold it");
    for outside in ["../one.safetensors", "/etc/passwd", "", ".", "a/one.safetensors"] {
        index("one.safetensors", outside);
        check_folder_error(folder.path(), ErrorKind::InvalidModel, "not the name of a file in this folder");
    }
    write("two.safetensors", &file(&one, &[0; 4]));
    write(
        INDEX_FILE,
        br#"{"weight_map":{"model.norm.weight":"one.safetensors","norm.weight":"two.safetensors"}}"#,
    );
    check_folder_error(folder.path(), ErrorKind::InvalidModel, "occurs twice");
    for (text, expected) in
        [("", "is wrong"), ("[]", "is wrong"), ("{}", "is wrong"), (r#"{"weight_map":{}}"#, "no tensors")]
    {
        write(INDEX_FILE, text.as_bytes());
        check_folder_error(folder.path(), ErrorKind::InvalidModel, expected);
    }
}

#[test]
fn files_of_other_names_are_found() {
    let norm = format!("{{{}}}", entry("model.norm.weight", "F32", &[1], 0, 4));
    let head = format!("{{{}}}", entry("lm_head.weight", "F32", &[1], 0, 4));
    let check = |names: [&str; 2], further: &[(&str, &str)], expected: Option<&str>| {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
        write("config.json", b"{}");
        for (name, header) in names.iter().zip([&norm, &head]).filter(|(name, _)| !name.is_empty()) {
            write(name, &file(header, &[0; 4]));
        }
        further.iter().for_each(|(name, text)| write(name, text.as_bytes()));
        if let Some(expected) = expected {
            check_folder_error(folder.path(), ErrorKind::NotFound, expected);
            return;
        }
        assert!(SafetensorsFiles::are_in(folder.path()), "{names:?}");
        let files = SafetensorsFiles::open(folder.path(), &QuantConfig::default()).unwrap();
        assert!(files.contains("output_norm.weight"), "{names:?}");
        assert_eq!(files.contains("output.weight"), !names[1].is_empty(), "{names:?}");
    };
    let other = ("adapter_model.safetensors", "");
    let consolidated = ("consolidated.safetensors", "");
    check(["gptq_model-4bit-128g.safetensors", ""], &[other, consolidated], None);
    check(["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"], &[other], None);
    check(["a.safetensors", "b.safetensors"], &[], None);
    let list = r#"{"weight_map":{"model.norm.weight":"a.safetensors"}}"#;
    check(["a.safetensors", ""], &[("x.safetensors.index.json", list), ("b.safetensors", "")], None);
    check(["m-00001-of-00002.safetensors", ""], &[], Some("has no m-00002-of-00002.safetensors"));
    let both = "has no m-00001-of-00003.safetensors, m-00003-of-00003.safetensors";
    check(["m-00002-of-00003.safetensors", ""], &[], Some(both));
    check(["m-00002-of-00003.safetensors", ""], &[], Some("2 shards are missing"));
    check(["m-00001-of-00099.safetensors", ""], &[], Some("m-00009-of-00099.safetensors and 90 more"));
    check(["", ""], &[other, consolidated], Some(INDEX_FILE));
}

#[test]
fn types_that_cannot_be_read_fail_when_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let header = format!(
        "{{{},{}}}",
        entry("model.norm.weight", "I16", &[2], 0, 4),
        entry("lm_head.weight", "F32", &[1], 4, 8)
    );
    fs::write(folder.path().join(SINGLE_FILE), file(&header, &[0; 8])).unwrap();
    let files = SafetensorsFiles::open(folder.path(), &QuantConfig::default()).unwrap();
    assert!(files.tensor("output.weight").is_ok());
    let error = files.tensor("output_norm.weight").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("output_norm.weight") && error.message().contains("I16"), "{error}");
}

#[test]
fn broken_headers() {
    let good = entry("a", "F32", &[2], 0, 8);
    for (header, expected) in [
        (String::from("{"), "header is wrong"),
        (String::from(r#"{"a":7}"#), "header is wrong"),
        (format!("{{{}}}", entry("a", "F32", &[3], 0, 8)), "\"a\" has the type F32, the shape [3]"),
        (format!("{{{}}}", entry("a", "F32", &[2], 8, 0)), "take 0 bytes, but 8 follow"),
        (format!("{{{good},{}}}", entry("b", "F32", &[1], 8, 4)), "\"b\" has the type F32"),
        (format!("{{{}}}", entry("a", "F32", &[2], 4, 12)), "take 12 bytes, but 8 follow"),
        (format!("{{{good},{}}}", entry("b", "F32", &[1], 4, 8)), "\"a\" and \"b\" have bytes in common"),
        (format!("{{{}}}", entry("a", "F32", &[1 << 32, 1 << 32], 0, 8)), "which do not fit"),
        (format!("{{{}}}", entry("a", "F4", &[15], 0, 8)), "which do not fit"),
        (format!("{{{}}}", entry("a", "U8", &[1 << 60], 0, 1 << 60)), "take 1152921504606846976 bytes"),
        (format!("{{{good},{}}}", entry("b", "F32", &[1], 8, 12)), "take 12 bytes, but 8 follow"),
        (String::from("{}"), "take 0 bytes"),
    ] {
        check_error(&file(&header, &[0; 8]), ErrorKind::InvalidModel, expected);
    }
    let unknown = format!("{{{}}}", entry("a", "F33", &[2], 0, 8));
    check_error(&file(&unknown, &[0; 8]), ErrorKind::Unsupported, "\"a\" has the type \"F33\"");
}

#[test]
fn what_no_model_reads_may_be_of_any_form() {
    const MASK: &str = "model.layers.0.self_attn.rotary_emb.inv_freq";
    let norm = entry("model.norm.weight", "F32", &[1], 4, 8);
    for odd in [
        r#""__metadata__":[1]"#.to_owned(),
        r#""__metadata__":{"a":1}"#.to_owned(),
        entry(MASK, "F33", &[1], 0, 4),
        entry(MASK, "F32", &[7], 0, 4),
        entry(MASK, "F32", &[2], 0, 8),
        [entry(MASK, "F32", &[1], 0, 4), entry(MASK, "F32", &[1], 4, 8)].join(","),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let data = [2.0_f32.to_le_bytes(), 1.0_f32.to_le_bytes()].concat();
        fs::write(folder.path().join(SINGLE_FILE), file(&format!("{{{odd},{norm}}}"), &data)).unwrap();
        let files = SafetensorsFiles::open(folder.path(), &QuantConfig::default()).expect(&odd);
        assert_eq!(files.tensor("output_norm.weight").unwrap().to_f32().unwrap(), [1.0], "{odd}");
    }
    // A name that occurs twice with other bytes is not resolved in favour of the last one.
    let folder = tempfile::tempdir().unwrap();
    let twice = format!("{{{},{norm}}}", entry("model.norm.weight", "F32", &[1], 0, 4));
    fs::write(folder.path().join(SINGLE_FILE), file(&twice, &[0; 8])).unwrap();
    check_folder_error(folder.path(), ErrorKind::InvalidModel, "\"output_norm.weight\" occurs twice");
}

/// Nothing is searched for each tensor.
#[test]
fn a_header_of_many_tensors_is_read_in_passing() {
    let entries: Vec<_> = (0..50_000).map(|i| entry(&format!("t{i}"), "U8", &[1], i, i + 1)).collect();
    let bytes = file(&format!("{{{}}}", entries.join(",")), &[0; 50_000]);
    assert_eq!(parse_header(&bytes).unwrap().len(), 50_000);
}

/// Together these ranges end just below 2⁶⁴, where adding the length of the header would overflow.
#[test]
fn sum_of_sizes_near_the_end_of_the_address_space() {
    let size = (1_u64 << 61) - 1;
    let entries: Vec<_> =
        (0..8).map(|i| entry(&format!("t{i}"), "U8", &[size as usize], i * size, (i + 1) * size)).collect();
    check_error(&file(&format!("{{{}}}", entries.join(",")), &[]), ErrorKind::InvalidModel, "but 0 follow");
}

#[test]
fn broken_lengths() {
    let mut bytes = sample();
    for length in [u64::MAX, 1 << 63, 1 << 32, 100_000_001, bytes.len() as u64 - 7] {
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        check_error(&bytes, ErrorKind::InvalidModel, "header claims");
    }
    let bytes = sample();
    for len in 0..bytes.len() {
        assert!(parse_header(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
    }
    let check = |bytes: &[u8], message: &str, way_out: &str| {
        check_error(bytes, ErrorKind::InvalidModel, message);
        let error = parse_header(bytes).unwrap_err();
        assert!(error.hint().unwrap().contains(way_out), "{:?}", error.hint());
    };
    check(
        &[&bytes[..], &[0]].concat(),
        "take 18 bytes, but 19 follow",
        "1 bytes longer than its header says",
    );
    check(&bytes[..bytes.len() - 1], "take 18 bytes, but 17 follow", "download is incomplete");
}

#[test]
fn files_of_other_kinds_are_named() {
    for (bytes, expected) in [
        (b"".as_slice(), "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        (b"<!doctype html><html></html>", "an HTML page"),
        (b"GGUF\x03\0\0\0\0\0\0\0", "a GGUF file"),
        (b"PK\x03\x04\x14\0\0\0\x08\x08", "PyTorch"),
    ] {
        check_error(bytes, ErrorKind::InvalidModel, expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_files_never_panic(
        mutations in prop::collection::vec((0.0..1.0, any::<u8>()), 1..6),
        keep in 0.5..1.5,
    ) {
        let mut bytes = sample();
        let len = bytes.len();
        for (position, value) in mutations {
            bytes[(position * len as f64) as usize] = value;
        }
        bytes.truncate((keep * len as f64) as usize);
        if let Ok(tensors) = parse_header(&bytes) {
            for tensor in tensors {
                prop_assert!(bytes.get(tensor.range.clone()).is_some(), "{:?}", tensor);
            }
        }
    }
}
