//! Folders whose matrices another program has quantised are the models of the values that these stand for.

use std::num::NonZeroUsize;

use half::f16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;
use tempfile::TempDir;

use super::*;

type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

/// Two folders of one model, whose matrices have codes of eight bits and a scale for each row: one with codes and scales,
/// and one with the values that they stand for.
fn with_codes_and_values(model: &str) -> [TempDir; 2] {
    let bytes = std::fs::read(fixture(model).join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let (mut packed, mut plain): (Vec<Tensor>, Vec<Tensor>) = (Vec::new(), Vec::new());
    for (name, tensor) in file.tensors() {
        let shape = tensor.shape().to_vec();
        let is_matrix = name.contains("layers") && shape.len() == 2 && !name.ends_with("mlp.gate.weight");
        if !is_matrix {
            packed.push((name.clone(), tensor.dtype(), shape.clone(), tensor.data().to_vec()));
            plain.push((name, tensor.dtype(), shape, tensor.data().to_vec()));
            continue;
        }
        let values: Vec<f32> =
            tensor.data().as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        let (mut codes, mut scales, mut decoded) = (Vec::new(), Vec::new(), Vec::new());
        for row in values.chunks(shape[1]) {
            let largest = row.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            let scale = f16::from_f32(largest / 127.0);
            scales.extend(scale.to_le_bytes());
            for value in row {
                let code = (value / scale.to_f32()).round().clamp(-128.0, 127.0) as i8;
                codes.push(code.cast_unsigned());
                decoded.extend((f32::from(code) * scale.to_f32()).to_le_bytes());
            }
        }
        packed.push((format!("{name}_scale"), Dtype::F16, vec![shape[0], 1], scales));
        packed.push((name.clone(), Dtype::I8, shape.clone(), codes));
        plain.push((name, Dtype::F32, shape, decoded));
    }
    let quantization = json!({"quant_method": "compressed-tensors", "format": "int-quantized"});
    let write = |tensors: &[Tensor], changes: &[(&str, serde_json::Value)]| {
        let folder = mixed_folder(model, model, changes);
        let views = tensors.iter().map(|(name, dtype, shape, data)| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        std::fs::write(folder.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap())
            .unwrap();
        folder
    };
    [write(&packed, &[("quantization_config", quantization)]), write(&plain, &[])]
}

#[test]
fn packed_matrices_are_the_model_of_their_values() {
    // Attention and experts of all kinds: by themselves, latent, joined with those that all tokens go through.
    for model in ["tiny/llama", "tiny/qwen3_moe", "tiny/deepseek_v2_lite", "tiny/glm4_moe_lite"] {
        let folders = with_codes_and_values(model);
        let [packed, plain] = folders.each_ref().map(|folder| folder.path().to_str().unwrap());
        let tokens = Golden::read(&format!("{model}/golden.safetensors")).ids;
        let logits = |path: &str, setup: Setup| Instance::open(path, setup).run(&tokens, &[40, 8]);
        let single = Setup { in_single_precision: true, ..Setup::default() };
        let expected = logits(plain, single);
        assert!(logits(packed, single) == expected, "{model}: the values are others");
        let blocks = Setup { quantization: Some(Quantization::Q4_0), ..Setup::default() };
        assert!(logits(packed, blocks) == logits(plain, blocks), "{model}: another type is made of them");

        // As it is loaded by itself: the same codes, by kernels that round no activations.
        let reference = logits(packed, Setup { kernels: Kernels::Reference, ..Setup::default() });
        for (own, expected) in reference.iter().zip(&expected) {
            let most = expected.iter().fold(0.0_f32, |most, logit| most.max(logit.abs()));
            assert!(own.iter().zip(expected).all(|(a, b)| (a - b).abs() < 2e-3 * most), "{model}");
        }
        let own = logits(packed, Setup::default());
        let in_file = Setup { experts_in_file: true, ..Setup::default() };
        if model != "tiny/llama" {
            assert!(logits(packed, in_file) == own, "{model}: experts in a file");
        }
    }
}

/// The plan, the progress and what steps read are those of what is kept.
#[test]
fn packed_matrices_are_counted_as_they_are_kept() {
    let folders = with_codes_and_values("tiny/deepseek_v2_lite");
    let checkpoint = Checkpoint::open(folders[0].path()).unwrap();
    let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
    let total: usize = checkpoint.tensors().iter().map(|tensor| tensor.num_bytes).sum();
    let threads = NonZeroUsize::new(2);
    for quantizer in [
        None,
        Some(Quantizer::unpacking(threads)),
        Some(Quantizer::new(Quantization::Q4_0, &checkpoint, threads)),
    ] {
        let context = Arc::new(Context::cpu(2, CpuLevel::detect()));
        let most = AtomicU64::new(0);
        let on_progress = |progress: models::LoadProgress| {
            assert!(progress.loaded_bytes <= progress.total_bytes);
            most.fetch_max(progress.loaded_bytes, Ordering::Relaxed);
        };
        let options = LoadOptions { quantizer, ..small_options() };
        models::load(&checkpoint, &config, &context, &options, &on_progress).unwrap();
        assert_eq!(most.into_inner(), total as u64);
    }
    // Those of eight bits take as many as the file that was quantised so by another program; vectors and the head
    // stay as they are.
    let types = Quantizer::unpacking(threads).type_summaries(&checkpoint).unwrap();
    let names: Vec<_> = types.iter().map(|summary| summary.type_name.as_str()).collect();
    assert_eq!(names, ["Q8_0", "F32"]);
    let planned = Quantizer::unpacking(threads).planned_bytes(&checkpoint, |own| own).unwrap();
    assert_eq!(planned, types.iter().map(|summary| summary.num_bytes).sum::<u64>());
    let traffic = |quantizer: &Quantizer| {
        models::WeightTraffic::of(&checkpoint, &config, Some(quantizer), |own| own).unwrap()
    };
    let plain = Checkpoint::open(folders[1].path()).unwrap();
    let quantizer = Quantizer::new(Quantization::Q4_0, &plain, threads);
    let expected = models::WeightTraffic::of(&plain, &config, Some(&quantizer), |own| own).unwrap();
    assert_eq!(traffic(&Quantizer::new(Quantization::Q4_0, &checkpoint, threads)), expected);
    assert_eq!(traffic(&Quantizer::unpacking(threads)).num_parameters, expected.num_parameters);
}
