//! Ops, models, the engine's promises and the use of memory bandwidth on a real GPU. CI has none, so none of this runs
//! there; `scripts/cuda_check.sh` runs it where there is one.

use std::env;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tinyvllm::ErrorKind;
use tinyvllm::ops::gpu::{CudaGpu, Gpu};
use tinyvllm::ops::{Context, KvCacheDType, RowMode};
use tinyvllm::self_test::{self, Check, Effort, Family};

use super::drafted::Drafted;
use super::{benchmark, host_blocks, schedules};

/// The GPU does one test at a time: some measure times.
static IN_USE: Mutex<()> = Mutex::new(());

/// The first GPU, to oneself; none, with a message, on a machine without.
///
/// # Panics
/// If there is none and the variable `TINYVLLM_REQUIRE_CUDA` is set.
fn gpu() -> Option<(Arc<CudaGpu>, MutexGuard<'static, ()>)> {
    let in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
    match CudaGpu::open(0, Some(&env::temp_dir().join("tinyvllm-test-kernels"))) {
        Ok(gpu) => Some((Arc::new(gpu), in_use)),
        Err(error) => {
            let may_be_missing = env::var_os("TINYVLLM_REQUIRE_CUDA").is_none();
            assert!(may_be_missing && error.kind() == ErrorKind::Unsupported, "{error}");
            write_line(&format!("skipped: {error}"));
            None
        }
    }
}

/// Not `eprintln!`, which the test harness shows for failed tests only.
fn write_line(line: &str) {
    drop(writeln!(std::io::stderr(), "{line}"));
}

/// Counts checks, and says at once which ones failed.
#[derive(Default)]
struct Verdict {
    num_checks: AtomicUsize,
    failures: Mutex<Vec<String>>,
}

impl Verdict {
    fn hear(&self, check: &Check) {
        self.num_checks.fetch_add(1, Ordering::Relaxed);
        if !check.passed {
            let line = format!("{}: {}", check.name, check.detail);
            write_line(&line);
            self.failures.lock().unwrap().push(line);
        }
    }

    fn check(self) {
        let (failures, num_checks) = (self.failures.into_inner().unwrap(), self.num_checks.into_inner());
        assert!(failures.is_empty(), "{} of {num_checks} failed:\n{}", failures.len(), failures.join("\n"));
        assert!(num_checks > 0, "nothing was checked");
        write_line(&format!("{num_checks} checks passed"));
    }
}

/// The shapes that reach every kernel.
#[test]
fn every_op_is_right() {
    check_ops(Effort::Small);
}

/// The shapes of models, which take minutes in double precision.
#[test]
fn every_op_is_right_at_full_size() {
    check_ops(Effort::Full);
}

fn check_ops(effort: Effort) {
    let Some((gpu, _in_use)) = gpu() else { return };
    let verdict = Verdict::default();
    std::thread::scope(|scope| {
        for family in Family::ALL {
            let context = Context::gpu(Arc::clone(&gpu) as Arc<dyn Gpu>);
            let verdict = &verdict;
            scope.spawn(move || family.check(&context, effort, &mut |check: Check| verdict.hear(&check)));
        }
    });
    verdict.check();
}

/// Those of the checkout in which the program was built or, on another machine, of the current folder.
fn fixtures() -> PathBuf {
    let built = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures"));
    let fixtures = if built.is_dir() { built } else { PathBuf::from("tests/fixtures") };
    assert!(fixtures.is_dir(), "{} is not there", fixtures.display());
    fixtures
}

#[test]
fn models_give_the_tokens_of_the_cpu() {
    let Some((gpu, _in_use)) = gpu() else { return };
    let context = Arc::new(Context::gpu(gpu));
    let verdict = Verdict::default();
    self_test::demo_model(&context, &mut |check: Check| verdict.hear(&check));
    self_test::golden_models(&context, &fixtures(), &mut |check: Check| verdict.hear(&check));
    verdict.check();
}

/// In memory whose pages stay where they are.
#[test]
fn blocks_are_copied_to_the_host_and_back() {
    let Some((gpu, _in_use)) = gpu() else { return };
    let gpu: Arc<dyn Gpu> = gpu;
    host_blocks::copies_are_in_order(&gpu);
    host_blocks::many_are_read_exactly(&gpu);
}

#[test]
fn same_tokens_however_they_are_scheduled() {
    let Some((gpu, _in_use)) = gpu() else { return };
    let gpu: Arc<dyn Gpu> = gpu;
    schedules::same_tokens_however_they_are_scheduled(&gpu);
}

