//! Models that several ranks compute together, here the threads of one process, against the same models on one rank.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tinyvllm::config::Shard;
use tinyvllm::ops::Communicator;
use tinyvllm::{Error, ErrorKind};

use super::*;

/// A rank's channels to and from all ranks, in their order. If a thread ends, its channels do, so that none waits for ever.
#[derive(Debug)]
struct Channels {
    to: Vec<Sender<Vec<f32>>>,
    from: Vec<Mutex<Receiver<Vec<f32>>>>,
}

impl Channels {
    fn of_ranks(size: usize) -> Vec<Self> {
        let mut ranks: Vec<_> = (0..size).map(|_| Self { to: Vec::new(), from: Vec::new() }).collect();
        for from in 0..size {
            for to in 0..size {
                let (sender, receiver) = channel();
                ranks[from].to.push(sender);
                ranks[to].from.push(Mutex::new(receiver));
            }
        }
        ranks
    }
}

impl Communicator for Channels {
    fn sum(&self, values: &mut [f32]) -> tinyvllm::Result<()> {
        let is_lost = |_| Error::internal("another rank has ended");
        for to in &self.to {
            to.send(values.to_vec()).map_err(|_| is_lost(()))?;
        }
        values.fill(0.0);
        for from in &self.from {
            let part = from.lock().unwrap().recv().map_err(|_| is_lost(()))?;
            assert_eq!(part.len(), values.len(), "the ranks add up different numbers of values");
            values.iter_mut().zip(part).for_each(|(sum, value)| *sum += value);
        }
        Ok(())
    }
}

