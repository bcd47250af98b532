use std::path::Path;

use super::*;
use crate::weights::Quantization;

fn open(path: &str) -> (Checkpoint, ModelConfig) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
    (checkpoint, config)
}

fn as_in_file(file_type: FileType) -> FileType {
    file_type
}

fn of(path: &str, quantization: Option<Quantization>) -> WeightTraffic {
    let (checkpoint, config) = open(path);
    let quantizer = quantization.map(|quantization| Quantizer::new(quantization, &checkpoint, None));
    WeightTraffic::of(&checkpoint, &config, quantizer.as_ref(), as_in_file).unwrap()
}

/// The tensors of a model with latent attention as its GGUF file has them.
#[derive(Clone, Copy)]
struct Shapes {
    num_layers: usize,
    num_heads: usize,
    q_rank: Option<usize>,
    nope: usize,
    value_dim: usize,
    dense: usize,
    num_dense_layers: usize,
    /// Width of an expert, and of the shared experts.
    experts: (usize, usize),
    has_bias: bool,
    vocab: usize,
    is_tied: bool,
}

impl Shapes {
    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (hidden, rank, rotated, num_experts) = (2_048, 512, 64, 64);
        let head_dim = self.nope + rotated;
        let mut all = vec![
            ("token_embd.weight".to_owned(), vec![self.vocab, hidden]),
            ("output_norm.weight".to_owned(), vec![hidden]),
        ];
        if !self.is_tied {
            all.push(("output.weight".to_owned(), vec![self.vocab, hidden]));
        }
        for layer in 0..self.num_layers {
            let mut add =
                |name: &str, shape: &[usize]| all.push((format!("blk.{layer}.{name}"), shape.to_vec()));
            add("attn_norm.weight", &[hidden]);
            add("ffn_norm.weight", &[hidden]);
            match self.q_rank {
                None => add("attn_q.weight", &[self.num_heads * head_dim, hidden]),
                Some(q_rank) => {
                    add("attn_q_a.weight", &[q_rank, hidden]);
                    add("attn_q_a_norm.weight", &[q_rank]);
                    add("attn_q_b.weight", &[self.num_heads * head_dim, q_rank]);
                }
            }
            add("attn_kv_a_mqa.weight", &[rank + rotated, hidden]);
            add("attn_kv_a_norm.weight", &[rank]);
            add("attn_k_b.weight", &[self.num_heads, rank, self.nope]);
            add("attn_v_b.weight", &[self.num_heads, self.value_dim, rank]);
            add("attn_output.weight", &[hidden, self.num_heads * self.value_dim]);
            if layer < self.num_dense_layers {
                add("ffn_gate.weight", &[self.dense, hidden]);
                add("ffn_up.weight", &[self.dense, hidden]);
                add("ffn_down.weight", &[hidden, self.dense]);
                continue;
            }
            let (inside, shared) = self.experts;
            add("ffn_gate_inp.weight", &[num_experts, hidden]);
            add("ffn_gate_exps.weight", &[num_experts, inside, hidden]);
            add("ffn_up_exps.weight", &[num_experts, inside, hidden]);
            add("ffn_down_exps.weight", &[num_experts, hidden, inside]);
            add("ffn_gate_shexp.weight", &[shared, hidden]);
            add("ffn_up_shexp.weight", &[shared, hidden]);
            add("ffn_down_shexp.weight", &[hidden, shared]);
            if self.has_bias {
                add("exp_probs_b.bias", &[num_experts]);
            }
        }
        all
    }

    fn count(&self, num_experts_per_tok: usize, dtype: DType) -> WeightTraffic {
        let fixture =
            if self.num_dense_layers < self.num_layers { "tiny/glm4_moe_lite" } else { "tiny/youtu" };
        let (_, mut config) = open(fixture);
        config.num_layers = self.num_layers;
        config.tie_word_embeddings = self.is_tied;
        if let Some(experts) = &mut config.experts {
            (experts.num_experts, experts.num_experts_per_tok) = (64, num_experts_per_tok);
        }
        let mut traffic = WeightTraffic::empty(&config);
        for (name, shape) in self.tensors() {
            traffic.add(&config, None, &as_in_file, &name, &shape, dtype.into()).unwrap();
        }
        traffic
    }
}

