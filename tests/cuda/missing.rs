//! What the program says where the driver, a GPU, the compiler or memory is missing. Drivers that lack something are
//! libraries that are compiled for the test; the program finds them before this machine's own.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::program::{Outcome, Program};

const DRIVER: &str = include_str!("fake_driver.c");
const COMPILER: &str = include_str!("fake_compiler.c");

/// A machine: folders with a driver, and with what else the program loads.
struct Machine {
    driver: TempDir,
    libraries: TempDir,
    home: TempDir,
}

impl Machine {
    /// One with a driver that is changed by these definitions, and without compiler. None, with a message, where no C
    /// compiler makes one.
    fn new(definitions: &[&str]) -> Option<Self> {
        let machine = Self::without_driver();
        compile(DRIVER, &machine.driver.path().join("libcuda.so"), definitions)?;
        fs::copy(machine.driver.path().join("libcuda.so"), machine.driver.path().join("libcuda.so.1"))
            .unwrap();
        Some(machine)
    }

    /// The files of its driver are none, so that this machine's own is not found either.
    fn without_driver() -> Self {
        let new_folder = || tempfile::tempdir().unwrap();
        let machine = Self { driver: new_folder(), libraries: new_folder(), home: new_folder() };
        for name in ["libcuda.so", "libcuda.so.1"] {
            fs::write(machine.driver.path().join(name), "").unwrap();
        }
        machine
    }

    /// With a compiler that makes nothing useful.
    fn with_compiler(self) -> Option<Self> {
        compile(COMPILER, &self.libraries.path().join("libnvrtc.so.12"), &[])?;
        Some(self)
    }

    fn run(&self, device: &str) -> Outcome {
        self.generate(device, 2)
    }

    fn generate(&self, device: &str, num_tokens: usize) -> Outcome {
        Program::new()
            .args(["--device", device, "--max-tokens", &num_tokens.to_string()])
            // Steps with drafts are alike less often.
            .args(["--ignore-eos", "--temperature", "0", "--raw", "--no-speculation", "--prompt", "Once"])
            .env("FAKE_DRIVER_COUNTS", self.counts())
            .env("LD_LIBRARY_PATH", self.driver.path())
            .env("TINYVLLM_CUDA_LIBRARIES", self.libraries.path())
            .env("XDG_CACHE_HOME", self.home.path())
            .run()
    }

    /// Where the driver writes what was queued.
    fn counts(&self) -> PathBuf {
        self.home.path().join("counts")
    }

    /// Checks that a GPU that is asked for is an error, in one line that says all of `words`, with a way out.
    #[track_caller]
    fn fails(&self, device: &str, words: &[&str]) {
        let outcome = self.run(device);
        let errors = outcome.stderr.lines().filter(|line| line.starts_with("error: ")).count();
        assert_eq!(errors, 1, "{}", outcome.stderr);
        outcome.error(1, &[words, &["hint: "]].concat());
    }

    /// Checks that the processor computes if nothing is asked for; and what is said of the GPU, if anything.
    #[track_caller]
    fn runs_on_the_cpu(&self, note: Option<&str>) {
        let outcome = self.run("auto");
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        assert!(!outcome.stdout.is_empty() && outcome.stderr.contains(" cpu"), "{}", outcome.stderr);
        let notes: Vec<_> = outcome.stderr.lines().filter(|line| line.contains("the GPU")).collect();
        match (note, &notes[..]) {
            (None, []) => {}
            (Some(note), [line]) => {
                assert!(line.starts_with("note: the GPU is not used: ") && line.contains(note), "{line}");
                assert!(line.contains("use --device cpu"), "{line}");
            }
            _ => panic!("{note:?}, but {notes:?}"),
        }
    }
}

/// Makes a library. None, with a message, without a C compiler.
fn compile(source: &str, library: &Path, definitions: &[&str]) -> Option<()> {
    let file = library.with_extension("c");
    fs::write(&file, source).unwrap();
    let definitions = definitions.iter().map(|definition| format!("-D{definition}"));
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-o"]).arg(library).arg(&file).args(definitions);
    match command.output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(())
        }
        Err(error) => {
            // Not `eprintln!`, which the test harness shows for failed tests only.
            drop(writeln!(std::io::stderr(), "skipped: cc: {error}"));
            None
        }
    }
}

#[test]
fn no_driver() {
    let machine = Machine::without_driver();
    machine.fails("cuda", &["error: --device cuda:0 is not available: ", "libcuda.so.1", "--device cpu"]);
    machine.runs_on_the_cpu(None);
}

