//! Models that draft with an MTP block, derived from the fixture: the accuracy of their block is known.

use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tempfile::TempDir;

/// The size of the layers' contribution to the residual stream, and so the dependence of the next token on more than
/// the last one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Layers {
    /// The fixture's weights. Its block is independent of the model, so it is hardly ever right.
    Full,
    /// A little.
    Little,
    /// None: the next token is a function of the last one, and the block computes that function.
    Nothing,
}

/// The fixture with layers that add less, and a block that is given the token that follows rather than the state, in this
/// measure. With another norm of the state it is given something else, as if it had been handed the wrong one.
pub(crate) fn folder(layers: Layers, has_wrong_states: bool) -> TempDir {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny/mtp");
    let bytes = std::fs::read(fixture.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let factor = match layers {
        Layers::Full => 1.0,
        Layers::Little => 0.25,
        Layers::Nothing => 0.0,
    };
    let mut tensors = Vec::new();
    for (name, tensor) in file.tensors() {
        let mut values = in_singles(tensor.data());
        if name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") {
            values.iter_mut().for_each(|value| *value *= factor);
        }
        let is_norm_of_block = ["enorm.weight", "hnorm.weight"].iter().any(|norm| name.ends_with(norm));
        if layers != Layers::Full && is_norm_of_block {
            values.fill(1.0);
        }
        if layers != Layers::Full && name.ends_with("eh_proj.weight") {
            // The embedding unchanged, and the layers' contribution from the state.
            for (index, value) in values.iter_mut().enumerate() {
                let (row, col) = (index / 64, index % 64);
                *value = if col < 32 { f32::from(u8::from(row == col)) } else { *value * factor };
            }
        }
        if layers != Layers::Full && name.ends_with("shared_head.norm.weight") {
            values = in_singles(file.tensor("model.norm.weight").unwrap().data());
        }
        if has_wrong_states && name.ends_with("hnorm.weight") {
            values.iter_mut().step_by(2).for_each(|value| *value *= -30.0);
        }
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        tensors.push((name, tensor.shape().to_vec(), data));
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(fixture.join("config.json"), folder.path().join("config.json")).unwrap();
    let views = tensors
        .iter()
        .map(|(name, shape, data)| (name.clone(), TensorView::new(Dtype::F32, shape.clone(), data).unwrap()));
    let file = safetensors::serialize(views, None).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    folder
}

fn in_singles(halves: &[u8]) -> Vec<f32> {
    halves.as_chunks().0.iter().map(|value| half::f16::from_le_bytes(*value).to_f32()).collect()
}