const DEEPSEEK_V2_LITE: Shapes = Shapes {
    num_layers: 27,
    num_heads: 16,
    q_rank: None,
    nope: 128,
    value_dim: 128,
    dense: 10_944,
    num_dense_layers: 1,
    experts: (1_408, 2_816),
    has_bias: false,
    vocab: 102_400,
    is_tied: false,
};

const YOUTU: Shapes = Shapes {
    num_layers: 32,
    q_rank: Some(1_536),
    dense: 6_144,
    num_dense_layers: 32,
    vocab: 128_256,
    is_tied: true,
    ..DEEPSEEK_V2_LITE
};

const GLM: Shapes = Shapes {
    num_layers: 47,
    num_heads: 20,
    q_rank: Some(768),
    nope: 192,
    value_dim: 256,
    dense: 10_240,
    num_dense_layers: 1,
    experts: (1_536, 1_536),
    has_bias: true,
    vocab: 154_880,
    is_tied: false,
};

/// The numbers that are published for these models, to the last parameter.
#[test]
fn parameters_are_those_that_are_published() {
    for (shapes, chosen, expected) in
        [(DEEPSEEK_V2_LITE, 6, 15_706_484_224), (YOUTU, 0, 1_961_560_064), (GLM, 4, 29_943_393_920)]
    {
        assert_eq!(shapes.count(chosen, DType::F32).num_parameters, expected);
    }
    // Of 64 experts in 26 layers, each of three matrices of 1,408 × 2,048, 58 are not read; nor is the embedding.
    let active = 15_706_484_224 - 26 * 58 * 3 * 1_408 * 2_048 - 102_400 * 2_048;
    assert_eq!(DEEPSEEK_V2_LITE.count(6, DType::F32).num_active_parameters(), active);
    assert_eq!(
        YOUTU.count(0, DType::F32).num_active_parameters(),
        1_961_560_064,
        "the embedding is the head"
    );
    let active = 29_943_393_920 - 46 * 60 * 3 * 1_536 * 2_048 - 154_880 * 2_048;
    assert_eq!(GLM.count(4, DType::F32).num_active_parameters(), active);
}

#[test]
fn bytes_are_counted_by_class_in_the_stored_types() {
    let traffic = DEEPSEEK_V2_LITE.count(6, DType::Q8_0);
    let blocks = |values: u64| values / 32 * 34;
    let attention = 3_072 * 2_048 + 576 * 2_048 + 2 * 16 * 128 * 512 + 2_048 * 2_048;
    let norms = 2_048 + 512;
    assert_eq!(traffic.attention_bytes, 27 * (blocks(attention) + 4 * norms));
    let shared = blocks(3 * 2_816 * 2_048) + 4 * 64 * 2_048;
    let dense = blocks(3 * 10_944 * 2_048);
    assert_eq!(traffic.feed_forward_bytes, 26 * shared + dense + 27 * 4 * 2_048);
    assert_eq!(traffic.head_bytes, blocks(102_400 * 2_048) + 4 * 2_048);
    let one_expert = blocks(3 * 1_408 * 2_048);
    let experts = traffic.experts.unwrap();
    assert_eq!(experts.num_bytes, 26 * 64 * one_expert);
    let rest = traffic.attention_bytes + traffic.feed_forward_bytes + traffic.head_bytes;
    assert_eq!(traffic.bytes_per_step(1), rest + 26 * 6 * one_expert);
}

/// Two tokens that choose one of two experts each: half of the time it is the same one.
#[test]
fn tokens_of_a_step_share_experts() {
    let experts =
        ExpertTraffic { num_parameters: 0, num_bytes: 1_000, num_experts: 2, num_experts_per_tok: 1 };
    let bytes = [0, 1, 2, 3, usize::MAX].map(|num| experts.bytes_per_step(num));
    assert_eq!(bytes, [0, 500, 750, 875, 1_000]);
    let all = ExpertTraffic { num_experts_per_tok: 2, ..experts };
    assert_eq!(all.bytes_per_step(1), 1_000);
    // Of 64 experts, eight tokens with six each choose 64 · (1 - (58/64)^8) ≈ 34.88, not 48.
    let deepseek = ExpertTraffic { num_bytes: 64_000, num_experts: 64, num_experts_per_tok: 6, ..experts };
    assert_eq!(deepseek.bytes_per_step(8), 34_882);
}

