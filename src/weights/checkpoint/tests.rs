use std::collections::HashSet;

use super::*;
use crate::weights::gguf::test_file::TestFile;

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}

fn check_error(path: &Path, kind: ErrorKind, expected: &str) {
    let error = Checkpoint::open(path).expect_err(expected);
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(format!("{error:?}").contains(expected), "{error:?} does not contain {expected:?}");
}

/// The reordering of a GGUF converter for the rotary projections of arch llama, head by head: row `j·d/2 + i` becomes
/// row `2i + j`.
fn interleave_rows(values: &[f32], row_len: usize, head_dim: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks(head_dim * row_len) {
        for row in 0..head_dim {
            let from = row % 2 * head_dim / 2 + row / 2;
            out.extend(&head[from * row_len..(from + 1) * row_len]);
        }
    }
    out
}

#[test]
fn folder_and_gguf_file_hold_the_same_tensors() {
    let folder = Checkpoint::open(&fixture("tiny/llama")).unwrap();
    // The folder has GGUF files next to its safetensors, which come first.
    assert!(folder.gguf_metadata().is_none());
    let gguf = Checkpoint::open(&fixture("tiny/llama/llama.f32.gguf")).unwrap();
    let names: HashSet<_> = folder.tensor_names().collect();
    assert_eq!(names, gguf.tensor_names().collect());
    assert_eq!(names.len(), 30);
    for name in names {
        let (ours, theirs) = (folder.tensor(name).unwrap(), gguf.tensor(name).unwrap());
        assert_eq!(ours.name, name);
        assert_eq!(ours.shape, theirs.shape, "{name}");
        let mut values = ours.to_f32().unwrap();
        if name.ends_with("attn_q.weight") || name.ends_with("attn_k.weight") {
            values = interleave_rows(&values, ours.row_len(), 16);
        }
        assert!(values == theirs.to_f32().unwrap(), "{name} differs");
    }
}

#[test]
fn every_fixture_opens() {
    for name in ["llama", "llama3", "mistral", "qwen2", "qwen3"] {
        let checkpoint = Checkpoint::open(&fixture(&format!("tiny/{name}"))).unwrap();
        checkpoint.ensure_supported().unwrap();
        assert_eq!(checkpoint.config_json().unwrap()["vocab_size"], 288);
        assert_eq!(checkpoint.generation_config_json().unwrap()["eos_token_id"], 2);
        let unmapped: Vec<_> = checkpoint.tensor_names().filter(|name| name.starts_with("model.")).collect();
        assert_eq!(unmapped, [""; 0], "{name}");
        assert!(checkpoint.contains("output_norm.weight"));
        assert_eq!(checkpoint.contains("blk.2.attn_q.bias"), name == "qwen2");
        assert_eq!(checkpoint.contains("blk.2.attn_q_norm.weight"), name == "qwen3");
    }
}

#[test]
fn types_are_summed_up() {
    let checkpoint = Checkpoint::open(&fixture("kquant/qwen3/qwen3.q4_k_mix.gguf")).unwrap();
    assert_eq!(checkpoint.gguf_metadata().unwrap().str("general.architecture"), Some("qwen3"));
    let summaries = checkpoint.type_summaries();
    assert!(summaries.is_sorted_by(|a, b| a.num_bytes >= b.num_bytes));
    assert_eq!(summaries.iter().map(|summary| summary.num_tensors).sum::<usize>(), 35);
    let q6_k = summaries.iter().find(|summary| summary.type_name == "Q6_K").unwrap();
    let expected: usize = checkpoint
        .tensors()
        .iter()
        .filter(|tensor| tensor.type_name == "Q6_K")
        .map(|tensor| tensor.num_bytes)
        .sum();
    assert_eq!(q6_k.num_bytes, expected as u64);
    let total: u64 = summaries.iter().map(|summary| summary.num_bytes).sum();
    assert!(total < checkpoint.total_bytes() && total > checkpoint.total_bytes() * 9 / 10);
}

#[test]
fn unused_tensors_are_reported() {
    let mut file = TestFile::sample();
    file.tensor("blk.0.attn_rot_embd.weight", &[4], 0, &[0; 16]);
    file.tensor("blk.0.attn_sinks.weight", &[4], 0, &[0; 16]);
    let checkpoint = Checkpoint::from_static(file.bytes().leak()).unwrap();
    let used = ["output_norm.weight", "token_embd.weight", "output.weight"];
    assert_eq!(checkpoint.unused_tensors(|name| used.contains(&name)), ["blk.0.attn_sinks.weight"]);
    assert_eq!(checkpoint.path(), None);
}

#[test]
fn paths_that_hold_no_model() {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path();
    let write = |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).unwrap();
    let remove = |name: &str| fs::remove_file(folder.join(name)).unwrap();

    check_error(&folder.join("nothing"), ErrorKind::NotFound, "nothing");
    check_error(folder, ErrorKind::NotFound, "has no weights");
    write("pytorch_model-00001-of-00002.bin", b"");
    check_error(folder, ErrorKind::Unsupported, "save_pretrained");
    write("adapter_model.safetensors", b"");
    remove("pytorch_model-00001-of-00002.bin");
    check_error(folder, ErrorKind::NotFound, "neither model.safetensors nor");

    write("b.gguf", &TestFile::sample().bytes());
    write("mmproj-b.gguf", b"");
    assert_eq!(Checkpoint::open(folder).unwrap().path(), Some(folder.join("b.gguf").as_path()));
    write("a-00002-of-00002.gguf", b"");
    check_error(folder, ErrorKind::InvalidRequest, "a-00001-of-00002.gguf, ");
    remove("b.gguf");
    check_error(folder, ErrorKind::NotFound, "a-00001-of-00002.gguf");

    fs::copy(fixture("tiny/llama/model.safetensors"), folder.join("model.safetensors")).unwrap();
    check_error(folder, ErrorKind::NotFound, "no config.json");
    for (config, expected) in [("", "is not JSON"), ("{", "is not JSON"), ("[]", "is not a JSON object")] {
        write("config.json", config.as_bytes());
        check_error(folder, ErrorKind::InvalidModel, expected);
    }
    write("config.json", b"{}");
    // Advice that cannot be read is ignored.
    for text in [&b"{]"[..], b"", b"[]", b"version https://git-lfs.github.com/spec/v1\n", b"\xff"] {
        write("generation_config.json", text);
        let checkpoint = Checkpoint::open(folder).unwrap();
        assert_eq!(checkpoint.generation_config_json(), None);
        let [notice] = &checkpoint.notices(false)[..] else { panic!("{:?}", checkpoint.notices(false)) };
        assert!(notice.contains("generation_config.json is not") && notice.ends_with("left out"), "{notice}");
    }
    remove("generation_config.json");
    let checkpoint = Checkpoint::open(folder).unwrap();
    assert!(checkpoint.generation_config_json().is_none() && checkpoint.notices(false).is_empty());
    check_error(&folder.join("model.safetensors"), ErrorKind::InvalidModel, "pass the folder");
    write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n");
    check_error(folder, ErrorKind::InvalidModel, "git lfs pull");
}

#[test]
fn errors_name_the_path() {
    let path = fixture("tiny/qwen2/qwen2.q8_0.gguf");
    let checkpoint = Checkpoint::open(&path).unwrap();
    let error = checkpoint.tensor("blk.9.attn_q.weight").unwrap_err();
    assert!(
        error.message().contains("qwen2.q8_0.gguf") && error.message().contains("blk.9.attn_q.weight"),
        "{error}"
    );
}