#[test]
fn too_old_a_driver() {
    let Some(machine) = Machine::new(&["VERSION=11080"]) else { return };
    let what = "the driver is for CUDA 11.8; 12.0 is the oldest";
    machine.fails("cuda", &[what, "install a newer driver"]);
    machine.runs_on_the_cpu(Some(what));
}

#[test]
fn a_driver_without_a_gpu() {
    let Some(machine) = Machine::new(&["INIT=100"]) else { return };
    machine.fails("cuda", &["CUDA_ERROR_NO_DEVICE", "--device cpu"]);
    machine.runs_on_the_cpu(None);
}

#[test]
fn a_driver_that_does_not_start() {
    let Some(machine) = Machine::new(&["INIT=999"]) else { return };
    machine.fails("cuda", &["CUDA_ERROR_UNKNOWN", "nvidia-smi", "--device cpu"]);
    machine.runs_on_the_cpu(Some("CUDA_ERROR_UNKNOWN"));
}

#[test]
fn too_old_a_gpu() {
    let Some(machine) = Machine::new(&["CAPABILITY=75"]).and_then(Machine::with_compiler) else { return };
    let what = "Fake GPU has compute capability 7.5; 8.0 is the oldest";
    machine.fails("cuda", &[what, "use --device cpu"]);
    machine.runs_on_the_cpu(Some(what));
}

#[test]
fn a_number_beyond_the_gpus() {
    let Some(machine) = Machine::new(&[]) else { return };
    machine.fails("cuda:7", &["--device cuda:7 is not available", "one GPU, cuda:0", "nvidia-smi -L"]);
}

#[test]
fn no_compiler() {
    let Some(machine) = Machine::new(&[]) else { return };
    let what = "the compiler of CUDA kernels (libnvrtc of CUDA 12.0 or newer) is not there";
    machine.fails("cuda", &[what, "TINYVLLM_CUDA_LIBRARIES", "pip install"]);
    machine.runs_on_the_cpu(Some(what));
}

#[test]
fn no_memory() {
    let Some(machine) = Machine::new(&["ALLOCATE=2"]).and_then(Machine::with_compiler) else { return };
    machine.fails("cuda", &["allocating", "bytes on Fake GPU", "CUDA_ERROR_OUT_OF_MEMORY", "--device cpu"]);
}

#[test]
fn a_gpu_that_fails() {
    let Some(machine) = Machine::new(&["LAUNCH=719"]).and_then(Machine::with_compiler) else { return };
    let outcome = machine.run("cuda");
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("error: generation failed: "), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("CUDA_ERROR_LAUNCH_FAILED"), "{}", outcome.stderr);
    // The driver itself is a whole one: without the failure there are answers.
    let Some(machine) = Machine::new(&[]).and_then(Machine::with_compiler) else { return };
    let outcome = machine.run("cuda");
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("Fake GPU"), "{}", outcome.stderr);
}

/// Nothing is missing: the steps of an answer, whose batch metadata alternate between two slots, are queued as a graph for each, of which
/// the arguments of a few kernels are replaced.
#[test]
fn steps_that_come_again_are_queued_by_one_call() {
    let counts = |definitions: &[&str], num_tokens: usize| {
        let machine = Machine::new(definitions).and_then(Machine::with_compiler)?;
        let outcome = machine.generate("cuda", num_tokens);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        let counts = fs::read_to_string(machine.counts()).unwrap();
        let counts: Vec<usize> = counts.split_whitespace().map(|count| count.parse().unwrap()).collect();
        <[usize; 5]>::try_from(counts).ok()
    };
    let Some([num_launches, num_nodes, num_graphs, num_replays, num_replaced]) = counts(&[], 60) else {
        return;
    };
    assert_eq!(num_graphs, 2);
    assert!((50..60).contains(&num_replays), "{num_replays} graphs were queued");
    assert!(num_replaced >= num_replays && num_replaced <= 4 * num_replays, "{num_replaced} were replaced");
    assert!(num_launches < 12 * num_nodes, "{num_launches} launches in addition to graphs of {num_nodes}");
    // Drivers that do not know of kernels that overlap within a graph have none.
    let Some([more_launches, .., no_replays, _]) = counts(&["VERSION=12020"], 60) else { return };
    assert!(no_replays == 0 && more_launches > 40 * num_nodes, "{more_launches} launches");
}
