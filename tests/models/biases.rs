//! Models of Llama's class whose feed-forward networks have biases, as Granite's for code have.

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;
use tempfile::TempDir;

use super::*;

const MODEL: &str = "tiny/llama";

/// The model with biases of all projections of its feed-forward networks, of about this size.
pub(super) fn with_biases(size: f32) -> TempDir {
    let bytes = std::fs::read(fixture(MODEL).join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, tensor) in file.tensors() {
        if let Some(stem) = name.strip_suffix(".weight").filter(|stem| stem.contains(".mlp.")) {
            let len = tensor.shape()[0];
            let values = (0..len).map(|index| size * ((index * 7 + name.len()) % 13) as f32 / 6.0 - size);
            let data = values.flat_map(f32::to_le_bytes).collect();
            tensors.push((format!("{stem}.bias"), Dtype::F32, vec![len], data));
        }
        tensors.push((name, tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec()));
    }
    let folder = mixed_folder(MODEL, MODEL, &[("mlp_bias", json!(true))]);
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    folder
}

#[test]
fn biases_of_feed_forward_networks_are_added() {
    let golden = Golden::read("tiny/llama/golden.safetensors");
    let run = |path: &str, kernels: Kernels, chunks: &[usize]| {
        let setup = Setup { kernels, in_single_precision: true, ..Setup::default() };
        Instance::open(path, setup).run(&golden.ids, chunks)
    };
    let folders = [0.0, 0.5].map(with_biases);
    let [zeros, biased] = folders.each_ref().map(|folder| folder.path().to_str().unwrap());
    let num = golden.ids.len();
    let expected = run(biased, Kernels::Reference, &[num]);
    let largest = |logits: &[f32]| logits.iter().fold(0.0_f32, |most, logit| most.max(logit.abs()));
    let distance = |one: &[Vec<f32>], other: &[Vec<f32>]| {
        let rows = one.iter().zip(other);
        let distances = rows.map(|(one, other)| {
            let apart = one.iter().zip(other).map(|(a, b)| a - b).collect::<Vec<_>>();
            largest(&apart) / largest(other)
        });
        distances.fold(0.0_f32, f32::max)
    };
    for level in CpuLevel::available() {
        let kernels = Kernels::Cpu(*level);
        assert!(run(zeros, kernels, &[num]) == run(MODEL, kernels, &[num]), "{level:?}: biases of zero");
        let own = run(biased, kernels, &[num]);
        assert!(distance(&own, &expected) < 1e-4, "{level:?}: {}", distance(&own, &expected));
        assert!(own == run(biased, kernels, &[1, num - 9, 8]), "{level:?}: bits of other steps");
    }
    assert!(distance(&expected, &golden.logits) > 0.05, "the biases change nothing");
}
