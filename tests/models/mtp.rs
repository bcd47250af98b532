//! Blocks that predict further tokens, with which a model drafts for itself.

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;
use tempfile::TempDir;
use tinyvllm::kv_cache::BlockId;
use tinyvllm::runner::{DraftRequest, ModelRunner, Runner, ScheduledSequence, Step, StepDraft, Wanted};
use tinyvllm::sampling::{SamplerInput, SamplingParams};
use tinyvllm::scheduler::SeqId;
use tinyvllm::speculation::Draft;

use super::*;

const MODEL: &str = "tiny/mtp";
const GOLDEN: &str = "tiny/mtp/golden.safetensors";
const SINGLE: fn() -> Setup = || Setup { in_single_precision: true, drafts_itself: true, ..Setup::default() };

/// What the golden file has in addition to that of other models.
struct MtpGolden {
    /// What comes after the token after each of `ids` but the last.
    logits: Vec<Vec<f32>>,
    /// The tokens that are drafted after the first 8, 9, … of `greedy`.
    drafts: Vec<Vec<u32>>,
}

impl MtpGolden {
    fn read() -> Self {
        let bytes = std::fs::read(fixture(GOLDEN)).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let (logits, drafts) = (file.tensor("mtp_logits").unwrap(), file.tensor("drafts").unwrap());
        let values = logits.data().as_chunks().0.iter().map(|value| f32::from_le_bytes(*value));
        let ids = drafts.data().as_chunks().0.iter().map(|value| i64::from_le_bytes(*value) as u32);
        Self {
            logits: values.collect::<Vec<_>>().chunks(logits.shape()[1]).map(<[f32]>::to_vec).collect(),
            drafts: ids.collect::<Vec<_>>().chunks(drafts.shape()[1]).map(<[u32]>::to_vec).collect(),
        }
    }
}

/// A sequence of an instance whose blocks lie one after the other, and the block's state of its last token.
struct TestSequence {
    instance: Instance,
    tokens: Vec<u32>,
    num_computed: usize,
}

impl TestSequence {
    fn batch(&self, positions: std::ops::Range<usize>, token_ids: &[u32], mode: RowMode) -> InputBatch {
        let mut batch = InputBatch::default();
        batch.clear();
        batch.attention.block_size = self.instance.block_size;
        batch.token_ids.extend_from_slice(token_ids);
        batch.positions.extend(positions.clone().map(|position| position as u32));
        batch.attention.slot_mapping.extend(positions.clone());
        batch.attention.push(positions, 0, mode, |index| index as u32);
        batch
    }

    /// Computes the next `num` tokens, of which the one after is known. Returns the logits of the last one and the block's
    /// states of all.
    fn compute(&mut self, num: usize) -> (Vec<f32>, Vec<Vec<f32>>) {
        let positions = self.num_computed..self.num_computed + num;
        let (ids, next) =
            (&self.tokens[positions.clone()], &self.tokens[positions.start + 1..=positions.end]);
        let mut batch = self.batch(positions.clone(), ids, RowMode::of(num));
        batch.want(num - 1, Wanted::Logits);
        let Instance { model, cache, .. } = &mut self.instance;
        let logits = model.forward(&batch, cache).unwrap().read(1, <[f32]>::to_vec).unwrap();
        batch.token_ids.copy_from_slice(next);
        batch.clear_outputs();
        (0..num).for_each(|index| batch.want(index, Wanted::Logits));
        let states = model.mtp().unwrap().follow(&batch, cache).unwrap();
        let width = states.width();
        let states = states.read(num, |values| values.chunks(width).map(<[f32]>::to_vec).collect()).unwrap();
        self.num_computed += num;
        (logits, states)
    }

    /// The greedy tokens after all that are known, from the state of the last one that is computed.
    fn draft(&mut self, state: &[f32], num: usize) -> Vec<u32> {
        let mut drafted = Vec::new();
        let mtp = self.instance.model.mtp().unwrap();
        drafted.push(argmax(&mtp.predict(state).unwrap().read(1, <[f32]>::to_vec).unwrap()));
        while drafted.len() < num {
            let position = self.num_computed + drafted.len() - 1;
            let mut batch =
                self.batch(position..position + 1, &drafted[drafted.len() - 1..], RowMode::Decode);
            batch.want(0, Wanted::Logits);
            let Instance { model, cache, .. } = &mut self.instance;
            let logits = model.mtp().unwrap().predict_after(&batch, cache).unwrap();
            drafted.push(argmax(&logits.read(1, <[f32]>::to_vec).unwrap()));
        }
        drafted
    }
}

