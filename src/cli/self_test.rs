//! `tinyvllm self-test`: whether this machine's device computes what it should, and how fast.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use tinyvllm::llm::{KernelChoice, OpenedDevice};
use tinyvllm::ops::Context;
use tinyvllm::ops::cpu::{CpuLevel, ThreadPool};
use tinyvllm::self_test::{self, Check, Effort, Report};

use super::args::SelfTestArgs;
use super::console::Console;
use super::load::unused_gpu;

/// Where the golden models are in a checkout of the source.
const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");

/// Checks every op and the models; one line each, and a failure shows in the exit status.
///
/// # Errors
/// If the device cannot be opened, or fails while it is measured.
pub(crate) fn run(args: &SelfTestArgs) -> anyhow::Result<ExitCode> {
    let context = Arc::new(open(args)?);
    let mut out = io::stdout().lock();
    writeln!(out, "tinyvllm {} on {}", env!("CARGO_PKG_VERSION"), context.description())?;
    let only = args.only.as_deref().unwrap_or_default();
    let mut report = Lines { out, only, num_passed: 0, num_failed: 0, written: Ok(()) };
    self_test::ops(&context, if args.quick { Effort::Small } else { Effort::Full }, &mut report);
    self_test::demo_model(&context, &mut report);
    let fixtures = Path::new(FIXTURES);
    if fixtures.exists() {
        self_test::golden_models(&context, fixtures, &mut report);
    }
    let Lines { mut out, num_passed, num_failed, written, .. } = report;
    written?;
    if num_passed + num_failed == 0 {
        anyhow::bail!("no check has `{only}` in its name; without `--only`, self-test tells all names");
    }
    if !fixtures.exists() {
        writeln!(out, "skip  the golden models: {FIXTURES} is not there")?;
    }
    if !args.quick && args.only.is_none() {
        let mut written = Ok(());
        self_test::timings(&context, &mut |timing| {
            if written.is_ok() {
                written = writeln!(out, "time  {timing}").and_then(|()| out.flush());
            }
        })?;
        written?;
    }
    writeln!(out, "{num_passed} passed, {num_failed} failed")?;
    if num_failed > 0 && args.kernels == KernelChoice::Fused {
        writeln!(
            out,
            "This device does not compute what it should. Until that is mended, `--kernels reference` computes every \
             op in candle's tensors, slowly, and `--device cpu` uses the processor."
        )?;
    }
    Ok(if num_failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Writes a line for each check, of those whose names have `only` in them.
struct Lines<'a, W> {
    out: W,
    only: &'a str,
    num_passed: usize,
    num_failed: usize,
    written: io::Result<()>,
}

impl<W: Write> Report for Lines<'_, W> {
    fn wants(&mut self, name: &str) -> bool {
        name.contains(self.only)
    }

    fn hear(&mut self, Check { name, detail, passed }: Check) {
        let verdict = if passed { "pass" } else { "FAIL" };
        *if passed { &mut self.num_passed } else { &mut self.num_failed } += 1;
        if self.written.is_ok() {
            // A device that hangs later on should not take these lines with it.
            self.written = writeln!(self.out, "{verdict}  {name}: {detail}").and_then(|()| self.out.flush());
        }
    }
}

fn open(args: &SelfTestArgs) -> tinyvllm::Result<Context> {
    Ok(match args.device.open(args.kernels)? {
        OpenedDevice::Cpu(unused) => {
            if let Some(error) = unused {
                Console::default().note(unused_gpu(&error));
            }
            Context::cpu(ThreadPool::default_num_threads(), CpuLevel::detect())
        }
        OpenedDevice::Gpu(gpu) => Context::gpu(gpu),
        OpenedDevice::Reference(backend) => Context::reference(backend),
    })
}
