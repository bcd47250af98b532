//! NVIDIA GPUs: the kernels of `metal_kernels`, compiled for them when they are first used.
//!
//! Building the program needs nothing of CUDA's, and starting it only the driver and, until its kernels are in the
//! cache, the run-time compiler.

mod driver;
mod launcher;
mod memory;
mod messages;
mod nvrtc;
mod pipelines;
mod repeated;
mod source;
#[cfg(test)]
mod tests;

pub use messages::compile_messages;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::result::{self, event};
use cudarc::driver::sys::{self, CUevent, CUevent_flags};

use super::{ChipClass, Constant, Gpu, GpuBuffer, Launch, Library, Pipeline, Placement, Ticket};
use crate::weights::SharedBytes;
use crate::{Error, Result};
use driver::{Device, Doing, size};
use memory::{DeviceMemory, End, HostMemory};
use nvrtc::Nvrtc;
use pipelines::Pipelines;
use repeated::Call;

/// Most bytes behind buffer(0), and most buffers: what [`MAX_ARGUMENT_WORDS`] is for.
const MAX_ARGUMENT_BYTES: usize = 512;
const MAX_BUFFERS: usize = 30;

/// Bytes of the copy that shows the bandwidth of the memory: several times what a GPU's cache holds, and little enough to
/// be left beside a model.
const COPY_BYTES: usize = 256 << 20;

/// Copies that are timed as one, and how often; the fastest counts, because anything else can only make one slower.
const COPIES_PER_PASS: usize = 8;
const NUM_COPY_PASSES: usize = 5;

/// Bytes of the host that pieces are read to, before they go where they belong: copies to other memory wait for each other.
const STAGING_BYTES: usize = 8 << 20;

/// What a kernel is launched with, at most: the bytes of its arguments, padded to words, and the addresses of its buffers,
/// as in `msl/entry_cuda.hpp`.
const MAX_ARGUMENT_WORDS: usize = MAX_ARGUMENT_BYTES / 8 + MAX_BUFFERS;

/// An NVIDIA GPU.
#[derive(Debug)]
pub struct CudaGpu {
    device: Arc<Device>,
    pipelines: Pipelines,
    commits: Mutex<Commits>,
    /// Made when it is first needed.
    staging: Mutex<Option<HostMemory>>,
}

/// What can be waited for.
#[derive(Debug, Default)]
struct Commits {
    last: u64,
    /// The newest ones, in their order; whoever waits for an older one waits for the first of these.
    pending: VecDeque<(u64, CUevent)>,
    /// Events to be used again.
    free: Vec<CUevent>,
}

// SAFETY: handles of the driver may be used in any thread.
unsafe impl Send for Commits {}

impl CudaGpu {
    /// The GPU with this number, as the driver counts them. Compiled kernels are kept in the folder `cache`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] with the way out if there is no such GPU, or something that it takes.
    pub fn open(ordinal: usize, cache: Option<&Path>) -> Result<Self> {
        let device = Device::open(ordinal)?;
        let compiler = Nvrtc::load()?;
        let pipelines = Pipelines::new(&device, compiler, cache);
        Ok(Self { device, pipelines, commits: Mutex::default(), staging: Mutex::default() })
    }

    /// Whether this machine has a driver that does not say that it finds no GPU. What else it takes may be missing.
    #[must_use]
    pub fn is_present() -> bool {
        driver::is_present()
    }