fn check_golden(path: &str, setup: Setup) {
    let (golden, own) = (Golden::read(GOLDEN), MtpGolden::read());
    let sequence = |tokens: &[u32]| TestSequence {
        instance: Instance::open(path, setup),
        tokens: tokens.to_vec(),
        num_computed: 0,
    };
    let what = format!("{path} with {:?}", setup.kernels);
    // In two chunks of a prompt.
    let mut prompt = sequence(&golden.ids);
    let mut states = prompt.compute(9).1;
    states.extend(prompt.compute(golden.ids.len() - 10).1);
    let mtp = prompt.instance.model.mtp().unwrap();
    let logits: Vec<Vec<f32>> =
        states.iter().map(|state| mtp.predict(state).unwrap().read(1, <[f32]>::to_vec).unwrap()).collect();
    let (max, rms, same) = compare(&logits, &own.logits);
    assert!(max < 1e-3 && rms < 1e-4 && same == 1.0, "{what}: logits differ by {max}, rms {rms}");

    // Drafts between single tokens write where those are computed next.
    let mut greedy = sequence(&golden.greedy);
    let (mut logits, mut states) = greedy.compute(7);
    for drafts in &own.drafts {
        let next = golden.greedy[greedy.num_computed + 1..].first();
        assert_eq!(&greedy.draft(states.last().unwrap(), drafts.len()), drafts, "{what}");
        if next.is_some() {
            (logits, states) = greedy.compute(1);
        }
        assert_eq!(argmax(&logits), golden.greedy[greedy.num_computed], "{what}");
    }
}

#[test]
fn the_block_predicts_what_its_definition_does() {
    for kernels in Kernels::all() {
        check_golden(MODEL, Setup { kernels, ..SINGLE() });
        check_golden(MODEL, Setup { kernels, block_size: 5, ..SINGLE() });
    }
}

/// The block after the layers changes no bit of the model.
#[test]
fn the_model_is_the_same_with_its_block() {
    check_exact(MODEL, GOLDEN, Setup { in_single_precision: true, ..Setup::default() });
    check_exact(MODEL, GOLDEN, SINGLE());
    for quantization in [None, Some(Quantization::Q8_0)] {
        let tokens = Golden::read(GOLDEN).ids;
        let logits = |drafts_itself: bool| {
            let setup = Setup { quantization, drafts_itself, ..Setup::default() };
            Instance::open(MODEL, setup).run(&tokens, &[10, 13, 1])
        };
        assert!(logits(true) == logits(false), "{quantization:?}");
    }
}

type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

