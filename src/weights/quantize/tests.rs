use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::ErrorKind;
use crate::weights::gguf::test_file::TestFile;

fn open(path: &str) -> Checkpoint {
    Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)).unwrap()
}

fn threads(num_threads: usize) -> Option<NonZeroUsize> {
    NonZeroUsize::new(num_threads)
}

fn quantize(quantizer: &Quantizer, tensor: &RawTensor<'_>) -> Result<OwnedTensor> {
    quantizer.quantize(std::slice::from_ref(tensor), &|_| ()).map(|mut all| all.remove(0))
}

/// A checkpoint with one F32 tensor of these values.
fn one_tensor(name: &str, dims: &[u64], values: &[f32]) -> Checkpoint {
    let mut file = TestFile::new();
    let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    file.tensor(name, dims, 0, &data);
    Checkpoint::from_static(file.bytes().leak()).unwrap()
}

/// The files were quantised by other code from the folders next to them.
#[test]
fn bytes_equal_those_of_converted_files() {
    for (quantization, folder, file) in [
        (Quantization::Q8_0, "tiny/qwen2", "tiny/qwen2/qwen2.q8_0.gguf"),
        (Quantization::Q8_0, "tiny/llama", "tiny/llama/llama.q8_0.gguf"),
        (Quantization::Q4_0, "tiny/llama3", "tiny/llama3/llama3.q4_0.gguf"),
    ] {
        let (dense, converted) = (open(folder), open(file));
        let quantizer = Quantizer::new(quantization, &dense, threads(2));
        let mut num_compared = 0;
        for name in dense.tensor_names() {
            // The converter reorders the rows of these.
            let reordered = name.ends_with("attn_q.weight") || name.ends_with("attn_k.weight");
            if reordered && folder != "tiny/qwen2" {
                continue;
            }
            // Where they have four bits, ours has eight.
            if quantization == Quantization::Q4_0 && name == quantizer.output_matrix {
                continue;
            }
            let ours = quantize(&quantizer, &dense.tensor(name).unwrap()).unwrap();
            let (ours, theirs) = (ours.as_raw(), converted.tensor(name).unwrap());
            assert_eq!((ours.dtype, ours.shape), (theirs.dtype, theirs.shape), "{name}");
            assert!(ours.data().unwrap() == theirs.data().unwrap(), "{file}: {name} differs");
            num_compared += 1;
        }
        assert!(num_compared > 20);
    }
}

#[test]
fn types_follow_name_and_shape() {
    let untied = one_tensor("output.weight", &[1], &[0.0]);
    let tied = one_tensor("token_embd.weight", &[1], &[0.0]);
    for (quantization, checkpoint, name, shape, expected) in [
        (Quantization::Q4K, &untied, "output.weight", [8, 512], DType::Q6K),
        (Quantization::Q4K, &untied, "token_embd.weight", [8, 512], DType::Q4K),
        (Quantization::Q4K, &tied, "token_embd.weight", [8, 512], DType::Q6K),
        (Quantization::Q4K, &tied, "token_embd.weight", [8, 96], DType::Q8_0),
        (Quantization::Q4K, &tied, "blk.0.ffn_up.weight", [8, 512], DType::Q4K),
        (Quantization::Q4K, &tied, "blk.0.ffn_up.weight", [8, 96], DType::Q5_0),
        (Quantization::Q4K, &tied, "blk.0.ffn_up.weight", [8, 100], DType::F16),
        (Quantization::Q4_0, &tied, "blk.0.ffn_up.weight", [8, 96], DType::Q4_0),
        (Quantization::Q4_0, &tied, "token_embd.weight", [8, 100], DType::F16),
        (Quantization::Q4_0, &tied, "token_embd.weight", [8, 96], DType::Q8_0),
        (Quantization::Q4_0, &untied, "token_embd.weight", [8, 96], DType::Q4_0),
        (Quantization::Q4_0, &untied, "output.weight", [8, 96], DType::Q8_0),
        (Quantization::Q4_1, &untied, "output.weight", [8, 512], DType::Q8_0),
        (Quantization::Q4_1, &untied, "blk.0.ffn_up.weight", [8, 96], DType::Q4_1),
        (Quantization::Q5_0, &untied, "blk.0.ffn_up.weight", [8, 96], DType::Q5_0),
        (Quantization::Q5_1, &untied, "blk.0.ffn_up.weight", [8, 512], DType::Q5_1),
        (Quantization::Q5K, &untied, "output.weight", [8, 512], DType::Q6K),
        (Quantization::Q5K, &untied, "blk.0.ffn_up.weight", [8, 512], DType::Q5K),
        (Quantization::Q5K, &untied, "blk.0.ffn_up.weight", [8, 96], DType::Q5_1),
        (Quantization::Q6K, &untied, "blk.0.ffn_up.weight", [8, 512], DType::Q6K),
        (Quantization::Q6K, &untied, "blk.0.ffn_up.weight", [8, 96], DType::Q8_0),
        (Quantization::Q8_0, &untied, "output.weight", [8, 512], DType::Q8_0),
        (Quantization::Q8_0, &untied, "blk.0.ffn_gate_inp.weight", [8, 512], DType::F32),
        (Quantization::Q8_0, &untied, "blk.0.attn_norm.weight", [1, 512], DType::F32),
    ] {
        let quantizer = Quantizer::new(quantization, checkpoint, None);
        assert_eq!(quantizer.dtype_of(name, &shape), expected, "{quantization} {name} {shape:?}");
    }
    assert_eq!(
        Quantizer::new(Quantization::Q4K, &tied, None).dtype_of("blk.0.attn_q.bias", &[512]),
        DType::F32
    );
}

