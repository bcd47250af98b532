//! The device that ops run on, and the count of what was run.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use candle_core::Device;

use crate::ops::cpu::pool::ThreadPool;
use crate::ops::cpu::simd::CpuLevel;
use crate::{Error, Result};

/// A device with what its kernels need. Every op starts with `launch`, the one place where
/// dispatches are counted.
#[derive(Debug)]
pub struct Context {
    device: Device,
    cpu: CpuBackend,
    num_dispatches: AtomicU64,
}

/// What CPU kernels need.
#[derive(Debug)]
pub struct CpuBackend {
    /// The threads.
    pub pool: ThreadPool,
    /// The instruction set.
    pub level: CpuLevel,
}

/// The implementation that an op has to take.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Backend<'a> {
    Cpu(&'a CpuBackend),
}

impl Context {
    /// The CPU, with `num_threads` threads and kernels for `level`.
    #[must_use]
    pub fn cpu(num_threads: usize, level: CpuLevel) -> Self {
        Self::cpu_with(ThreadPool::new(num_threads), level)
    }

    /// The CPU, with these threads and kernels for `level`.
    #[must_use]
    pub fn cpu_with(pool: ThreadPool, level: CpuLevel) -> Self {
        Self { device: Device::Cpu, cpu: CpuBackend { pool, level }, num_dispatches: AtomicU64::new(0) }
    }

    /// A GPU.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`]: its kernels are not there yet.
    pub fn gpu(gpu: std::sync::Arc<dyn crate::ops::metal::Gpu>) -> Result<Self> {
        let error = Error::unsupported(format!("{} has no kernels yet", gpu.name()));
        drop(gpu);
        Err(error.with_hint("use --device cpu"))
    }

    /// Where buffers are allocated.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Threads of the CPU's kernels.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        self.cpu.pool.num_threads()
    }

    /// Instruction set of the CPU's kernels.
    #[must_use]
    pub fn cpu_level(&self) -> CpuLevel {
        self.cpu.level
    }

    /// Dispatches since the start.
    #[must_use]
    pub fn num_dispatches(&self) -> u64 {
        self.num_dispatches.load(Ordering::Relaxed)
    }

    /// Time spent in kernels since the start. The rest of a step is the host's: scheduling, sampling,
    /// and the way from one kernel to the next.
    #[must_use]
    pub fn kernel_time(&self) -> Duration {
        self.cpu.pool.busy_time()
    }

    /// Counts a dispatch of `op` and says how it has to be done.
    pub(crate) fn launch(&self, op: &'static str) -> Result<Backend<'_>> {
        self.num_dispatches.fetch_add(1, Ordering::Relaxed);
        self.backend(op)
    }

    /// How `op` has to be done, for what is no part of a step.
    pub(crate) fn backend(&self, op: &'static str) -> Result<Backend<'_>> {
        match &self.device {
            Device::Cpu => Ok(Backend::Cpu(&self.cpu)),
            other => Err(Error::unsupported(format!("{op} has no kernel for {:?}", other.location()))),
        }
    }
}
