//! The device that ops run on, and a count of dispatches.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::Result;
use crate::config::Shard;
use crate::ops::cpu::CpuBackend;
use crate::ops::cpu::pool::ThreadPool;
use crate::ops::cpu::simd::CpuLevel;
use crate::ops::gpu::{Gpu, GpuBackend, Tuning};
use crate::ops::reference::ReferenceBackend;
use crate::ops::sum_over_ranks::Communicator;
use crate::weights::{DType, FileType};

/// A device with the resources of its kernels. Every op starts with `launch`, which returns the device.
#[derive(Debug)]
pub struct Context {
    device: DeviceBackend,
    num_dispatches: AtomicU64,
    /// The part of models that is computed here.
    shard: Shard,
    /// None on a single rank.
    communicator: Option<Arc<dyn Communicator>>,
}

#[derive(Debug)]
enum DeviceBackend {
    Cpu(CpuBackend),
    Gpu(Arc<GpuBackend>),
    Reference(ReferenceBackend),
}

/// The implementations that ops dispatch to.
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
        Self::whole(DeviceBackend::Cpu(CpuBackend { pool, level }))
    }

    /// A GPU. The host repacks weights for it, with all threads that the system allows.
    #[must_use]
    pub fn gpu(gpu: Arc<dyn Gpu>) -> Self {
        let tuning = Tuning::of(gpu.class());
        Self::gpu_with(gpu, tuning)
    }

    fn gpu_with(gpu: Arc<dyn Gpu>, tuning: Tuning) -> Self {
        let pool = ThreadPool::new(ThreadPool::default_num_threads());
        Self::whole(DeviceBackend::Gpu(Arc::new(GpuBackend::new(gpu, tuning, pool))))
    }

    /// The same GPU with other variants of some kernels, and their names: `self-test` checks and measures them, to find
    /// the faster variant. Other devices have one variant only.
    #[must_use]
    pub fn alternatives(&self) -> Vec<(&'static str, Self)> {
        let DeviceBackend::Gpu(gpu) = &self.device else { return Vec::new() };
        let alternatives = gpu.tuning().alternatives().into_iter();
        alternatives
            .map(|(variant, tuning)| (variant, Self::gpu_with(Arc::clone(gpu.device()), tuning)))
            .collect()
    }

    /// candle's own device: every op by its definition, regardless of speed.
    #[must_use]
    pub fn reference(backend: ReferenceBackend) -> Self {
        Self::whole(DeviceBackend::Reference(backend))
    }

    fn whole(device: DeviceBackend) -> Self {
        Self { device, num_dispatches: AtomicU64::new(0), shard: Shard::WHOLE, communicator: None }
    }

    /// The same device as one of several ranks, which have the other parts of models and add up results with
    /// `communicator`.
    #[must_use]
    pub fn of_rank(self, shard: Shard, communicator: Arc<dyn Communicator>) -> Self {
        Self { shard, communicator: Some(communicator), ..self }
    }

    /// The part of models that is computed here.
    #[must_use]
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// The connection to the other ranks, if there are any and something is computed.
    pub(crate) fn communicator(&self) -> Option<&dyn Communicator> {
        self.communicator.as_deref()
    }

    /// The same device for a dry run: ops request their kernels, but nothing is compiled and nothing is computed.
    /// None if the device has no kernels to compile.
    pub(crate) fn dry_run(&self) -> Option<Self> {
        match &self.device {
            DeviceBackend::Cpu(_) | DeviceBackend::Reference(_) => None,
            DeviceBackend::Gpu(gpu) => {
                Some(Self { shard: self.shard, ..Self::whole(DeviceBackend::Gpu(Arc::new(gpu.dry_run()))) })
            }
        }
    }

    /// The type of a file's weights on this device: an exact one, and the file's own if there are kernels for it.
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

    /// Whether this device reads no weights (a dry run).
    pub(crate) fn is_dry_run(&self) -> bool {
        matches!(&self.device, DeviceBackend::Gpu(gpu) if gpu.is_dry_run())
    }

    /// Compiles the kernels of a dry run on several threads. Calls `on_progress` with the number of compiled kernels
    /// and of all, from any of the threads; it returns whether to continue.
    ///
    /// # Errors
    /// The error of the device's compiler.
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

    /// The name of the device: the GPU's, or the CPU's instruction set and threads.
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

    /// Whether candle computes.
    #[must_use]
    pub fn is_reference(&self) -> bool {
        matches!(self.device, DeviceBackend::Reference(_))
    }

    /// Whether the project's own GPU kernels compute.
    #[must_use]
    pub fn is_gpu(&self) -> bool {
        matches!(self.device, DeviceBackend::Gpu(_))
    }

    /// Whether matmuls round activations to half precision, for tensor cores.
    pub(crate) fn has_tensor_cores(&self) -> bool {
        matches!(&self.device, DeviceBackend::Gpu(gpu) if gpu.tuning().has_tensor_cores())
    }

    /// The maximum tokens of a step for which a token's results have the same bits as alone, with the matrices loaded
    /// so far.
    #[must_use]
    pub fn max_exact_rows(&self) -> usize {
        match &self.device {
            DeviceBackend::Cpu(_) => usize::MAX,
            DeviceBackend::Gpu(gpu) => gpu.max_exact_rows(),
            // Its matmuls round differently for each size of a batch.
            DeviceBackend::Reference(_) => 1,
        }
    }

    /// Threads of the processor that compute.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        match &self.device {
            DeviceBackend::Cpu(cpu) => cpu.pool.num_threads(),
            DeviceBackend::Gpu(gpu) => gpu.pool().num_threads(),
            DeviceBackend::Reference(reference) => reference.num_threads(),
        }
    }

    /// Instruction set of the CPU's kernels, if the CPU computes.
    #[must_use]
    pub fn cpu_level(&self) -> Option<CpuLevel> {
        match &self.device {
            DeviceBackend::Cpu(cpu) => Some(cpu.level),
            DeviceBackend::Gpu(_) | DeviceBackend::Reference(_) => None,
        }
    }

    /// The resources of the CPU's kernels, if the CPU computes.
    pub(crate) fn cpu_backend(&self) -> Option<&CpuBackend> {
        match &self.device {
            DeviceBackend::Cpu(cpu) => Some(cpu),
            DeviceBackend::Gpu(_) | DeviceBackend::Reference(_) => None,
        }
    }

    /// The GPU, if the project's own kernels compute on one.
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

    /// Time spent in kernels since the start; for a GPU, the time spent waiting for it. The rest of a step is the
    /// host's: scheduling, sampling, and the overhead of launches.
    #[must_use]
    pub fn kernel_time(&self) -> Duration {
        match &self.device {
            DeviceBackend::Cpu(cpu) => cpu.pool.busy_time(),
            DeviceBackend::Gpu(gpu) => gpu.waiting_time(),
            DeviceBackend::Reference(reference) => reference.busy_time(),
        }
    }

    /// Counts a dispatch and returns the device. A GPU counts its kernels itself.
    pub(crate) fn launch(&self) -> Backend<'_> {
        self.num_dispatches.fetch_add(1, Ordering::Relaxed);
        self.backend()
    }

    /// The device, for work outside of a step.
    pub(crate) fn backend(&self) -> Backend<'_> {
        match &self.device {
            DeviceBackend::Cpu(cpu) => Backend::Cpu(cpu),
            DeviceBackend::Gpu(gpu) => Backend::Gpu(gpu),
            DeviceBackend::Reference(reference) => Backend::Reference(reference),
        }
    }
}
