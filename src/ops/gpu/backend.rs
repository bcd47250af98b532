//! A GPU with its compiled kernels and a count of its launches.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::cost::{Cost, DispatchBudget};
use super::device::{THREADGROUP_UNIT, WITHOUT_KERNELS};
use super::dry_run::DryRun;
use super::kernel::Kernel;
use super::{Binding, Gpu, GpuBuffer, Launch, Pipeline, PipelineLimits, Placement, Ticket, Tuning};
use crate::ops::cpu::pool::ThreadPool;
use crate::{Error, Result};

/// Launches kernels: the only way from an op to a [`Gpu`].
pub(crate) struct GpuBackend {
    gpu: Arc<dyn Gpu>,
    tuning: Tuning,
    /// Host threads for work at load.
    pool: ThreadPool,
    pipelines: Mutex<HashMap<(Kernel, Flags), Pipeline>>,
    is_dry_run: bool,
    num_dispatches: AtomicU64,
    waiting_nanoseconds: AtomicU64,
    dispatch_budget: DispatchBudget,
    /// The cost of the work that is queued since the last commit.
    queued_nanoseconds: AtomicU64,
    /// The maximum rows of activations for which matmuls with every matrix so far give a row the same bits as alone.
    max_exact_rows: AtomicUsize,
}

/// Threads of a simdgroup on every Apple GPU; the kernels assume this number.
const SIMD_WIDTH: usize = 32;

/// The function constants of a kernel that are flags, from constant 0 on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Flags([bool; 6]);

impl Flags {
    /// The first flags. The others are false.
    pub(super) fn of<const N: usize>(flags: [bool; N]) -> Self {
        let mut all = Self::default();
        all.0[..N].copy_from_slice(&flags);
        all
    }

    /// The same flags with a new value of the last one.
    pub(super) fn with_last(mut self, flag: bool) -> Self {
        self.0[5] = flag;
        self
    }

    /// The first `len` of them.
    pub(super) fn first(self, len: usize) -> impl Iterator<Item = bool> {
        self.0.into_iter().take(len)
    }
}

/// A launch without its pipeline.
#[derive(Debug, Clone, Copy)]
pub(super) struct Work<'a> {
    /// The arguments, as bytes.
    pub(super) args: &'a [u8],
    /// The buffers after the arguments.
    pub(super) buffers: &'a [Binding<'a>],
    /// Bytes of threadgroup memory.
    pub(super) threadgroup_memory: usize,
    /// Threadgroups.
    pub(super) grid: [usize; 3],
    /// Threads of each; for kernels that take any number, the maximum.
    pub(super) num_threads: usize,
    /// The cost of the launch.
    pub(super) cost: Cost,
}

impl fmt::Debug for GpuBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuBackend").field("gpu", &self.gpu).field("tuning", &self.tuning).finish()
    }
}

impl GpuBackend {
    pub(crate) fn new(gpu: Arc<dyn Gpu>, tuning: Tuning, pool: ThreadPool) -> Self {
        let dispatch_budget = DispatchBudget::new(gpu.dispatch_budget());
        Self {
            gpu,
            tuning,
            pool,
            pipelines: Mutex::default(),
            is_dry_run: false,
            num_dispatches: AtomicU64::new(0),
            waiting_nanoseconds: AtomicU64::new(0),
            dispatch_budget,
            queued_nanoseconds: AtomicU64::new(0),
            max_exact_rows: AtomicUsize::new(usize::MAX),
        }
    }

    /// The same device for a dry run.
    pub(crate) fn dry_run(&self) -> Self {
        let gpu = Arc::new(DryRun::of(&self.gpu));
        Self { is_dry_run: true, ..Self::new(gpu, self.tuning, ThreadPool::new(1)) }
    }

    pub(crate) fn is_dry_run(&self) -> bool {
        self.is_dry_run
    }

    /// The kernels that were used or compiled.
    pub(super) fn kernels(&self) -> Vec<(Kernel, Flags)> {
        self.pipelines().keys().copied().collect()
    }

    pub(crate) fn device(&self) -> &Arc<dyn Gpu> {
        &self.gpu
    }

    pub(crate) fn pool(&self) -> &ThreadPool {
        &self.pool
    }

    pub(crate) fn num_dispatches(&self) -> u64 {
        self.num_dispatches.load(Ordering::Relaxed)
    }

    pub(crate) fn tuning(&self) -> Tuning {
        self.tuning
    }

    /// The maximum rows of activations for which matmuls with all matrices give a row the same bits as alone.
    pub(crate) fn max_exact_rows(&self) -> usize {
        self.max_exact_rows.load(Ordering::Relaxed)
    }

    /// Lowers the maximum to that of one matrix.
    pub(super) fn note_exact_rows(&self, max_rows: usize) {
        self.max_exact_rows.fetch_min(max_rows, Ordering::Relaxed);
    }

    /// The maximum cost of a launch.
    pub(super) fn dispatch_budget(&self) -> DispatchBudget {
        self.dispatch_budget
    }

