//! Folders that have the same model under other names.

use serde_json::{Value, json};

use super::*;

/// Its feed-forward networks have the name of what all tokens go through, and gate and up are one tensor.
#[test]
fn granite_4_without_experts_is_granite_3() {
    let bytes = std::fs::read(fixture("tiny/granite/model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let config = std::fs::read(fixture("tiny/granite/config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    for (key, value) in [
        ("architectures", json!(["GraniteMoeHybridForCausalLM"])),
        ("shared_intermediate_size", config["intermediate_size"].clone()),
        ("intermediate_size", json!(7)),
        ("layer_types", json!(["attention", "attention"])),
        ("num_local_experts", json!(0)),
        ("position_embedding_type", json!("rope")),
    ] {
        config[key] = value;
    }
    let mut tensors = Vec::new();
    for (name, view) in file.tensors() {
        let (mut data, mut shape) = (view.data().to_vec(), view.shape().to_vec());
        if name.ends_with("up_proj.weight") {
            continue;
        }
        if name.ends_with("gate_proj.weight") {
            data.extend_from_slice(file.tensor(&name.replace("gate_proj", "up_proj")).unwrap().data());
            shape[0] *= 2;
        }
        let name = name.replace("mlp.gate_proj", "shared_mlp.input_linear");
        tensors.push((name.replace("mlp.down_proj", "shared_mlp.output_linear"), data, shape));
    }
    let view = |data, shape: &[usize]| {
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.to_vec(), data).unwrap()
    };
    let views = tensors.iter().map(|(name, data, shape)| (name, view(data, shape)));
    let folder = tempfile::tempdir().unwrap();
    let weights = safetensors::serialize(views, None).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), weights).unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let tokens = Golden::read("tiny/granite/golden.safetensors").ids;
    let logits = |path: &str| Instance::open(path, Setup::default()).run(&tokens, &[tokens.len()]);
    assert_eq!(logits(folder.path().to_str().unwrap()), logits("tiny/granite"));
}
