use std::fs;

use super::*;
use crate::ErrorKind;
use crate::weights::DType;
use crate::weights::gguf::test_file::TestFile;

fn part(number: u16, count: u16, total: u32, names: &[&str]) -> Vec<u8> {
    let mut file = TestFile::new();
    if number == 0 {
        file.string("general.architecture", "llama");
    }
    file.entry("split.no", 2, &number.to_le_bytes());
    file.entry("split.count", 2, &count.to_le_bytes());
    file.entry("split.tensors.count", 5, &total.to_le_bytes());
    for (index, name) in names.iter().enumerate() {
        file.tensor(name, &[1], 0, &(f32::from(number) * 10.0 + index as f32).to_le_bytes());
    }
    file.bytes()
}

fn check_error(path: &Path, kind: ErrorKind, expected: &str) {
    let error = GgufFile::open(path).expect_err(expected);
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(format!("{error:?}").contains(expected), "{error:?} does not contain {expected:?}");
}

#[test]
fn tensors_have_their_data() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut sample = TestFile::sample();
    sample.tensors[0].data = [1.0_f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes).concat();
    fs::write(&path, sample.bytes()).unwrap();
    let file = GgufFile::open(&path).unwrap();
    let tensor = file.tensor("output_norm.weight").unwrap();
    assert_eq!((tensor.name, tensor.dtype, tensor.shape), ("output_norm.weight", DType::F32, [4].as_slice()));
    assert_eq!(tensor.to_f32().unwrap(), [1.0, 2.0, 3.0, 4.0]);
    let shared = tensor.share().unwrap();
    assert_eq!(file.total_bytes(), sample.bytes().len() as u64);
    drop(file);
    assert_eq!(&shared[..4], 1.0_f32.to_le_bytes());
}

#[test]
fn shape_is_checked_on_request() {
    let bytes: &'static [u8] = TestFile::sample().bytes().leak();
    let file = GgufFile::from_static(bytes).unwrap();
    assert!(file.tensor("token_embd.weight").unwrap().expect_shape(&[3, 32]).is_ok());
    let error = file.tensor("token_embd.weight").unwrap().expect_shape(&[32, 3]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidModel);
    for part in ["token_embd.weight", "[3, 32]", "[32, 3]"] {
        assert!(error.message().contains(part), "{error}");
    }
    assert!(file.tensor("nothing").unwrap_err().message().contains("\"nothing\""));
}

#[test]
fn tensors_of_unknown_type_fail_when_asked_for() {
    let mut sample = TestFile::sample();
    sample.tensor("blk.0.attn_q.weight", &[256], 40, &[]);
    let file = GgufFile::from_static(sample.bytes().leak()).unwrap();
    assert!(file.contains("blk.0.attn_q.weight"));
    assert_eq!(file.tensors().len(), 4);
    assert!(file.tensor("output_norm.weight").is_ok());
    for error in
        [file.tensor("blk.0.attn_q.weight").map(|_| ()).unwrap_err(), file.ensure_supported().unwrap_err()]
    {
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(
            error.message().contains("blk.0.attn_q.weight") && error.message().contains("NVFP4"),
            "{error}"
        );
        assert!(error.hint().unwrap().contains("Q4_K"));
    }
}

#[test]
fn any_part_opens_the_whole_model() {
    let folder = tempfile::tempdir().unwrap();
    let names = [["a", "b"].as_slice(), &["c"], &["d"]];
    let paths = [1, 2, 3].map(|number| folder.path().join(format!("m-0000{number}-of-00003.gguf")));
    for (number, path) in paths.iter().enumerate() {
        fs::write(path, part(number as u16, 3, 4, names[number])).unwrap();
    }
    for path in &paths {
        let file = GgufFile::open(path).unwrap();
        assert_eq!(file.metadata().str("general.architecture"), Some("llama"));
        let values: Vec<_> =
            ["a", "b", "c", "d"].map(|name| file.tensor(name).unwrap().to_f32().unwrap()[0]).into();
        assert_eq!(values, [0.0, 1.0, 10.0, 20.0]);
    }
    fs::remove_file(&paths[1]).unwrap();
    check_error(&paths[2], ErrorKind::NotFound, "a shard is missing");
    check_error(&paths[2], ErrorKind::NotFound, "has no m-00002-of-00003.gguf");
    // The right name on the wrong shard.
    fs::copy(&paths[2], &paths[1]).unwrap();
    check_error(&paths[0], ErrorKind::InvalidModel, "name says shard 2 of 3");
    fs::write(&paths[1], part(1, 3, 4, &["a"])).unwrap();
    check_error(&paths[0], ErrorKind::InvalidModel, "\"a\" is in two shards");
    fs::write(&paths[1], part(1, 3, 4, &["c", "e"])).unwrap();
    check_error(&paths[0], ErrorKind::InvalidModel, "hold 5 tensors, but split.tensors.count is 4");
    let renamed = folder.path().join("renamed.gguf");
    fs::copy(&paths[0], &renamed).unwrap();
    check_error(&renamed, ErrorKind::InvalidModel, "shard 1 of 3");
}

#[test]
fn errors_name_the_path() {
    let folder = tempfile::tempdir().unwrap();
    check_error(&folder.path().join("no.gguf"), ErrorKind::NotFound, "no.gguf");
    check_error(folder.path(), ErrorKind::NotFound, "is a folder");
    let empty = folder.path().join("empty.gguf");
    fs::write(&empty, []).unwrap();
    check_error(&empty, ErrorKind::InvalidModel, "empty.gguf: this is an empty file");
    let short = folder.path().join("short.gguf");
    let bytes = TestFile::sample().bytes();
    fs::write(&short, &bytes[..bytes.len() - 1]).unwrap();
    check_error(&short, ErrorKind::InvalidModel, "short.gguf: tensor \"output.weight\" takes 96 bytes");
}

#[test]
fn names_of_parts() {
    for (name, expected) in [
        ("a/b-00002-of-00005.gguf", Some((5, "a/b-00001-of-00005.gguf"))),
        ("b-x-00001-of-00001.gguf", Some((1, "b-x-00001-of-00001.gguf"))),
        ("b-00006-of-00005.gguf", None),
        ("b-00000-of-00005.gguf", None),
        ("b-2-of-5.gguf", None),
        ("b-+0002-of-+0005.gguf", None),
        ("b.gguf", None),
        ("b-00001-of-00002.safetensors", None),
    ] {
        let part = ShardName::of(Path::new(name));
        let first = part.as_ref().map(|part| (part.count, part.path_of(1)));
        assert_eq!(first, expected.map(|(count, path)| (count, PathBuf::from(path))), "{name}");
    }
}

/// Holes in a file cost nothing, so its size does not justify large allocations.
#[test]
fn sparse_files_are_refused_early() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sparse.gguf");
    let mut long_text = TestFile::new();
    long_text.entry("x", 8, &(1_u64 << 28).to_le_bytes());
    let many_tensors = TestFile { num_tensors: Some(1 << 22), ..TestFile::new() };
    let far_too_many = TestFile { num_tensors: Some(1 << 25), ..TestFile::new() };
    for (file, expected) in [
        (long_text, "at most 134217728 bytes"),
        (many_tensors, "tensor \"\" occurs twice"),
        (far_too_many, "at most 134217728 bytes"),
    ] {
        fs::write(&path, file.bytes()).unwrap();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 32).unwrap();
        check_error(&path, ErrorKind::InvalidModel, expected);
    }
}