#[test]
fn result_does_not_depend_on_threads() {
    let values: Vec<f32> =
        (0..5 * 65536).map(|i| ((i * 2_654_435_761_usize) % 1009) as f32 - 504.0).collect();
    let checkpoint = one_tensor("blk.0.ffn_up.weight", &[256, 1280], &values);
    let tensor = checkpoint.tensor("blk.0.ffn_up.weight").unwrap();
    let other = one_tensor("blk.0.ffn_gate.weight", &[256, 1], &values[1_000..1_256]);
    let small = other.tensor("blk.0.ffn_gate.weight").unwrap();
    for quantization in Quantization::ALL {
        let results = [1, 2, 7].map(|num_threads| {
            let num_done = AtomicUsize::new(0);
            let quantizer = Quantizer::new(quantization, &checkpoint, threads(num_threads));
            let progress = |done| {
                num_done.fetch_add(done, Ordering::Relaxed);
            };
            // Together, they equal the separate conversions.
            let both = quantizer.quantize(&[small.clone(), tensor.clone()], &progress).unwrap();
            assert_eq!(num_done.into_inner(), 4 * (values.len() + 256));
            assert_eq!(
                both[0].as_raw().data().unwrap(),
                quantize(&quantizer, &small).unwrap().as_raw().data().unwrap()
            );
            both[1].as_raw().data().unwrap().to_vec()
        });
        assert!(results[0] == results[1] && results[0] == results[2], "{quantization}");
    }
}

#[test]
fn tensors_that_cannot_be_quantised_are_named() {
    let quantized = open("tiny/qwen2/qwen2.q8_0.gguf");
    let quantizer = Quantizer::new(Quantization::Q4_0, &quantized, None);
    let tensor = quantized.tensor("blk.0.attn_q.weight").unwrap();
    let error = quantize(&quantizer, &tensor).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidRequest);
    assert!(error.message().contains("blk.0.attn_q.weight") && error.message().contains("Q8_0"), "{error}");

    let mut values = vec![1.0; 3 * 65536];
    values[65536] = f32::NAN;
    let checkpoint = one_tensor("blk.7.ffn_up.weight", &[256, 768], &values);
    let quantizer = Quantizer::new(Quantization::Q4K, &checkpoint, threads(3));
    let error = quantize(&quantizer, &checkpoint.tensor("blk.7.ffn_up.weight").unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidModel);
    assert!(error.message().contains("blk.7.ffn_up.weight") && error.message().contains("NaN"), "{error}");
}

#[test]
fn names_of_quantisations() {
    for (name, expected) in Quantization::NAMES.into_iter().zip(Quantization::ALL) {
        assert_eq!(name.parse::<Quantization>().unwrap(), expected);
        assert_eq!(name.to_uppercase().parse::<Quantization>().unwrap(), expected);
        assert_eq!(expected.to_string(), name);
    }
    for name in ["", "q4", "q4_k_m", "int8"] {
        let error = name.parse::<Quantization>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidRequest);
        assert!(
            error.message().contains(&format!("{name:?}")) && error.hint().unwrap().contains("q4_k"),
            "{error}"
        );
    }
}

#[test]
fn dense_types_are_converted_and_quantised_ones_left_alone() {
    let folder = open("tiny/llama");
    for dtype in [DType::F16, DType::BF16] {
        let quantizer = Quantizer::to_dense(dtype, NonZeroUsize::MIN);
        let tensor = folder.tensor("blk.0.attn_q.weight").unwrap();
        assert!(quantizer.applies_to(&tensor));
        let converted = quantize(&quantizer, &tensor).unwrap();
        assert_eq!(converted.as_raw().dtype, dtype);
        let (wanted, values) = (tensor.to_f32().unwrap(), converted.as_raw().to_f32().unwrap());
        let same = |(a, b): (&f32, &f32)| (a - b).abs() <= a.abs() / 128.0;
        assert!(wanted.iter().zip(&values).all(same));
        assert!(!quantizer.applies_to(&folder.tensor("output_norm.weight").unwrap()), "norms stay F32");
        let quantized = open("tiny/llama/llama.q8_0.gguf");
        assert!(!quantizer.applies_to(&quantized.tensor("blk.0.attn_q.weight").unwrap()));
        assert_eq!(
            quantizer.planned_bytes(&quantized, |file_type| file_type).unwrap(),
            Quantizer::to_dense(DType::F32, NonZeroUsize::MIN)
                .planned_bytes(&quantized, |file_type| file_type)
                .unwrap(),
            "nothing in this file is converted"
        );
    }
}

