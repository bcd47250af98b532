//! `tinyvllm verify` against the golden files, in both directions.

use std::fs;

use safetensors::tensor::{Dtype, TensorView, serialize};

use crate::program::{Outcome, fixture, tinyvllm};

fn verify(model: &str, reference: &str, more: &str) -> Outcome {
    let reference = fixture(reference);
    tinyvllm(&format!("verify {more}"))
        .model(fixture(model))
        .args(["--reference".as_ref(), reference.as_os_str()])
        .run()
}

#[test]
fn models_agree_with_their_goldens() {
    let check = |model: &str, reference: &str, more: &str, greedy: &str| {
        let stdout = verify(model, reference, more).success();
        let last = stdout.lines().last().unwrap();
        for name in ["max_abs_diff=", "rms_diff=", "argmax_agreement="] {
            assert!(last.contains(name), "{last}");
        }
        assert!(last.ends_with(&format!("greedy_match={greedy}")), "{model}: {last}");
    };
    for name in ["llama", "llama3", "mistral", "qwen2", "qwen3"] {
        check(&format!("tiny/{name}"), &format!("tiny/{name}/golden.safetensors"), "", "true");
    }
    check("tiny/llama/llama.f32.gguf", "tiny/llama/golden.safetensors", "", "true");
    check("tiny/llama", "tiny/llama/golden.safetensors", "--kv-cache-dtype f16 --tolerance 0.05", "true");
    let quantised = "tiny/llama/llama.q8_0.golden.safetensors";
    check("tiny/llama/llama.q8_0.gguf", quantised, "--tolerance 0.2", "none");
}

#[test]
fn a_difference_above_the_tolerance_fails() {
    let outcome = verify("tiny/llama/llama.q8_0.gguf", "tiny/llama/golden.safetensors", "");
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.stdout.contains("max_abs_diff="), "{}", outcome.stdout);
    let outcome = verify("tiny/llama", "tiny/llama/golden.safetensors", "--tolerance 0");
    assert_eq!(outcome.code, Some(1), "no two implementations agree to the last bit");
}

#[test]
fn a_greedy_token_that_differs_fails() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reference.safetensors");
    let bytes = fs::read(fixture("tiny/llama/golden.safetensors")).unwrap();
    let golden = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut greedy = golden.tensor("greedy").unwrap().data().to_vec();
    greedy[8 * 39] ^= 1;
    let view = TensorView::new(Dtype::I64, vec![40], &greedy).unwrap();
    let tensors = [
        ("ids", golden.tensor("ids").unwrap()),
        ("logits", golden.tensor("logits").unwrap()),
        ("greedy", view),
    ];
    fs::write(&path, serialize(tensors, None).unwrap()).unwrap();
    let program = tinyvllm("verify").model(fixture("tiny/llama"));
    let outcome = program.args(["--reference".as_ref(), path.as_os_str()]).run();
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.stdout.ends_with("greedy_match=false\n"), "{}", outcome.stdout);
    assert!(outcome.stderr.contains("greedy token 31"), "{}", outcome.stderr);
}

#[test]
fn references_that_do_not_belong_to_the_model() {
    let check = |model: &str, reference: &str, more: &str, expected: &[&str]| {
        verify(model, reference, more).error(1, expected);
    };
    check("tiny/llama", "tiny/llama/model.safetensors", "", &["model.safetensors", "`ids`"]);
    check("tiny/llama", "tiny/llama/config.json", "", &["config.json", "safetensors"]);
    check("tiny/llama", "no-such-file", "", &["no-such-file"]);
    check("tiny/llama", "tiny/llama/golden.safetensors", "--tolerance -1", &["--tolerance is -1"]);
    check(
        "tiny/llama",
        "tiny/llama/golden.safetensors",
        "--tolerance inf",
        &["--tolerance is inf", "finite"],
    );
    check("tiny/llama", "tiny/llama/golden.safetensors", "--max-model-len 20", &["48", "20"]);
    let demo = tinyvllm("verify demo --reference").args([fixture("tiny/llama/golden.safetensors")]);
    demo.run().error(1, &["288", "2048"]);
}
