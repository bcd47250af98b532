//! NVIDIA GPUs: the kernels of `metal_kernels`, compiled for them when they are first used.
//!
//! Building the program needs nothing of CUDA. Starting it needs the driver and, until its kernels are cached, the
//! run-time compiler.

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
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::result::{self, event};
use cudarc::driver::sys::{self, CUevent, CUevent_flags};

use super::{ChipClass, Constant, Gpu, GpuBuffer, Launch, Library, Pipeline, Placement, Ticket};
use crate::weights::SharedBytes;
use crate::{Error, Result};
use driver::{Device, Doing, size};
use memory::{DeviceMemory, End, HostMemory, Strided};
use nvrtc::Nvrtc;
use pipelines::Pipelines;
use repeated::Call;

/// Maximum bytes of buffer(0), and maximum buffers: [`MAX_ARGUMENT_WORDS`] is their sum.
const MAX_ARGUMENT_BYTES: usize = 512;
const MAX_BUFFERS: usize = 30;

/// Bytes of the copy that measures the memory's bandwidth: several times a GPU's cache, and small enough to fit next to
/// a loaded model.
const COPY_BYTES: usize = 256 << 20;

/// Copies that are timed together, and the number of runs; the fastest counts, because other work can only make one
/// slower.
const COPIES_PER_PASS: usize = 8;
const NUM_COPY_PASSES: usize = 5;

/// Bytes of pinned memory that ranges are read to before they are copied to their targets: copies to unpinned memory
/// wait for each other.
const STAGING_BYTES: usize = 8 << 20;

/// Maximum words of a launch: the bytes of its arguments, padded to words, and the addresses of its buffers, as in
/// `msl/entry_cuda.hpp`.
const MAX_ARGUMENT_WORDS: usize = MAX_ARGUMENT_BYTES / 8 + MAX_BUFFERS;

/// The direction of a copy.
#[derive(Debug, Clone, Copy)]
enum Direction {
    ToHost,
    ToDevice,
}

/// An NVIDIA GPU.
#[derive(Debug)]
pub struct CudaGpu {
    device: Arc<Device>,
    pipelines: Pipelines,
    commits: Mutex<Commits>,
    /// Allocated on first use.
    staging: Mutex<Option<HostMemory>>,
}

/// Commits to wait for.
#[derive(Debug, Default)]
struct Commits {
    last: u64,
    /// The latest ones, in order; a wait for an older one waits for the first of these.
    pending: VecDeque<(u64, CUevent)>,
    /// Events for reuse.
    free: Vec<CUevent>,
}

// SAFETY: handles of the driver may be used in any thread.
unsafe impl Send for Commits {}

impl CudaGpu {
    /// The GPU with this number, as the driver counts them. Compiled kernels are kept in the folder `cache`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] with the way out if there is no such GPU, or if it or the software for it is
    /// unsuitable.
    pub fn open(ordinal: usize, cache: Option<&Path>) -> Result<Self> {
        let device = Device::open(ordinal)?;
        let compiler = Nvrtc::load()?;
        let pipelines = Pipelines::new(&device, compiler, cache);
        Ok(Self { device, pipelines, commits: Mutex::default(), staging: Mutex::default() })
    }

    /// Whether this machine has a driver that does not report that it finds no GPU. Other requirements may be missing.
    #[must_use]
    pub fn is_present() -> bool {
        driver::is_present()
    }

