//! Language models out of folders of models that look at pictures.

use serde_json::{Value, json};

use super::*;

/// Names have more in front, as either generation of transformers writes them, the keys are inside `text_config`, and what
/// looks at pictures stays unread.
#[test]
fn the_language_model_is_the_same_without_what_looks_at_pictures() {
    let bytes = std::fs::read(fixture("tiny/gemma3/model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let text: Value =
        serde_json::from_slice(&std::fs::read(fixture("tiny/gemma3/config.json")).unwrap()).unwrap();
    let config = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
        "vision_config": {"hidden_size": 8},
    });
    let tokens = Golden::read("tiny/gemma3/golden.safetensors").ids;
    let expected = Instance::open("tiny/gemma3", Setup::default()).run(&tokens, &[tokens.len()]);
    for (model, tower) in [
        ("language_model.model.", "vision_tower.patches.weight"),
        ("model.language_model.", "model.multi_modal_projector.norm.weight"),
    ] {
        let own = file.tensors().into_iter().map(|(name, view)| (name.replacen("model.", model, 1), view));
        let picture = (tower.to_owned(), file.tensor("model.norm.weight").unwrap());
        let folder = tempfile::tempdir().unwrap();
        let weights = safetensors::serialize(own.chain([picture]), None).unwrap();
        std::fs::write(folder.path().join("model.safetensors"), weights).unwrap();
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let logits =
            Instance::open(folder.path().to_str().unwrap(), Setup::default()).run(&tokens, &[tokens.len()]);
        assert_eq!(logits, expected, "{model}");
    }
}