    /// Seconds that the GPU takes for what `work` queues.
    ///
    /// # Errors
    /// Those of `work` and of the device.
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.device.enter_behind_launches()?;
        let doing = "timing the GPU";
        let new_event = || event::create(CUevent_flags::CU_EVENT_DEFAULT).doing(doing);
        let (start, end) = (new_event()?, new_event()?);
        self.device.finish()?;
        // SAFETY: the events were just made and are destroyed when both have passed; the queue lives on.
        unsafe {
            event::record(start, self.device.queue).doing(doing)?;
            work()?;
            self.device.enter_behind_launches()?;
            event::record(end, self.device.queue).doing(doing)?;
            event::synchronize(end).doing(doing)?;
            let milliseconds = event::elapsed(start, end).doing(doing)?;
            event::destroy(start).doing(doing)?;
            event::destroy(end).doing(doing)?;
            Ok(f64::from(milliseconds) / 1e3)
        }
    }

    /// Queues a copy of the whole of one buffer to another.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the other is smaller.
    fn copy(&self, source: &GpuBuffer, target: &GpuBuffer) -> Result<()> {
        self.device.enter_behind_launches()?;
        let len = source.len();
        let (from, to) = (DeviceMemory::of(source)?.range(0, len)?, DeviceMemory::of(target)?.range(0, len)?);
        // SAFETY: both ranges are inside their buffers.
        unsafe { result::memcpy_dtod_async(to, from, len, self.device.queue) }.doing("copying on the GPU")
    }

    /// Reads pieces that fit into `staging` together.
    fn read_by_way_of(
        &self,
        staging: &mut HostMemory,
        pieces: &mut [(&GpuBuffer, usize, &mut [u8])],
    ) -> Result<()> {
        let doing = "reading from the GPU";
        let total = pieces.iter().map(|(_, _, bytes)| bytes.len()).sum();
        // SAFETY: all of it is initialised, and nobody else uses it as long as this borrows it.
        let mut bytes = unsafe { std::slice::from_raw_parts_mut(staging.range(0, total)?.as_ptr(), total) };
        self.device.enter()?;
        let mut queued = Ok(());
        for (source, offset, target) in &*pieces {
            let (own, others) = bytes.split_at_mut(target.len());
            bytes = others;
            let from = DeviceMemory::of(source).and_then(|memory| memory.range(*offset, own.len()));
            queued = from.and_then(|from| {
                // SAFETY: the range is inside the buffer. The staging memory lives on, and is not touched before the copy
                // is waited for, whatever fails.
                unsafe { result::memcpy_dtoh_async(own, from, self.device.reading) }.doing(doing)
            });
            if queued.is_err() {
                break;
            }
        }
        // SAFETY: the queue lives on.
        unsafe { result::stream::synchronize(self.device.reading) }.doing(doing)?;
        queued?;
        // SAFETY: as above, and the copies are done.
        let mut bytes = unsafe { std::slice::from_raw_parts(staging.range(0, total)?.as_ptr(), total) };
        for (_, _, target) in pieces {
            let (own, others) = bytes.split_at(target.len());
            target.copy_from_slice(own);
            bytes = others;
        }
        Ok(())
    }

    fn commits(&self) -> MutexGuard<'_, Commits> {
        self.commits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Gpu for CudaGpu {
    fn kind(&self) -> &'static str {
        "cuda"
    }

    fn name(&self) -> &str {
        &self.device.name
    }

    fn class(&self) -> ChipClass {
        ChipClass::Nvidia
    }

    fn working_set_bytes(&self) -> u64 {
        self.device.free_memory().unwrap_or(0)
    }

    fn measure_copy_bandwidth(&self) -> Result<Option<f64>> {
        let (source, target) =
            (self.allocate(COPY_BYTES, Placement::Private)?, self.allocate(COPY_BYTES, Placement::Private)?);
        let pass = || (0..COPIES_PER_PASS).try_for_each(|_| self.copy(&source, &target));
        // The first one wakes the GPU up.
        pass()?;
        let mut fastest = f64::INFINITY;
        for _ in 0..NUM_COPY_PASSES {
            fastest = fastest.min(self.time(pass)?);
        }
        Ok(Some((2 * COPIES_PER_PASS * COPY_BYTES) as f64 / fastest))
    }

    fn num_cores(&self) -> usize {
        self.device.num_cores
    }

    fn threadgroup_memory(&self) -> usize {
        self.device.threadgroup_memory
    }

    /// No screen waits for it.
    fn patience(&self) -> Duration {
        Duration::from_secs(3600)
    }

    fn allocate(&self, len: usize, _placement: Placement) -> Result<GpuBuffer> {
        // Memory that both see would be on the host's side of the bus.
        Ok(GpuBuffer(Box::new(DeviceMemory::allocate(&self.device, len)?)))
    }

    fn allocate_host(&self, len: usize) -> Result<GpuBuffer> {
        Ok(GpuBuffer(Box::new(HostMemory::allocate(&self.device, len)?)))
    }

    fn wrap(&self, _bytes: &SharedBytes) -> Result<Option<(GpuBuffer, usize)>> {
        Ok(None)
    }

    fn pipeline(
        &self,
        library: &'static Library,
        function: &str,
        constants: &[Constant],
    ) -> Result<Pipeline> {
        self.pipelines.get(library, function, constants)
    }

    fn dispatch(&self, launch: &Launch<'_>) -> Result<()> {
        let kernel = self.pipelines.loaded(launch.pipeline)?;
        let Launch { args, buffers, threadgroup_memory, grid, num_threads, .. } = *launch;
        launch.check(&kernel.name, launch.pipeline.limits)?;
        if args.len() > MAX_ARGUMENT_BYTES {
            return Err(Error::internal(format!("{}: {} bytes of arguments", kernel.name, args.len())));
        }
        let mut words = [0; MAX_ARGUMENT_WORDS];
        bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..args.len()].copy_from_slice(args);
        let num_words = args.len().div_ceil(8);
        for (at, binding) in words[num_words..].iter_mut().zip(buffers) {
            *at = DeviceMemory::of(binding.buffer)?.range(binding.offset, 1)?;
        }
        let call = Call {
            function: kernel.function,
            grid: grid.map(size),
            num_threads: size(num_threads),
            memory: size(threadgroup_memory),
        };
        self.device.enter()?;
        let arguments = &words[..num_words + buffers.len()];
        self.device
            .launches()
            .push(&self.device, call, arguments)
            .map_err(|error| error.context(&kernel.name))
    }

    fn write(&self, target: &GpuBuffer, offset: usize, bytes: &[u8]) -> Result<()> {
        let at = DeviceMemory::of(target)?.range(offset, bytes.len())?;
        self.device.enter_behind_launches()?;
        // SAFETY: the range is inside the buffer; from memory of this kind, the driver has read it when it returns.
        unsafe { result::memcpy_htod_async(at, bytes, self.device.queue) }.doing("writing to the GPU")
    }

    fn read(&self, source: &GpuBuffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.device.enter_behind_launches()?;
        self.device.finish()?;
        self.read_finished(source, offset, bytes)
    }

    fn read_finished(&self, source: &GpuBuffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let at = DeviceMemory::of(source)?.range(offset, bytes.len())?;
        self.device.enter()?;
        let doing = "reading from the GPU";
        // SAFETY: the range is inside the buffer, and the memory it is copied to is there until the copy is done.
        unsafe {
            result::memcpy_dtoh_async(bytes, at, self.device.reading).doing(doing)?;
            result::stream::synchronize(self.device.reading).doing(doing)
        }
    }

    fn read_finished_pieces(&self, pieces: &mut [(&GpuBuffer, usize, &mut [u8])]) -> Result<()> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let staging = match &mut *staging {
            Some(staging) => staging,
            empty => match HostMemory::allocate(&self.device, STAGING_BYTES) {
                Ok(memory) => empty.insert(memory),
                // Where the system gives no such memory, one copy waits for the other.
                Err(_) => {
                    return pieces
                        .iter_mut()
                        .try_for_each(|(source, offset, bytes)| self.read_finished(source, *offset, bytes));
                }
            },
        };
        let mut rest = pieces;
        while !rest.is_empty() {
            let mut len = 0;
            let fits = |(_, _, bytes): &&(&GpuBuffer, usize, &mut [u8])| {
                len += bytes.len();
                len <= STAGING_BYTES
            };
            let num_pieces = rest.iter().take_while(fits).count();
            let (own, others) = rest.split_at_mut(num_pieces.max(1));
            rest = others;
            match own {
                [(source, offset, bytes)] => self.read_finished(source, *offset, bytes)?,
                own => self.read_by_way_of(staging, own)?,
            }
        }
        Ok(())
    }

    fn copy(&self, source: (&GpuBuffer, usize), target: (&GpuBuffer, usize), len: usize) -> Result<()> {
        let ends = (End::of(source, len)?, End::of(target, len)?);
        self.device.enter_behind_launches()?;
        let (queue, doing) = (self.device.queue, "copying on the GPU");
        // SAFETY: both ranges are inside their buffers, which are freed behind all that is queued. Nobody on the host reads
        // or writes memory of the host that is copied like this.
        let copied = unsafe {
            match ends {
                (End::Device(from), End::Device(to)) => result::memcpy_dtod_async(to, from, len, queue),
                (End::Host(from), End::Device(to)) => {
                    sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), len, queue).result()
                }
                (End::Device(from), End::Host(to)) => {
                    sys::cuMemcpyDtoHAsync_v2(to.as_ptr().cast(), from, len, queue).result()
                }
                (End::Host(_), End::Host(_)) => {
                    return Err(Error::internal("a copy from the host to itself"));
                }
            }
        };
        copied.doing(doing)
    }

    fn commit(&self) -> Result<Ticket> {
        self.device.enter()?;
        self.device.launches().commit(&self.device)?;
        let mut commits = self.commits();
        let event = match commits.free.pop() {
            Some(event) => event,
            None => event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).doing("an event of the GPU")?,
        };
        // SAFETY: the event is nobody else's, and the queue lives on.
        unsafe { event::record(event, self.device.queue) }.doing("an event of the GPU")?;
        commits.last += 1;
        let ticket = commits.last;
        commits.pending.push_back((ticket, event));
        Ok(Ticket(ticket))
    }

    fn wait(&self, ticket: Ticket) -> Result<()> {
        self.device.enter()?;
        // One thread has the queue, so that nobody is held up by the lock.
        let mut commits = self.commits();
        while let Some(&(number, event)) = commits.pending.front()
            && number <= ticket.0
        {
            // SAFETY: the event was recorded, and is not used for anything else until it is taken from the list.
            unsafe { event::synchronize(event) }.doing("the GPU's work")?;
            commits.pending.pop_front();
            commits.free.push(event);
        }
        Ok(())
    }
}
