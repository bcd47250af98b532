//! Ops, models, the engine's promises and the use of memory bandwidth on a real GPU. CI has none, so none of this runs
//! there; `scripts/cuda_check.sh` runs it where there is one.

use std::env;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tinyvllm::ErrorKind;
use tinyvllm::ops::Context;
use tinyvllm::ops::gpu::{CudaGpu, Gpu};
use tinyvllm::self_test::{self, Check, Effort, Family};

use super::{benchmark, schedules};

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
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
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

#[test]
fn same_tokens_however_they_are_scheduled() {
    let Some((gpu, _in_use)) = gpu() else { return };
    let gpu: Arc<dyn Gpu> = gpu;
    schedules::same_tokens_however_they_are_scheduled(&gpu);
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
        _ if name.starts_with("latent attention") => 0.50,
        _ => 0.84,
    };
    let too_slow: Vec<_> = shares.iter().filter(|(name, share)| *share < bar(name)).collect();
    assert!(too_slow.is_empty(), "too small a share of the bandwidth of a copy: {too_slow:?}");
}