/// Folder and GGUF file, experts stacked and one by one, the projections of keys and values joint and apart.
#[test]
fn formats_agree() {
    for file in ["tiny/llama/llama.f32.gguf", "tiny/deepseek_v2_lite/deepseek_v2_lite.f32-legacy.gguf"] {
        let (folder, _) = file.rsplit_once('/').unwrap();
        assert_eq!(of(folder, None), of(file, None), "{file}");
    }
    let glm = |kind: &str| of(&format!("tiny/glm4_moe_lite/glm4_moe_lite.{kind}.gguf"), None);
    assert_eq!(glm("q8_0-ollama"), glm("q8_0"));
    // Joint and in blocks, the projections of keys (4 heads, 64 × 32, in 3 layers) are loaded in halves.
    let deepseek = |kind: &str| of(&format!("tiny/deepseek_v2_lite/deepseek_v2_lite.{kind}.gguf"), None);
    let (joint, apart) = (deepseek("q8_0-legacy"), deepseek("q8_0"));
    let num_keys = 3 * 4 * 64 * 32;
    assert_eq!(joint.attention_bytes - apart.attention_bytes, num_keys * 2 - num_keys / 32 * 34);
    assert_eq!(joint.num_parameters, apart.num_parameters);
}

/// The bytes of a model that is quantised at load are those of the file that was quantised before.
#[test]
fn quantisation_counts() {
    for (model, quantization, name) in [
        ("llama", Quantization::Q8_0, "q8_0"),
        ("youtu", Quantization::Q8_0, "q8_0"),
        ("deepseek_v2_lite", Quantization::Q8_0, "q8_0"),
        ("mixtral", Quantization::Q8_0, "q8_0"),
    ] {
        let file = of(&format!("tiny/{model}/{model}.{name}.gguf"), None);
        assert_eq!(of(&format!("tiny/{model}"), Some(quantization)), file, "{model}");
    }
    let (dense, blocks) = (of("tiny/qwen2", None), of("tiny/qwen2", Some(Quantization::Q4_0)));
    // Three layers of width 64 with four heads of 16, two of keys and values, a network of 128, and a tied head.
    let values = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 288 * 64;
    let vectors = 3 * (2 * 64 + 64 + 32 + 32) + 64;
    assert_eq!(dense.num_parameters, values + vectors);
    assert_eq!(dense.bytes_per_step(8), 4 * (values + vectors));
    let head = 288 * 64;
    assert_eq!(blocks.bytes_per_step(1), (values - head) * 18 / 32 + head * 34 / 32 + 4 * vectors);
}

/// Layers that predict further tokens are in the file and not in the model.
#[test]
fn layers_that_are_left_out_do_not_count() {
    let (checkpoint, mut config) = open("tiny/qwen3");
    let all = WeightTraffic::of(&checkpoint, &config, None, as_in_file).unwrap();
    config.num_layers -= 1;
    let fewer = WeightTraffic::of(&checkpoint, &config, None, as_in_file).unwrap();
    let layer = |traffic: &WeightTraffic| (traffic.attention_bytes + traffic.feed_forward_bytes) / 3;
    assert_eq!(fewer.bytes_per_step(1), all.bytes_per_step(1) - layer(&all));
}

/// Types that a device keeps in another type are read in that one.
#[test]
fn repacked_weights_count_as_they_are_kept() {
    let (checkpoint, config) = open("tiny/llama/llama.q8_0.gguf");
    let in_f32 = |file_type: FileType| match file_type {
        FileType::Kept(DType::Q8_0) => DType::F32.into(),
        other => other,
    };
    let [in_file, kept] = [
        WeightTraffic::of(&checkpoint, &config, None, as_in_file),
        WeightTraffic::of(&checkpoint, &config, None, in_f32),
    ]
    .map(Result::unwrap);
    let vectors = 4 * 64 * (2 * 3 + 1);
    assert_eq!((kept.bytes_per_step(1) - vectors) * 34, (in_file.bytes_per_step(1) - vectors) * 128);
    assert_eq!(kept.num_parameters, in_file.num_parameters);
}