/// The requested type is impossible where rows do not fit its blocks, which is reported once.
#[test]
fn other_types_are_reported() {
    let folder = open("tiny/llama");
    let check = |quantization: Quantization, expected: Option<&str>| {
        let quantizer = Quantizer::new(quantization, &folder, None);
        assert_eq!(quantizer.notice(&folder).as_deref(), expected, "{quantization}");
        // The reported types are those of the conversion.
        let types = quantizer.type_summaries(&folder).unwrap();
        let num_bytes: u64 = types.iter().map(|summary| summary.num_bytes).sum();
        assert_eq!(num_bytes, quantizer.planned_bytes(&folder, |file_type| file_type).unwrap());
        assert_eq!(types.iter().map(|summary| summary.num_tensors).sum::<usize>(), 30);
    };
    // Rows of 64 and of 128.
    check(Quantization::Q4_0, None);
    check(Quantization::Q8_0, None);
    let text = |quantization: &str, types: &str| {
        format!(
            "--quantization {quantization}: 23 of 23 matrices have rows that are no multiple of 256 values and are kept \
             in another type, {types}"
        )
    };
    check(Quantization::Q4K, Some(&text("q4_k", "22 as Q5_0 and 1 as Q8_0")));
    check(Quantization::Q5K, Some(&text("q5_k", "22 as Q5_1 and 1 as Q8_0")));
    check(Quantization::Q6K, Some(&text("q6_k", "23 as Q8_0")));
    let narrow = one_tensor("blk.0.ffn_up.weight", &[40, 2], &[0.0; 80]);
    let notice = Quantizer::new(Quantization::Q4_0, &narrow, None).notice(&narrow).unwrap();
    assert!(
        notice.contains("1 of 1") && notice.contains("of 32 values") && notice.contains("F16"),
        "{notice}"
    );
}

#[test]
fn planned_bytes_are_those_of_the_converted_file() {
    let folder = open("tiny/qwen2");
    let converted = open("tiny/qwen2/qwen2.q8_0.gguf");
    let planned = Quantizer::new(Quantization::Q8_0, &folder, None)
        .planned_bytes(&folder, |file_type| file_type)
        .unwrap();
    let bytes = |name: &str| converted.tensor(name).unwrap().num_bytes() as u64;
    assert_eq!(planned, converted.tensor_names().map(bytes).sum::<u64>());
}

/// If a tensor exceeds its memory limit, its pages are released during the conversion.
#[cfg(target_os = "linux")]
#[test]
fn a_large_tensor_is_never_in_memory_as_a_whole() {
    use std::io::Write;

    const ROWS: usize = 24 << 10;
    const COLS: usize = 1 << 10;
    const CHUNK_BYTES: usize = 4 * CHUNK_LEN;
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    let path = folder.path().join("model.safetensors");
    let header = serde_json::json!({
        "lm_head.weight": {"dtype": "F32", "shape": [ROWS, COLS], "data_offsets": [0, 4 * ROWS * COLS]}
    })
    .to_string();
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    // Unwritten bytes are zero.
    file.set_len((8 + header.len() + 4 * ROWS * COLS) as u64).unwrap();

    // How much of the file's map is in memory.
    let resident = || -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
        let line = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
    };
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let quantizer = Quantizer::new(Quantization::Q8_0, &checkpoint, threads(2));
    let (num_chunks, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let progress = |_| {
        if num_chunks.fetch_add(1, Ordering::Relaxed).is_multiple_of(16) {
            most.fetch_max(resident(), Ordering::Relaxed);
        }
    };
    let tensor = checkpoint.tensor("token_embd.weight").unwrap();
    let quantized = quantizer.quantize(&[tensor], &progress).unwrap();
    assert!(quantized[0].as_raw().data().unwrap().iter().all(|byte| *byte == 0));
    let (num_chunks, most) = (num_chunks.into_inner(), most.into_inner());
    assert_eq!(num_chunks * CHUNK_BYTES, 4 * ROWS * COLS);
    // Two chunks of 16 MiB are kept, and a third is being read.
    assert!(most > CHUNK_BYTES, "{most} bytes are in memory, so they were not measured");
    assert!(most < 3 * CHUNKS_TO_RELEASE * CHUNK_BYTES, "{most} of {} bytes", 4 * ROWS * COLS);
}