    /// Queues a kernel. A grid without threadgroups queues nothing.
    pub(super) fn launch(&self, kernel: Kernel, flags: Flags, work: Work<'_>) -> Result<()> {
        if work.grid.contains(&0) {
            return Ok(());
        }
        let pipeline = self.pipeline(kernel, flags)?;
        let PipelineLimits { max_threads, simd_width, .. } = pipeline.limits;
        let num_threads = match kernel.takes_any_threads() {
            true => work.num_threads.min((max_threads / simd_width).max(1) * simd_width),
            false => work.num_threads,
        };
        let nanoseconds = work.cost.nanoseconds();
        if self.queued_nanoseconds.load(Ordering::Relaxed) + nanoseconds > self.dispatch_budget.nanoseconds {
            self.commit()?;
        }
        self.queued_nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        self.num_dispatches.fetch_add(1, Ordering::Relaxed);
        self.gpu.dispatch(&Launch {
            pipeline,
            args: work.args,
            buffers: work.buffers,
            threadgroup_memory: work.threadgroup_memory.next_multiple_of(THREADGROUP_UNIT),
            grid: work.grid,
            num_threads,
        })
    }

    /// Queues a kernel whose threadgroups are simdgroups, without flags.
    pub(super) fn launch_simdgroups(
        &self,
        kernel: Kernel,
        args: &[u8],
        buffers: &[Binding<'_>],
        grid: [usize; 3],
        cost: Cost,
    ) -> Result<()> {
        let work = Work { args, buffers, threadgroup_memory: 0, grid, num_threads: SIMD_WIDTH, cost };
        self.launch(kernel, Flags::default(), work)
    }

    /// The compiled kernel. No lock is held during compilation; the device compiles each kernel once.
    pub(super) fn pipeline(&self, kernel: Kernel, flags: Flags) -> Result<Pipeline> {
        if let Some(pipeline) = self.pipelines().get(&(kernel, flags)) {
            return Ok(*pipeline);
        }
        let constants = kernel.constants(flags);
        let pipeline = self.gpu.pipeline(kernel.library(), &kernel.function(), &constants)?;
        let width = pipeline.limits.simd_width;
        if width != SIMD_WIDTH {
            return Err(Error::unsupported(format!(
                "{} runs in groups of {width} threads on this device; the kernels need {SIMD_WIDTH}",
                kernel.function()
            ))
            .with_hint(WITHOUT_KERNELS));
        }
        self.pipelines().insert((kernel, flags), pipeline);
        Ok(pipeline)
    }

    fn pipelines(&self) -> MutexGuard<'_, HashMap<(Kernel, Flags), Pipeline>> {
        self.pipelines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of `values`.
    pub(crate) fn upload(&self, values: &[f32]) -> Result<GpuBuffer> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        self.filled(bytes.len(), |target| target.copy_from_slice(bytes))
    }

    /// Time spent on waiting for the device.
    pub(crate) fn waiting_time(&self) -> Duration {
        Duration::from_nanos(self.waiting_nanoseconds.load(Ordering::Relaxed))
    }

    /// Waits for all work and copies the beginning of a buffer.
    pub(crate) fn read(&self, buffer: &GpuBuffer, bytes: &mut [u8]) -> Result<()> {
        self.queued_nanoseconds.store(0, Ordering::Relaxed);
        self.timed(|| self.gpu.read(buffer, 0, bytes))
    }

    /// Copies from a shared buffer that finished work has written, without waiting for other work.
    pub(super) fn read_finished(&self, buffer: &GpuBuffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let Some(host) = buffer.0.host() else {
            return self.timed(|| self.gpu.read_finished(buffer, offset, bytes));
        };
        if offset + bytes.len() > buffer.len() {
            return Err(Error::internal(format!(
                "bytes {offset}.. of a buffer of {} are to be read",
                buffer.len()
            )));
        }
        // SAFETY: the range is in the buffer, whose memory lives as long as it, and the caller has waited for the
        // work that writes it.
        unsafe {
            host.as_ptr().add(offset).copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len());
        }
        Ok(())
    }

    /// Waits for the work before a commit.
    pub(super) fn wait(&self, ticket: Ticket) -> Result<()> {
        self.timed(|| self.gpu.wait(ticket))
    }

    fn timed(&self, wait: impl FnOnce() -> Result<()>) -> Result<()> {
        let start = Instant::now();
        let result = wait();
        self.waiting_nanoseconds.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }

    /// Lets the device start on queued work. Returns a ticket to wait for.
    pub(super) fn commit(&self) -> Result<Ticket> {
        self.queued_nanoseconds.store(0, Ordering::Relaxed);
        self.gpu.commit()
    }

    /// Memory that the host writes with `fill`, once.
    pub(super) fn filled(&self, len: usize, fill: impl FnOnce(&mut [u8])) -> Result<GpuBuffer> {
        let buffer = self.gpu.allocate(len.max(16), Placement::Shared)?;
        match buffer.0.host() {
            Some(host) => {
                // SAFETY: the memory was just allocated with at least `len` zeroed bytes; nothing is queued that
                // uses it, and nothing else has its address.
                fill(unsafe { std::slice::from_raw_parts_mut(host.as_ptr(), len) });
            }
            None => {
                let mut bytes = vec![0; len];
                fill(&mut bytes);
                self.gpu.write(&buffer, 0, &bytes)?;
            }
        }
        Ok(buffer)
    }
}