/// Tokens after the last one of a sequence, in one row, have the bits that each has in a step of its own: with one token, with
/// a few, and in contexts that are cut and not.
#[test]
fn drafted_tokens_have_the_bits_of_single_ones() {
    let Some((gpu, _in_use)) = gpu() else { return };
    let tiny = fixtures().join("tiny");
    // Attention with and without norms, latent, with sinks and windows; experts; matrices of all kinds.
    let names = [
        "llama",
        "llama/llama.q8_0.gguf",
        "llama3/llama3.q4_0.gguf",
        "qwen3",
        "gemma3/gemma3.q8_0.gguf",
        "granite/granite.f16.gguf",
        "olmo3",
        "gpt_oss",
        "gpt_oss/gpt_oss.mxfp4.gguf",
        "qwen3_moe/qwen3_moe.q8_0.gguf",
        "mixtral/mixtral.q8_0.gguf",
        "youtu/youtu.q4_0.gguf",
        "deepseek_v2_lite",
        "deepseek_v2_lite/deepseek_v2_lite.q4_0-mixed.gguf",
        "glm4_moe_lite/glm4_moe_lite.q8_0.gguf",
    ];
    let mut paths: Vec<PathBuf> = names.iter().map(|name| tiny.join(name)).collect();
    paths.extend(env::var_os("TINYVLLM_DRAFTED_MODELS").iter().flat_map(env::split_paths));
    let mut failures = Vec::new();
    let f16 = paths.into_iter().map(|path| (path, KvCacheDType::F16));
    let names = ["llama", "qwen3", "gemma3/gemma3.q8_0.gguf", "gpt_oss", "deepseek_v2_lite"];
    let of_eight_bits = [KvCacheDType::Q8_0, KvCacheDType::Fp8E4m3].into_iter();
    let of_eight_bits = of_eight_bits.flat_map(|dtype| names.map(|name| (tiny.join(name), dtype)));
    for (path, dtype) in f16.chain(of_eight_bits) {
        let context = Arc::new(Context::gpu(gpu.clone()));
        let mut drafted = Drafted::open(&path, &context, dtype);
        let lens = [40, 505, 700].map(|len| [1, 3, 8, 32].map(|num_drafted| (len, num_drafted)));
        for (len, num_drafted) in lens.into_iter().flatten() {
            if num_drafted + 1 > context.max_exact_rows() {
                continue;
            }
            let tokens: Vec<u32> =
                (0..len + num_drafted + 1).map(|at| (at * at * 7 + at * 13) as u32 % 200 + 3).collect();
            drafted.step(&tokens, 0..len, RowMode::Prefill);
            let alone: Vec<Vec<u32>> = (len..len + num_drafted + 1)
                .map(|at| drafted.step(&tokens, at..at + 1, RowMode::Decode).remove(0))
                .collect();
            // Keys and values of other tokens, so that one that is read before it is written has other bits.
            let spoilt: Vec<u32> = tokens.iter().map(|token| token + 1).collect();
            drafted.step(&spoilt, len..len + num_drafted + 1, RowMode::Decode);
            let together = drafted.step(&tokens, len..len + num_drafted + 1, RowMode::Decode);
            let differing: Vec<usize> = (0..=num_drafted).filter(|at| alone[*at] != together[*at]).collect();
            if !differing.is_empty() {
                failures.push(format!(
                    "{} with {dtype}: {num_drafted} after {len}: {differing:?}",
                    path.display()
                ));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn the_tokens_of_the_training_script() {
    let Some((gpu, _in_use)) = gpu() else { return };
    schedules::the_tokens_of_the_training_script(gpu);
}

#[test]
fn memory_bandwidth_is_used() {
    let Some((gpu, _in_use)) = gpu() else { return };
    let shares = benchmark::run(&gpu, &mut |line| write_line(&line)).unwrap();
    // What was measured on an H200, less a tenth: below this they have become slower.
    let bar = |name: &str| match name {
        _ if name.contains("experts") => 0.19,
        _ if name.contains("F16") => 0.70,
        _ if name.contains("Q8_0") => 0.59,
        _ if name.contains("Q6_K") => 0.45,
        _ if name.contains("Q4_0") => 0.41,
        _ if name.contains("Q4_K") => 0.29,
        _ if name.starts_with("latent attention") => 0.42,
        _ => 0.84,
    };
    let too_slow: Vec<_> = shares.iter().filter(|(name, share)| *share < bar(name)).collect();
    assert!(too_slow.is_empty(), "too small a share of the bandwidth of a copy: {too_slow:?}");
}
