//! `tinyvllm self-test`: checks that this machine's device computes correct results, and measures its speed.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use tinyvllm::llm::{DeviceChoice, KernelChoice, LlmOptions, OpenedDevice};
use tinyvllm::ops::Context;
use tinyvllm::self_test::{self, Check, Effort, Report};

use super::console::Console;
use super::flags::ThreadsArgs;
use super::load::unused_gpu;
use super::value::parse_value;

/// The checks to run.
#[derive(Debug, Clone, Args)]
pub(crate) struct SelfTestArgs {
    /// Device: auto, cpu, metal, cuda or cuda:N
    #[arg(long, default_value_t)]
    pub(crate) device: DeviceChoice,
    /// Kernels: fused, or reference (candle's tensors)
    #[arg(long, default_value = "fused", value_parser = parse_value::<KernelChoice>, value_name = "NAME")]
    pub(crate) kernels: KernelChoice,
    #[command(flatten)]
    pub(crate) threads: ThreadsArgs,
    /// Small shapes only, and no measurements
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only checks whose names contain this, and no measurements
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Option<String>,
}

/// The golden models in a checkout of the source.
const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures");

/// Checks every op and the models, one line each. The exit status shows failures.
///
/// # Errors
/// If the device cannot be opened, or a measurement fails.
pub(crate) fn run(args: &SelfTestArgs) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let context = Arc::new(open(args)?);
    let mut out = io::stdout().lock();
    writeln!(out, "tinyvllm {} on {}", env!("CARGO_PKG_VERSION"), context.description())?;
    let only = args.only.as_deref().unwrap_or_default();
    let mut report = Lines { out, only, num_passed: 0, num_failed: 0, written: Ok(()) };
    let effort = if args.quick { Effort::Small } else { Effort::Full };
    compile_kernels(&context, effort, only);
    self_test::ops(&context, effort, &mut report);
    self_test::demo_model(&context, &mut report);
    let fixtures = Path::new(FIXTURES);
    if fixtures.exists() {
        self_test::golden_models(&context, fixtures, &mut report);
    }
    let Lines { mut out, num_passed, num_failed, written, .. } = report;
    written?;
    if num_passed + num_failed == 0 {
        anyhow::bail!("no check has `{only}` in its name; self-test without `--only` lists all names");
    }
    if !fixtures.exists() {
        writeln!(out, "skip  the golden models: {FIXTURES} does not exist")?;
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
    let (checks, num_skipped) = (num_passed + num_failed, usize::from(!fixtures.exists()));
    let skipped = if num_skipped > 0 { format!(", {num_skipped} skipped") } else { String::new() };
    let noun = if checks == 1 { "check" } else { "checks" };
    writeln!(
        out,
        "{num_passed} passed, {num_failed} failed{skipped}: {checks} {noun} in {:.1} s",
        start.elapsed().as_secs_f64()
    )?;
    if num_failed > 0 && args.kernels == KernelChoice::Fused {
        writeln!(
            out,
            "This device computes wrong results. Until this is fixed, `--kernels reference` computes every \
             op in candle's tensors, slowly, and `--device cpu` uses the processor."
        )?;
    }
    Ok(if num_failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Writes a line for each check whose name contains `only`.
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
            // Flushed, so that these lines are not lost if the device hangs later.
            self.written = writeln!(self.out, "{verdict}  {name}: {detail}").and_then(|()| self.out.flush());
        }
    }
}

/// Compiles the kernels of all checks at once, with a message, because the first time takes long.
fn compile_kernels(context: &Context, effort: Effort, only: &str) {
    if context.is_gpu() {
        Console::default().note("compiling kernels");
    }
    self_test::compile_kernels(context, effort, &|name| name.contains(only), &|_, _| ());
}

fn open(args: &SelfTestArgs) -> tinyvllm::Result<Context> {
    let options = LlmOptions {
        device: args.device,
        kernels: args.kernels,
        threads: args.threads.threads,
        ..LlmOptions::default()
    };
    let device = options.open_device()?;
    if let OpenedDevice::Cpu(Some(error)) = &device {
        Console::default().note(unused_gpu(error));
    }
    options.open_context(device)
}