/// A folder of the model with its tensors changed.
fn folder_with(change: impl FnOnce(&mut Vec<Tensor>)) -> TempDir {
    let bytes = std::fs::read(fixture(MODEL).join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter();
    let mut tensors: Vec<Tensor> = tensors
        .map(|(name, tensor)| (name, tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec()))
        .collect();
    change(&mut tensors);
    let folder = mixed_folder(MODEL, MODEL, &[]);
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let file = safetensors::serialize(views, None).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    folder
}

/// Published folders repeat the embedding and the head in the block.
#[test]
fn an_embedding_and_a_head_of_the_block_count_if_they_are_others() {
    let own = |tensors: &[Tensor], original: &str, name: &str| {
        let tensor = tensors.iter().find(|tensor| tensor.0 == original).unwrap();
        (format!("model.layers.2.{name}.weight"), tensor.1, tensor.2.clone(), tensor.3.clone())
    };
    let copied = folder_with(|tensors| {
        let embedding = own(tensors, "model.embed_tokens.weight", "embed_tokens");
        let head = own(tensors, "lm_head.weight", "shared_head.head");
        tensors.extend([embedding, head]);
    });
    check_golden(copied.path().to_str().unwrap(), SINGLE());

    // With the rows of the head turned by one, the predicted token is the one before.
    let turned = folder_with(|tensors| {
        let mut head = own(tensors, "lm_head.weight", "shared_head.head");
        let row_bytes = head.3.len() / head.2[0];
        head.3.rotate_left(row_bytes);
        tensors.push(head);
    });
    let golden = MtpGolden::read();
    let tokens = Golden::read(GOLDEN).greedy;
    let instance = Instance::open(turned.path().to_str().unwrap(), SINGLE());
    let mut sequence = TestSequence { instance, tokens, num_computed: 0 };
    let states = sequence.compute(7).1;
    assert_eq!(sequence.draft(states.last().unwrap(), 1), [golden.drafts[0][0].checked_sub(1).unwrap()]);
    // With another embedding, what is predicted from the same model is something else.
    let other = folder_with(|tensors| {
        let embedding = own(tensors, "lm_head.weight", "embed_tokens");
        tensors.push(embedding);
    });
    sequence.instance = Instance::open(other.path().to_str().unwrap(), SINGLE());
    sequence.num_computed = 0;
    assert_ne!(sequence.compute(7).1, states);
}

/// A GGUF file with the same tensors, in the layout of files from before experts were stacked and `attn_kv_b` was split.
fn gguf_file(folder: &Path) -> PathBuf {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let mut entries = Vec::new();
    let mut entry = |key: &str, kind: u32, value: &[u8]| {
        entries.extend((key.len() as u64).to_le_bytes());
        entries.extend_from_slice(key.as_bytes());
        entries.extend(kind.to_le_bytes());
        entries.extend_from_slice(value);
    };
    let arch = "deepseek2";
    let text = [&(arch.len() as u64).to_le_bytes()[..], arch.as_bytes()].concat();
    entry("general.architecture", 8, &text);
    let numbers = [
        ("vocab_size", 128),
        ("context_length", 512),
        ("embedding_length", 32),
        ("block_count", 3),
        ("nextn_predict_layers", 1),
        ("feed_forward_length", 48),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 2),
        ("attention.q_lora_rank", 32),
        ("attention.kv_lora_rank", 32),
        ("attention.key_length", 32),
        ("attention.value_length", 32),
        ("rope.dimension_count", 16),
        ("leading_dense_block_count", 1),
        ("expert_feed_forward_length", 16),
        ("expert_shared_count", 1),
        ("expert_count", 4),
        ("expert_used_count", 2),
        ("expert_group_count", 1),
        ("expert_group_used_count", 1),
        ("expert_gating_func", 2),
    ];
    for (key, number) in numbers {
        entry(&format!("{arch}.{key}"), 4, &u32::to_le_bytes(number));
    }
    let singles =
        [("attention.layer_norm_rms_epsilon", 1e-5), ("rope.freq_base", 1e6), ("expert_weights_scale", 1.8)];
    for (key, number) in singles {
        entry(&format!("{arch}.{key}"), 6, &f32::to_le_bytes(number));
    }
    entry(&format!("{arch}.expert_weights_norm"), 7, &[1]);
    let num_entries = 1 + numbers.len() + singles.len() + 1;

    let (mut infos, mut data) = (Vec::new(), Vec::new());
    let names: Vec<&str> = checkpoint.tensor_names().collect();
    for name in &names {
        let tensor = checkpoint.tensor(name).unwrap();
        infos.extend((name.len() as u64).to_le_bytes());
        infos.extend_from_slice(name.as_bytes());
        infos.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().rev().for_each(|size| infos.extend((*size as u64).to_le_bytes()));
        // Vectors and routers are in single precision, matrices halves.
        let is_exact = tensor.shape.len() == 1 || name.ends_with("ffn_gate_inp.weight");
        infos.extend(u32::from(!is_exact).to_le_bytes());
        data.resize(data.len().next_multiple_of(32), 0);
        infos.extend((data.len() as u64).to_le_bytes());
        match is_exact {
            true => tensor.to_f32().unwrap().iter().for_each(|value| data.extend(value.to_le_bytes())),
            false => data.extend_from_slice(tensor.data().unwrap()),
        }
    }
    let mut file = b"GGUF".to_vec();
    file.extend(3_u32.to_le_bytes());
    file.extend((names.len() as u64).to_le_bytes());
    file.extend((num_entries as u64).to_le_bytes());
    file.extend(entries);
    file.extend(infos);
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend(data);
    let path = folder.join("model.gguf");
    std::fs::write(&path, file).unwrap();
    path
}

#[test]
fn a_gguf_file_has_the_block_too() {
    let folder = folder_with(|_| ());
    let path = gguf_file(folder.path());
    check_exact(path.to_str().unwrap(), GOLDEN, SINGLE());
    check_golden(path.to_str().unwrap(), SINGLE());
}