    /// The seconds of GPU time for the work that `work` queues.
    ///
    /// # Errors
    /// Those of `work` and of the device.
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.device.enter_after_launches()?;
        let doing = "timing the GPU";
        let new_event = || event::create(CUevent_flags::CU_EVENT_DEFAULT).doing(doing);
        let (start, end) = (new_event()?, new_event()?);
        self.device.finish()?;
        // SAFETY: the events were just made and are destroyed after both have passed; the queue lives on.
        unsafe {
            event::record(start, self.device.queue).doing(doing)?;
            work()?;
            self.device.enter_after_launches()?;
            event::record(end, self.device.queue).doing(doing)?;
            event::synchronize(end).doing(doing)?;
            let milliseconds = event::elapsed(start, end).doing(doing)?;
            event::destroy(start).doing(doing)?;
            event::destroy(end).doing(doing)?;
            Ok(f64::from(milliseconds) / 1e3)
        }
    }

    /// Copies `len` bytes at `offset` of each buffer to or from consecutive bytes of another one. If the buffers are at
    /// an even pitch, a copy with the host is one call: each call takes the driver microseconds, and a block of a
    /// model's cache is in dozens of buffers.
    fn copy_strided(
        &self,
        direction: Direction,
        buffers: &[&GpuBuffer],
        offset: usize,
        (other, start): (&GpuBuffer, usize),
        len: usize,
    ) -> Result<()> {
        let end = End::of((other, start), buffers.len() * len)?;
        if let (End::Host(host), Some(strided)) = (end, Strided::of(buffers, offset, len)?) {
            return self.copy_2d(direction, &strided, host, [len, buffers.len()]);
        }
        for (index, buffer) in buffers.iter().enumerate() {
            let (own, other) = ((*buffer, offset), (other, start + index * len));
            match direction {
                Direction::ToHost => Gpu::copy(self, own, other, len)?,
                Direction::ToDevice => Gpu::copy(self, other, own, len)?,
            }
        }
        Ok(())
    }

    /// One copy of `count` rows of `len` bytes, which are contiguous on the host.
    fn copy_2d(
        &self,
        direction: Direction,
        strided: &Strided,
        host: NonNull<u8>,
        [len, count]: [usize; 2],
    ) -> Result<()> {
        self.device.enter_after_launches()?;
        let mut copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: host.as_ptr().cast(),
            srcDevice: strided.at,
            srcArray: std::ptr::null_mut(),
            srcPitch: strided.pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            dstHost: host.as_ptr().cast(),
            dstDevice: strided.at,
            dstArray: std::ptr::null_mut(),
            dstPitch: len,
            WidthInBytes: len,
            Height: count,
        };
        if let Direction::ToDevice = direction {
            std::mem::swap(&mut copy.srcMemoryType, &mut copy.dstMemoryType);
            std::mem::swap(&mut copy.srcPitch, &mut copy.dstPitch);
        }
        // SAFETY: the bytes of all buffers and of the host were checked, and are freed after all queued work. No code
        // on the host reads or writes host memory that is copied like this.
        unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.device.queue) }
            .result()
            .doing("copying on the GPU")
    }

    /// Reads ranges that fit into `staging` together.
    fn read_through(
        &self,
        staging: &mut HostMemory,
        ranges: &mut [(&GpuBuffer, usize, &mut [u8])],
    ) -> Result<()> {
        let doing = "reading from the GPU";
        let total = ranges.iter().map(|(_, _, bytes)| bytes.len()).sum();
        // SAFETY: all of it is initialised, and no other code uses it while it is borrowed.
        let mut bytes = unsafe { std::slice::from_raw_parts_mut(staging.range(0, total)?.as_ptr(), total) };
        self.device.enter()?;
        let mut queued = Ok(());
        for (source, offset, target) in &*ranges {
            let (own, others) = bytes.split_at_mut(target.len());
            bytes = others;
            let from = DeviceMemory::of(source).and_then(|memory| memory.range(*offset, own.len()));
            queued = from.and_then(|from| {
                // SAFETY: the range is inside the buffer. The staging memory lives on, and is not accessed before the
                // copy is waited for, also after an error.
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
        for (_, _, target) in ranges {
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
        let pass =
            || (0..COPIES_PER_PASS).try_for_each(|_| self.copy((&source, 0), (&target, 0), COPY_BYTES));
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
    fn dispatch_budget(&self) -> Duration {
        Duration::from_secs(3600)
    }

    fn allocate(&self, len: usize, _placement: Placement) -> Result<GpuBuffer> {
        // Memory that both can access would be on the host's side of the bus.
        let memory = DeviceMemory::allocate(&self.device, len, 1)?.pop();
        let memory = memory.ok_or_else(|| Error::internal("memory was allocated for no buffer"))?;
        Ok(GpuBuffer(Box::new(memory)))
    }

    fn allocate_several(&self, len: usize, count: usize, _placement: Placement) -> Result<Vec<GpuBuffer>> {
        let buffers = DeviceMemory::allocate(&self.device, len, count)?;
        Ok(buffers.into_iter().map(|memory| GpuBuffer(Box::new(memory))).collect())
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
        self.device.enter_after_launches()?;
        // SAFETY: the range is inside the buffer; the driver has read unpinned memory when it returns.
        unsafe { result::memcpy_htod_async(at, bytes, self.device.queue) }.doing("writing to the GPU")
    }

    fn read(&self, source: &GpuBuffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.device.enter_after_launches()?;
        self.device.finish()?;
        self.read_finished(source, offset, bytes)
    }

    fn read_finished(&self, source: &GpuBuffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let at = DeviceMemory::of(source)?.range(offset, bytes.len())?;
        self.device.enter()?;
        let doing = "reading from the GPU";
        // SAFETY: the range is inside the buffer, and the target's memory exists until the copy is done.
        unsafe {
            result::memcpy_dtoh_async(bytes, at, self.device.reading).doing(doing)?;
            result::stream::synchronize(self.device.reading).doing(doing)
        }
    }

    fn read_finished_ranges(&self, ranges: &mut [(&GpuBuffer, usize, &mut [u8])]) -> Result<()> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let staging = match &mut *staging {
            Some(staging) => staging,
            empty => match HostMemory::allocate(&self.device, STAGING_BYTES) {
                Ok(memory) => empty.insert(memory),
                // If the system provides no pinned memory, one copy waits for the other.
                Err(_) => {
                    return ranges
                        .iter_mut()
                        .try_for_each(|(source, offset, bytes)| self.read_finished(source, *offset, bytes));
                }
            },
        };
        let mut rest = ranges;
        while !rest.is_empty() {
            let mut len = 0;
            let fits = |(_, _, bytes): &&(&GpuBuffer, usize, &mut [u8])| {
                len += bytes.len();
                len <= STAGING_BYTES
            };
            let num_ranges = rest.iter().take_while(fits).count();
            let (own, others) = rest.split_at_mut(num_ranges.max(1));
            rest = others;
            match own {
                [(source, offset, bytes)] => self.read_finished(source, *offset, bytes)?,
                own => self.read_through(staging, own)?,
            }
        }
        Ok(())
    }

    fn copy(&self, source: (&GpuBuffer, usize), target: (&GpuBuffer, usize), len: usize) -> Result<()> {
        let ends = (End::of(source, len)?, End::of(target, len)?);
        self.device.enter_after_launches()?;
        let (queue, doing) = (self.device.queue, "copying on the GPU");
        // SAFETY: both ranges are inside their buffers, which are freed after all queued work. No code on the host
        // reads or writes host memory that is copied like this.
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

    fn gather(
        &self,
        sources: &[&GpuBuffer],
        offset: usize,
        (target, start): (&GpuBuffer, usize),
        len: usize,
    ) -> Result<()> {
        self.copy_strided(Direction::ToHost, sources, offset, (target, start), len)
    }

    fn scatter(
        &self,
        (source, start): (&GpuBuffer, usize),
        targets: &[&GpuBuffer],
        offset: usize,
        len: usize,
    ) -> Result<()> {
        self.copy_strided(Direction::ToDevice, targets, offset, (source, start), len)
    }

    fn commit(&self) -> Result<Ticket> {
        self.device.enter()?;
        self.device.launches().commit(&self.device)?;
        let mut commits = self.commits();
        let event = match commits.free.pop() {
            Some(event) => event,
            None => event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).doing("an event of the GPU")?,
        };
        // SAFETY: the event has no other owner, and the queue lives on.
        unsafe { event::record(event, self.device.queue) }.doing("an event of the GPU")?;
        commits.last += 1;
        let ticket = commits.last;
        commits.pending.push_back((ticket, event));
        Ok(Ticket(ticket))
    }

    fn wait(&self, ticket: Ticket) -> Result<()> {
        self.device.enter()?;
        // Only one thread uses the queue, so the lock blocks no other.
        let mut commits = self.commits();
        while let Some(&(number, event)) = commits.pending.front()
            && number <= ticket.0
        {
            // SAFETY: the event was recorded, and is not reused until it is removed from the list.
            unsafe { event::synchronize(event) }.doing("the GPU's work")?;
            commits.pending.pop_front();
            commits.free.push(event);
        }
        Ok(())
    }
}