/// What each of `size` ranks does with its shard of a model.
fn on_ranks<R: Send>(size: usize, path: &str, setup: Setup, work: impl Fn(Instance) -> R + Sync) -> Vec<R> {
    let work = &work;
    thread::scope(|scope| {
        let run = |(rank, channels)| {
            scope.spawn(move || {
                let shard = Shard::new(rank, size).unwrap();
                work(Instance::on(setup.context().of_rank(shard, Arc::new(channels)), path, setup))
            })
        };
        let threads: Vec<_> = Channels::of_ranks(size).into_iter().enumerate().map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The logits of a prompt in two chunks, and a text of the most likely tokens.
fn answer(mut instance: Instance) -> (Vec<Vec<f32>>, Vec<u32>) {
    let prompt = Golden::read("tiny/llama/golden.safetensors").ids;
    let logits = instance.run(&prompt, &[40, 8]);
    let mut tokens = prompt[..8].to_vec();
    let mut next = argmax(instance.step(&[(1, &tokens, 8)]).last().unwrap());
    while tokens.len() < 32 {
        tokens.push(next);
        next = argmax(&instance.step(&[(1, &tokens, 1)])[0]);
    }
    (logits, tokens)
}

/// All ranks have the same bits, which are those of one rank but for the order of sums.
fn check(size: usize, path: &str, setup: Setup, limit: f32) {
    let (whole, text) = answer(Instance::open(path, setup));
    let ranks = on_ranks(size, path, setup, answer);
    for (rank, (logits, own_text)) in ranks.iter().enumerate() {
        assert!(logits == &ranks[0].0, "{path}: rank {rank} of {size} has other bits than the first");
        let (max, _, _) = compare(logits, &whole);
        assert!(max < limit, "{path}: with {size} ranks logits differ by {max}");
        assert_eq!(own_text, &text, "{path}: with {size} ranks");
    }
}

fn check_dense(size: usize, path: &str) {
    check(size, path, Setup::default(), 1e-4);
}

#[test]
fn grouped_query_attention_and_networks_are_divided() {
    check_dense(2, "tiny/llama");
    // Biases of queries, keys and values.
    check_dense(2, "tiny/qwen2");
    // Queries, keys and values in one tensor, and gate and up.
    check_dense(2, "tiny/phi3");
    check_dense(2, "tiny/phi3/phi3.f16.gguf");
    // Norms after the sums, and windows.
    check_dense(2, "tiny/gemma3");
    // Biases of output projections.
    let biased = biases::with_biases(0.5);
    check_dense(2, biased.path().to_str().unwrap());
    check_dense(1, "tiny/llama");
    let reference = Setup { kernels: Kernels::Reference, ..Setup::default() };
    check(2, "tiny/llama", reference, 1e-4);
}

#[test]
fn experts_are_divided_each() {
    check_dense(2, "tiny/qwen3_moe");
    check_dense(2, "tiny/mixtral");
}

#[test]
fn latent_attention_is_divided_by_heads() {
    for size in [2, 4] {
        check_dense(size, "tiny/deepseek_v2_lite");
        check_dense(size, "tiny/glm4_moe_lite");
        check_dense(size, "tiny/youtu");
    }
    check_dense(2, "tiny/deepseek_v2_lite/deepseek_v2_lite.f32-legacy.gguf");
}

/// The network that all tokens go through has another type than the experts, and so it is not one of them.
#[test]
fn a_shared_network_of_its_own_is_divided() {
    let model = "tiny/deepseek_v2_lite";
    let bytes = std::fs::read(fixture(model).join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut num_converted = 0;
    let tensors: Vec<_> = file
        .tensors()
        .into_iter()
        .map(|(name, tensor)| {
            let shape = tensor.shape().to_vec();
            if !name.contains("shared_experts") {
                return (name, tensor.dtype(), shape, tensor.data().to_vec());
            }
            num_converted += 1;
            let values = tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            let halves = values.flat_map(|value| half::f16::from_f32(value).to_le_bytes()).collect();
            (name, Dtype::F16, shape, halves)
        })
        .collect();
    assert!(num_converted > 0);
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    let folder = mixed_folder(model, model, &[]);
    std::fs::write(folder.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap())
        .unwrap();
    check_dense(2, folder.path().to_str().unwrap());
}

/// With sinks, windows, and biases everywhere; rows of gate and up in turns and exchanged with columns, or apart.
#[test]
fn gpt_oss_is_divided() {
    check_dense(2, "tiny/gpt_oss");
    check_dense(2, "tiny/gpt_oss/gpt_oss.f16.gguf");
    let single = Setup { in_single_precision: true, ..Setup::default() };
    check(2, "tiny/gpt_oss_mxfp4", single, 1e-4);
}

/// Whole blocks of files, and blocks that are made at load. The CPU's kernels round activations to eight bits, so a
/// difference in the last bit may become one of a whole step there; the reference does not.
#[test]
fn quantised_matrices_are_divided_in_blocks() {
    let at_load = Some(Quantization::Q8_0);
    for (path, quantization) in [
        ("tiny/llama/llama.q8_0.gguf", None),
        ("tiny/mixtral/mixtral.q8_0.gguf", None),
        ("tiny/youtu/youtu.q8_0.gguf", None),
        ("tiny/gpt_oss_mxfp4", None),
        ("tiny/gpt_oss/gpt_oss.mxfp4.gguf", None),
        ("tiny/llama", at_load),
        ("tiny/gpt_oss", at_load),
    ] {
        let setup = Setup { quantization, ..Setup::default() };
        check(2, path, Setup { kernels: Kernels::Reference, ..setup }, 1e-4);
        check(2, path, setup, 0.05);
    }
}

/// A rank reads its part, and the bytes of the others count when it does.
#[test]
fn progress_of_a_rank_ends_with_all_bytes() {
    for path in ["tiny/llama", "tiny/phi3", "tiny/glm4_moe_lite", "tiny/gpt_oss", "tiny/gpt_oss_mxfp4"] {
        let checkpoint = Checkpoint::open(&fixture(path)).unwrap();
        let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
        let total: usize = checkpoint.tensors().iter().map(|tensor| tensor.num_bytes).sum();
        for (rank, channels) in Channels::of_ranks(2).into_iter().enumerate() {
            let context =
                Setup::default().context().of_rank(Shard::new(rank, 2).unwrap(), Arc::new(channels));
            let most = AtomicU64::new(0);
            let on_progress = |progress: models::LoadProgress| {
                most.fetch_max(progress.loaded_bytes, Ordering::Relaxed);
            };
            models::load(&checkpoint, &config, &Arc::new(context), &small_options(), &on_progress).unwrap();
            assert_eq!(most.into_inner(), total as u64, "{path}");
        }
    }
}

#[test]
fn what_cannot_be_divided_is_refused_by_name() {
    let error = |path: &str, size: usize, quantization: Option<Quantization>| {
        let checkpoint = Checkpoint::open(&fixture(path)).unwrap();
        let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
        let channels = Channels::of_ranks(size).pop().unwrap();
        let shard = Shard::new(size - 1, size).unwrap();
        let context = Arc::new(Setup::default().context().of_rank(shard, Arc::new(channels)));
        let quantizer = quantization.map(|kind| Quantizer::new(kind, &checkpoint, None));
        let options = LoadOptions { quantizer, ..small_options() };
        let error = models::load(&checkpoint, &config, &context, &options, &|_| ()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.hint().is_some());
        error.message().to_owned()
    };
    for (path, size, quantization, expected) in [
        ("tiny/llama", 4, None, "the 2 key and value heads of attn_k.weight cannot be divided among 4 ranks"),
        ("tiny/olmo3", 2, None, "attn_q_norm.weight"),
        ("tiny/deepseek_v2_lite/deepseek_v2_lite.q8_0.gguf", 2, None, "has 16 columns for each of 2 ranks"),
        ("tiny/deepseek_v2_lite", 2, Some(Quantization::Q8_0), "the blocks of 32 values of Q8_0"),
        ("tiny/gpt_oss", 4, None, "attn_k.weight"),
    ] {
        let message = error(path, size, quantization);
        assert!(message.contains(expected), "{path}: {message}");
    }
}