#[test]
fn a_sequence_without_a_block_is_reported() {
    let refuse = |path: &Path, words: &[&str]| {
        let checkpoint = Checkpoint::open(path).unwrap();
        let mut config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
        let error = config.load_mtp_block(&checkpoint).unwrap_err();
        words.iter().for_each(|words| assert!(error.to_string().contains(words), "{words} in {error}"));
        assert!(error.hint().is_some_and(|hint| hint.contains("suffix")), "{error}");
        assert_eq!(config.mtp_layer(), None);
    };
    refuse(&fixture("tiny/glm4_moe_lite"), &["the method mtp", "Glm4MoeLiteForCausalLM"]);
    refuse(&fixture("tiny/llama"), &["the method mtp", "LlamaForCausalLM"]);
    let without = folder_with(|tensors| tensors.retain(|tensor| !tensor.0.contains("layers.2.")));
    refuse(without.path(), &["blk.2.nextn.eh_proj.weight is missing"]);
}

#[test]
fn what_is_wrong_with_the_block_is_named() {
    let check = |change: &dyn Fn(&mut Vec<Tensor>), words: &str| {
        let folder = folder_with(|tensors| change(tensors));
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let mut config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
        let context = Arc::new(Context::cpu(1, CpuLevel::detect()));
        // Who does not use it does not mind.
        models::load(&checkpoint, &config, &context, &small_options(), &|_| ()).unwrap();
        config.load_mtp_block(&checkpoint).unwrap();
        let error = models::load(&checkpoint, &config, &context, &small_options(), &|_| ()).err().unwrap();
        assert!(error.message().contains(words), "{words} in {error}");
    };
    check(
        &|tensors| tensors.retain(|tensor| !tensor.0.ends_with("2.enorm.weight")),
        "blk.2.nextn.enorm.weight",
    );
    check(
        &|tensors| tensors.retain(|tensor| !tensor.0.contains("2.mlp.experts.3.up")),
        "blk.2.ffn_up.3.weight",
    );
    let narrow = |tensors: &mut Vec<Tensor>| {
        let projection = tensors.iter_mut().find(|tensor| tensor.0.ends_with("eh_proj.weight")).unwrap();
        projection.2 = vec![64, 32];
    };
    check(&narrow, "blk.2.nextn.eh_proj.weight");
    let unknown = |tensors: &mut Vec<Tensor>| {
        let name = "model.layers.2.self_attn.q_norm.weight".to_owned();
        tensors.push((name, Dtype::F16, vec![32], vec![0; 64]));
    };
    check(&unknown, "no use for: blk.2.attn_q_norm.weight");
}

/// Also where copies are not loaded.
#[test]
fn progress_ends_with_all_bytes_of_the_block() {
    let copied = folder_with(|tensors| {
        let head = tensors.iter().find(|tensor| tensor.0 == "lm_head.weight").unwrap();
        let name = "model.layers.2.shared_head.head.weight".to_owned();
        tensors.push((name, head.1, head.2.clone(), head.3.clone()));
    });
    let checkpoint = Checkpoint::open(copied.path()).unwrap();
    let mut config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
    config.load_mtp_block(&checkpoint).unwrap();
    let context = Arc::new(Context::cpu(1, CpuLevel::detect()));
    let most = AtomicU64::new(0);
    let on_progress = |progress: models::LoadProgress| {
        most.fetch_max(progress.loaded_bytes, Ordering::Relaxed);
    };
    models::load(&checkpoint, &config, &context, &small_options(), &on_progress).unwrap();
    let total: usize = checkpoint.tensors().iter().map(|tensor| tensor.num_bytes).sum();
    assert_eq!(most.into_inner(), total as u64);
}

/// Blocks after the first one stay where they are.
#[test]
fn one_block_of_several_is_loaded() {
    let folder = mixed_folder(MODEL, MODEL, &[("num_nextn_predict_layers", json!(u64::MAX))]);
    check_golden(folder.path().to_str().unwrap(), SINGLE());
}

/// A sequence as a runner sees it, in blocks of its own.
struct Row {
    seq: SeqId,
    tokens: Vec<u32>,
    num_prompt: usize,
    blocks: Vec<BlockId>,
    params: SamplingParams,
}

impl Row {
    fn input(&self) -> SamplerInput<'_> {
        let (prompt, output) = self.tokens.split_at(self.num_prompt);
        SamplerInput {
            params: &self.params,
            seed: 0,
            stream: 0,
            prompt_token_ids: prompt,
            output_token_ids: output,
            end_token_ids: &[],
            allowed: None,
        }
    }

    /// The row of a step that computes `len` of these tokens, which are the sequence's and perhaps drafted ones.
    fn step<'a>(&'a self, token_ids: &'a [u32], start: usize, len: usize) -> ScheduledSequence<'a> {
        let is_complete = start + len >= self.tokens.len();
        ScheduledSequence {
            seq: self.seq,
            token_ids,
            start,
            len,
            draft: StepDraft { num_tokens: (start + len).saturating_sub(self.tokens.len()), allowed: &[] },
            num_grouped_tokens: 0,
            block_table: &self.blocks,
            copy: None,
            samples: if is_complete { vec![self.input()] } else { Vec::new() },
            wanted: Wanted::Logits,
            all_logits: false,
            prompt_logprobs: None,
        }
    }
}

