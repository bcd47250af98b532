//! The device that ops run on, and the count of what was run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::Result;
use crate::ops::cpu::CpuBackend;
use crate::ops::cpu::pool::ThreadPool;
use crate::ops::cpu::simd::CpuLevel;
use crate::ops::gpu::{Gpu, GpuBackend, Tuning};
use crate::ops::reference::ReferenceBackend;
use crate::weights::{DType, FileType};

/// A device with what its kernels need. Every op starts with `launch`, which says how it has to be done.
#[derive(Debug)]
pub struct Context {
    device: DeviceBackend,
    num_dispatches: AtomicU64,
}

#[derive(Debug)]
enum DeviceBackend {
    Cpu(CpuBackend),
    Gpu(Arc<GpuBackend>),
    Reference(ReferenceBackend),
}

/// The implementation that an op has to take.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Backend<'a> {
    Cpu(&'a CpuBackend),
    Gpu(&'a Arc<GpuBackend>),
    Reference(&'a ReferenceBackend),
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
        Self { device: DeviceBackend::Cpu(CpuBackend { pool, level }), num_dispatches: AtomicU64::new(0) }
    }

    /// A GPU. The processor repacks weights for it, with as many threads as the system grants.
    #[must_use]
    pub fn gpu(gpu: Arc<dyn Gpu>) -> Self {
        let tuning = Tuning::of(gpu.class());
        Self::gpu_with(gpu, tuning)
    }

    fn gpu_with(gpu: Arc<dyn Gpu>, tuning: Tuning) -> Self {
        let pool = ThreadPool::new(ThreadPool::default_num_threads());
        Self {
            device: DeviceBackend::Gpu(Arc::new(GpuBackend::new(gpu, tuning, pool))),
            num_dispatches: AtomicU64::new(0),
        }
    }

    /// The same GPU with other forms of some kernels, and what is different about them: what `self-test` checks and
    /// measures, so that the faster form can be told. Other devices have one form of everything.
    #[must_use]
    pub fn alternatives(&self) -> Vec<(&'static str, Self)> {
        let DeviceBackend::Gpu(gpu) = &self.device else { return Vec::new() };
        let alternatives = gpu.tuning().alternatives().into_iter();
        alternatives.map(|(form, tuning)| (form, Self::gpu_with(Arc::clone(gpu.device()), tuning))).collect()
    }

    /// candle's own device: every op as it is defined, and not in a hurry.
    #[must_use]
    pub fn reference(backend: ReferenceBackend) -> Self {
        Self { device: DeviceBackend::Reference(backend), num_dispatches: AtomicU64::new(0) }
    }

    /// The same device for a dry run: ops on it take their kernels, but nothing is compiled and nothing is computed.
    /// None if the device has no kernels to compile.
    pub(crate) fn dry_run(&self) -> Option<Self> {
        match &self.device {
            DeviceBackend::Cpu(_) | DeviceBackend::Reference(_) => None,
            DeviceBackend::Gpu(gpu) => Some(Self {
                device: DeviceBackend::Gpu(Arc::new(gpu.dry_run())),
                num_dispatches: AtomicU64::new(0),
            }),
        }
    }

    /// The type that this device keeps weights of a file as: exact in it, and the same one where there are kernels for it.
    #[must_use]
    pub fn kept_as(&self, file_type: FileType) -> FileType {
        match &self.device {
            DeviceBackend::Cpu(_) | DeviceBackend::Gpu(_) => FileType::Kept(file_type.kept_as()),
            // Weights stay in their file.
            DeviceBackend::Reference(_) => file_type,
        }
    }

    /// The types of weights for which this device has kernels.
    pub fn own_types(&self) -> impl Iterator<Item = DType> {
        DType::ALL.into_iter().filter(|dtype| self.kept_as((*dtype).into()) == FileType::Kept(*dtype))
    }

    /// Whether weights are of no use on this device.
    pub(crate) fn is_dry_run(&self) -> bool {
        matches!(&self.device, DeviceBackend::Gpu(gpu) if gpu.is_dry_run())
    }

    /// Compiles what a dry run has used, on several threads. `on_progress` hears how many of how many kernels are
    /// compiled, from any of them, and says whether to go on.
    ///
    /// # Errors
    /// What the device's compiler says.
    pub(crate) fn compile(
        &self,
        dry_run: &Self,
        on_progress: &(dyn Fn(usize, usize) -> bool + Sync),
    ) -> Result<()> {
        match (&self.device, &dry_run.device) {
            (DeviceBackend::Gpu(gpu), DeviceBackend::Gpu(dry_run)) => {
                gpu.compile_kernels_of(dry_run, on_progress)
            }
            _ => Ok(()),
        }
    }

    /// What computes: the GPU's name, or the CPU's instruction set and threads.
    #[must_use]
    pub fn description(&self) -> String {
        match &self.device {
            DeviceBackend::Cpu(cpu) => {
                let num_threads = cpu.pool.num_threads();
                let threads = if num_threads == 1 { "thread" } else { "threads" };
                format!("cpu ({}, {num_threads} {threads})", cpu.level.name())
            }
            DeviceBackend::Gpu(gpu) => format!("{} ({})", gpu.device().kind(), gpu.device().name()),
            DeviceBackend::Reference(reference) => reference.description(),
        }
    }

    /// Whether it is candle that computes.
    #[must_use]
    pub fn is_reference(&self) -> bool {
        matches!(self.device, DeviceBackend::Reference(_))
    }

    /// Whether it is our own kernels for GPUs that compute.
    #[must_use]
    pub fn is_gpu(&self) -> bool {
        matches!(self.device, DeviceBackend::Gpu(_))
    }

    /// Whether products round activations to half precision, for tensor cores.
    pub(crate) fn has_tensor_cores(&self) -> bool {
        matches!(&self.device, DeviceBackend::Gpu(gpu) if gpu.tuning().has_tensor_cores())
    }

    /// The most tokens of a step in which the results of a token have the same bits as alone, with the matrices loaded so far.
    #[must_use]
    pub fn max_exact_rows(&self) -> usize {
        match &self.device {
            DeviceBackend::Cpu(_) => usize::MAX,
            DeviceBackend::Gpu(gpu) => gpu.max_exact_rows(),
            // Its products round differently for each size of a batch.
            DeviceBackend::Reference(_) => 1,
        }
    }

    /// Threads of the processor that take part.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        match &self.device {
            DeviceBackend::Cpu(cpu) => cpu.pool.num_threads(),
            DeviceBackend::Gpu(gpu) => gpu.pool().num_threads(),
            DeviceBackend::Reference(reference) => reference.num_threads(),
        }
    }

    /// Instruction set of the CPU's kernels, if it is they that compute.
    #[must_use]
    pub fn cpu_level(&self) -> Option<CpuLevel> {
        match &self.device {
            DeviceBackend::Cpu(cpu) => Some(cpu.level),
            DeviceBackend::Gpu(_) | DeviceBackend::Reference(_) => None,
        }
    }

    /// What the CPU's kernels need, if it is they that compute.
    pub(crate) fn cpu_backend(&self) -> Option<&CpuBackend> {
        match &self.device {
            DeviceBackend::Cpu(cpu) => Some(cpu),
            DeviceBackend::Gpu(_) | DeviceBackend::Reference(_) => None,
        }
    }

    /// The GPU, if our own kernels compute on one.
    pub(crate) fn gpu_backend(&self) -> Option<&Arc<GpuBackend>> {
        match &self.device {
            DeviceBackend::Gpu(gpu) => Some(gpu),
            DeviceBackend::Cpu(_) | DeviceBackend::Reference(_) => None,
        }
    }

    /// Dispatches since the start: kernels on a GPU, elsewhere ops.
    #[must_use]
    pub fn num_dispatches(&self) -> u64 {
        match &self.device {
            DeviceBackend::Cpu(_) | DeviceBackend::Reference(_) => {
                self.num_dispatches.load(Ordering::Relaxed)
            }
            DeviceBackend::Gpu(gpu) => gpu.num_dispatches(),
        }
    }

    /// Time spent in kernels since the start; of a GPU, the time spent waiting for it. The rest of a step is the
    /// host's: scheduling, sampling, and the way from one kernel to the next.
    #[must_use]
    pub fn kernel_time(&self) -> Duration {
        match &self.device {
            DeviceBackend::Cpu(cpu) => cpu.pool.busy_time(),
            DeviceBackend::Gpu(gpu) => gpu.waiting_time(),
            DeviceBackend::Reference(reference) => reference.busy_time(),
        }
    }

    /// Counts a dispatch and says how it has to be done. A GPU counts its kernels itself.
    pub(crate) fn launch(&self) -> Backend<'_> {
        self.num_dispatches.fetch_add(1, Ordering::Relaxed);
        self.backend()
    }

    /// The device, for what is no part of a step.
    pub(crate) fn backend(&self) -> Backend<'_> {
        match &self.device {
            DeviceBackend::Cpu(cpu) => Backend::Cpu(cpu),
            DeviceBackend::Gpu(gpu) => Backend::Gpu(gpu),
            DeviceBackend::Reference(reference) => Backend::Reference(reference),
        }
    }
}
