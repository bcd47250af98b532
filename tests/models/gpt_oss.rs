//! gpt-oss in every format of its weights, all of which have the same values.

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::*;

const GOLDEN: &str = "tiny/gpt_oss/golden.safetensors";

/// Halves, whose rows of gate and up are in turns and exchanged with columns in the folder, and apart in the GGUF file.
#[test]
fn dense_weights_are_exact() {
    check_dense("tiny/gpt_oss", GOLDEN);
    check_dense("tiny/gpt_oss/gpt_oss.f16.gguf", GOLDEN);
}

/// The experts' values are those of the dense folder; with activations of eight bits a token may take another expert.
#[test]
fn experts_of_four_bits_are_those_of_the_dense_folder() {
    let single = Setup { in_single_precision: true, ..Setup::default() };
    check_exact("tiny/gpt_oss_mxfp4", GOLDEN, single);
    for model in ["tiny/gpt_oss_mxfp4", "tiny/gpt_oss/gpt_oss.mxfp4.gguf"] {
        check_within(model, GOLDEN, EXACT, ROUNDED_EXPERTS);
    }
    // The same blocks, whichever file they come from.
    let tokens = Golden::read(GOLDEN).ids;
    let logits = |model: &str| Instance::open(model, Setup::default()).run(&tokens, &[40, 8]);
    assert!(logits("tiny/gpt_oss_mxfp4") == logits("tiny/gpt_oss/gpt_oss.mxfp4.gguf"));
}

/// Dense folders that others have made are in this type. Every value is a half as well.
#[test]
fn a_folder_in_bf16_is_that_in_halves() {
    let model = "tiny/gpt_oss";
    let bytes = std::fs::read(fixture(model).join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let converted: Vec<_> = file
        .tensors()
        .into_iter()
        .map(|(name, tensor)| {
            let halves = tensor.data().as_chunks().0.iter().map(|bytes| half::f16::from_le_bytes(*bytes));
            let values = halves.flat_map(|value| {
                let own = half::bf16::from_f32(value.to_f32());
                assert_eq!(own.to_f32(), value.to_f32(), "{name}");
                own.to_le_bytes()
            });
            (name.clone(), tensor.shape().to_vec(), values.collect::<Vec<u8>>())
        })
        .collect();
    let folder = mixed_folder(model, model, &[]);
    let views = converted.iter().map(|(name, shape, data)| {
        (name.clone(), TensorView::new(Dtype::BF16, shape.clone(), data).unwrap())
    });
    let file = safetensors::serialize(views, None).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    let single = Setup { in_single_precision: true, ..Setup::default() };
    check_exact(folder.path().to_str().unwrap(), GOLDEN, single);
}

/// Whatever is made of them, all bytes of the file are counted once.
#[test]
fn progress_ends_with_all_bytes() {
    for (model, quantization) in [
        ("tiny/gpt_oss", None),
        ("tiny/gpt_oss", Some(Quantization::Q8_0)),
        ("tiny/gpt_oss_mxfp4", None),
        ("tiny/gpt_oss_mxfp4", Some(Quantization::Q8_0)),
        ("tiny/gpt_oss/gpt_oss.mxfp4.gguf", None),
    ] {
        let checkpoint = Checkpoint::open(&fixture(model)).unwrap();
        let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
        let total: usize = checkpoint.tensors().iter().map(|tensor| tensor.num_bytes).sum();
        let context = Arc::new(Context::cpu(2, CpuLevel::detect()));
        let most = AtomicU64::new(0);
        let on_progress = |progress: models::LoadProgress| {
            assert!(progress.loaded_bytes <= progress.total_bytes);
            most.fetch_max(progress.loaded_bytes, Ordering::Relaxed);
        };
        let quantizer = quantization.map(|kind| Quantizer::new(kind, &checkpoint, None));
        let options = LoadOptions { quantizer, ..small_options() };
        models::load(&checkpoint, &config, &context, &options, &on_progress).unwrap();
        assert_eq!(most.into_inner(), total as u64, "{model} {quantization:?}");
    }
}

/// A folder that lacks a part names it.
#[test]
fn what_is_missing_is_named() {
    let bytes = std::fs::read(fixture("tiny/gpt_oss_mxfp4/model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    for (missing, expected) in [
        ("model.layers.0.self_attn.sinks", "self_attn.sinks"),
        ("model.layers.1.mlp.router.bias", "blk.1.ffn_gate_inp.bias"),
        ("model.layers.1.mlp.experts.down_proj_bias", "mlp.experts.down_proj_bias"),
        ("model.layers.0.mlp.experts.gate_up_proj_scales", "gate_up_proj_scales"),
    ] {
        let folder = mixed_folder("tiny/gpt_oss_mxfp4", "tiny/gpt_oss_mxfp4", &[]);
        let rest = file.tensors().into_iter().filter(|(name, _)| name != missing);
        let rest = safetensors::serialize(rest, None).unwrap();
        std::fs::write(folder.path().join("model.safetensors"), rest).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
        let context = Arc::new(Context::cpu(1, CpuLevel::detect()));
        let error = models::load(&checkpoint, &config, &context, &small_options(), &|_| ()).err().unwrap();
        assert!(error.message().contains(expected), "{error}");
    }
}