/// After chunks of prompts, single tokens, and drafts that are accepted, partly accepted and rejected, alongside
/// another sequence.
#[test]
fn a_runner_drafts_what_the_block_predicts() {
    const NUM_OWN_BLOCKS: u32 = 12;
    let golden = Golden::read(GOLDEN);
    let drafts = MtpGolden::read().drafts;
    let Instance { model, cache, .. } = Instance::open(MODEL, Setup { block_size: 4, ..SINGLE() });
    // Drafts that go beyond the blocks of the sequence are in blocks after those of all.
    let first_spare = cache.num_blocks() - 1;
    let mut runner = ModelRunner::new(model, cache).unwrap().with_spare_blocks(first_spare);
    let blocks = |first: u32| (first..first + NUM_OWN_BLOCKS).map(BlockId).collect();
    let sequence = |seq: u64, tokens: &[u32]| Row {
        seq: SeqId(seq),
        tokens: tokens.to_vec(),
        num_prompt: tokens.len(),
        blocks: blocks(seq as u32 * NUM_OWN_BLOCKS),
        params: SamplingParams::greedy(),
    };
    let mut own = sequence(0, &golden.greedy[..8]);
    let other = sequence(1, &golden.ids);
    let mut num_computed = 0;
    // How many tokens of the prompt, then which tokens are drafted: this many right ones, and whether a wrong one after them.
    let chunks = [3, 5];
    let steps = chunks.into_iter().map(|len| (len, 0, false));
    let steps =
        steps.chain([(1, 0, false), (1, 1, false), (1, 0, true), (1, 2, true), (1, 3, false), (1, 1, true)]);
    for (step, (len, num_right, has_wrong)) in steps.enumerate() {
        let known = own.tokens.len();
        let mut token_ids = own.tokens.clone();
        token_ids.extend_from_slice(&golden.greedy[known..known + num_right]);
        if has_wrong {
            token_ids.push(golden.greedy[known + num_right] ^ 1);
        }
        let len = len + token_ids.len() - known;
        let rows = vec![other.step(&other.tokens, 2 * step, 2), own.step(&token_ids, num_computed, len)];
        let outputs = runner
            .execute(&Step {
                sequences: rows,
                window_slots: &[],
                num_steps: 1,
                may_queue_next: false,
                may_draft_next: true,
            })
            .unwrap();
        num_computed += len - usize::from(has_wrong);
        let sampled: Vec<u32> =
            outputs[1].samples.iter().flatten().map(|token| token.as_ref().unwrap().token_id).collect();
        own.tokens.extend(&sampled);
        assert_eq!(own.tokens, golden.greedy[..own.tokens.len()], "step {step}");
        let mut draft_of = |row: &Row, num_tokens: usize, max_tokens: usize| {
            let mut draft = Draft::default();
            let block_table = &row.blocks[..(num_tokens - 1).div_ceil(4)];
            let input = row.input();
            runner.draft(
                &DraftRequest { seq: row.seq, block_table, input, max_tokens, chance: 1.0 },
                &mut draft,
            );
            draft.token_ids
        };
        assert_eq!(draft_of(&other, other.tokens.len(), 3), [0; 0], "a prompt that is not computed yet");
        if sampled.is_empty() {
            assert_eq!(draft_of(&own, own.tokens.len(), 3), [0; 0], "another one");
            continue;
        }
        for max_tokens in [1, 3, 2] {
            let expected = &drafts[own.tokens.len() - 8][..max_tokens];
            assert_eq!(draft_of(&own, own.tokens.len(), max_tokens), expected, "after step {step}");
        }
    }
    assert!(own.tokens.len() > 20, "{}", own.tokens.len());
    // What has gone on meanwhile is not drafted for.
    own.tokens.push(5);
    let mut draft = Draft::default();
    let row = DraftRequest {
        seq: own.seq,
        block_table: &own.blocks,
        input: own.input(),
        max_tokens: 3,
        chance: 1.0,
    };
    runner.draft(&row, &mut draft);
    assert!(draft.is_empty());
}
