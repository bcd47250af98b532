//! Finds the kernels that ops need by a dry run on a device that computes nothing, and compiles them ahead of time.
//!
//! Only the launch code decides on kernels. A separate list could lack one, which would then be compiled in the middle
//! of a request. So a [`DryRun`] records the kernels that the launch code requests.

use std::any::Any;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::backend::Flags;
use super::kernel::Kernel;
use super::{
    ChipClass, Constant, Gpu, GpuBackend, GpuBuffer, GpuMemory, Launch, Library, Pipeline, PipelineLimits,
    Placement, Ticket,
};
use crate::weights::SharedBytes;
use crate::{Error, Result};

/// Maximum threads that compile. The system's compiler is a process that works for all of them.
const MAX_THREADS: usize = 8;

/// A stand-in for a GPU. Memory has a size only; nothing is compiled, copied or computed.
#[derive(Debug)]
pub(super) struct DryRun {
    gpu: Arc<dyn Gpu>,
}

impl DryRun {
    /// A dry run with the same launches as `gpu`.
    pub(super) fn of(gpu: &Arc<dyn Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu) }
    }
}

#[derive(Debug)]
struct NoMemory {
    len: usize,
}

impl GpuMemory for NoMemory {
    fn len(&self) -> usize {
        self.len
    }

    fn host(&self) -> Option<NonNull<u8>> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Gpu for DryRun {
    fn kind(&self) -> &'static str {
        self.gpu.kind()
    }

    fn name(&self) -> &str {
        self.gpu.name()
    }

    fn class(&self) -> ChipClass {
        self.gpu.class()
    }

    fn working_set_bytes(&self) -> u64 {
        self.gpu.working_set_bytes()
    }

    fn dispatch_budget(&self) -> Duration {
        self.gpu.dispatch_budget()
    }

    fn num_cores(&self) -> usize {
        self.gpu.num_cores()
    }

    fn threadgroup_memory(&self) -> usize {
        self.gpu.threadgroup_memory()
    }

    fn allocate(&self, len: usize, _placement: Placement) -> Result<GpuBuffer> {
        Ok(GpuBuffer(Box::new(NoMemory { len })))
    }

    fn wrap(&self, _bytes: &SharedBytes) -> Result<Option<(GpuBuffer, usize)>> {
        Ok(None)
    }

    fn pipeline(
        &self,
        _library: &'static Library,
        _function: &str,
        _constants: &[Constant],
    ) -> Result<Pipeline> {
        Ok(Pipeline { index: 0, limits: PipelineLimits::APPLE })
    }

    fn dispatch(&self, _launch: &Launch<'_>) -> Result<()> {
        Ok(())
    }

    fn write(&self, _target: &GpuBuffer, _offset: usize, _bytes: &[u8]) -> Result<()> {
        Ok(())
    }

    fn copy(&self, _source: (&GpuBuffer, usize), _target: (&GpuBuffer, usize), _len: usize) -> Result<()> {
        Ok(())
    }

    fn read(&self, _source: &GpuBuffer, _offset: usize, _bytes: &mut [u8]) -> Result<()> {
        Err(Error::internal("a result of a dry run is to be read, and there is none"))
    }

    fn commit(&self) -> Result<Ticket> {
        Ok(Ticket(0))
    }

    fn wait(&self, _ticket: Ticket) -> Result<()> {
        Ok(())
    }
}

impl GpuBackend {
    /// Compiles the kernels that a dry run has used.
    ///
    /// # Errors
    /// As [`Self::compile`].
    pub(crate) fn compile_kernels_of(
        &self,
        dry_run: &Self,
        on_progress: &(dyn Fn(usize, usize) -> bool + Sync),
    ) -> Result<()> {
        self.compile(dry_run.kernels(), on_progress)
    }

    /// Compiles kernels on several threads. Calls `on_progress` with the number of compiled kernels and of all, in
    /// order but from any thread; it returns whether to continue.
    ///
    /// # Errors
    /// The device's first error.
    pub(super) fn compile(
        &self,
        kernels: Vec<(Kernel, Flags)>,
        on_progress: &(dyn Fn(usize, usize) -> bool + Sync),
    ) -> Result<()> {
        let kernels = in_turns(kernels);
        let (next, num_done, failure) = (AtomicUsize::new(0), Mutex::new(0), Mutex::new(None));
        let work = || {
            // An index past the end stops every thread.
            while let Some((kernel, flags)) = kernels.get(next.fetch_add(1, Ordering::Relaxed)) {
                let compiled = self.pipeline(*kernel, *flags);
                // Under the lock, so that calls are in order.
                let mut num_done = num_done.lock().unwrap_or_else(PoisonError::into_inner);
                *num_done += 1;
                let continues = compiled.is_ok() && on_progress(*num_done, kernels.len());
                if let Err(error) = compiled {
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
                if !continues {
                    next.store(kernels.len(), Ordering::Relaxed);
                }
            }
        };
        let num_threads = thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        thread::scope(|scope| {
            for _ in 1..num_threads.min(kernels.len()) {
                scope.spawn(work);
            }
            work();
        });
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

/// A kernel of each library, then the second of each, and so on: on some devices neighbours of a library wait for the same
/// text, which one thread compiles.
fn in_turns(mut kernels: Vec<(Kernel, Flags)>) -> Vec<(Kernel, Flags)> {
    kernels.sort_by_cached_key(|(kernel, flags)| (kernel.function(), *flags));
    let mut num_before: HashMap<&str, usize> = HashMap::new();
    let mut turns: Vec<(usize, (Kernel, Flags))> = Vec::with_capacity(kernels.len());
    for kernel in kernels {
        let turn = num_before.entry(kernel.0.library().name).or_default();
        turns.push((*turn, kernel));
        *turn += 1;
    }
    turns.sort_by_key(|(turn, _)| *turn);
    turns.into_iter().map(|(_, kernel)| kernel).collect()
}
