//! The launch code's interface to a GPU: memory, pipelines, dispatches.
//!
//! All code that selects kernels, grids, arguments and scratch memory uses [`Gpu`]. On a Mac the trait is candle's
//! Metal device; in the tests it is a machine that executes the same kernel sources on the processor and checks every
//! access.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::time::Duration;

use super::Library;
use crate::weights::SharedBytes;
use crate::{Error, Result};

/// Maximum bytes of a kernel's arguments without buffers.
const MAX_ARGUMENT_BYTES: usize = 4096;

/// Metal has 31 buffer slots; the first is that of the arguments.
const MAX_BUFFERS: usize = 30;

/// Metal's unit of threadgroup memory.
pub(in crate::ops::gpu) const THREADGROUP_UNIT: usize = 16;

/// The way out on a device that cannot run a kernel.
pub(crate) const WITHOUT_KERNELS: &str = "use --kernels reference, which needs none of these kernels";

/// A GPU with one queue of work.
///
/// Dispatches take effect in order: a dispatch sees the writes of earlier ones to the buffers that both declare.
pub trait Gpu: fmt::Debug + Send + Sync {
    /// The name of such a GPU in `--device`.
    fn kind(&self) -> &'static str {
        "metal"
    }

    /// The name of the chip, such as `Apple M2 Max`.
    fn name(&self) -> &str;

    /// The class of the chip, which selects parameters.
    fn class(&self) -> ChipClass;

    /// Bytes that the system recommends to use at most; of dedicated memory, the free bytes.
    fn working_set_bytes(&self) -> u64;

    /// Measured bandwidth of a large copy inside its memory, bytes per second, reads plus writes; none if there is no
    /// such measurement.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if there is no memory for it, else the device's.
    fn measure_copy_bandwidth(&self) -> Result<Option<f64>> {
        Ok(None)
    }

    /// The number of threadgroups that run concurrently if each fills a core, if known. It affects only the division of
    /// work, not results.
    fn num_cores(&self) -> usize {
        1
    }

    /// Maximum bytes of threadgroup memory for a kernel that declares none itself.
    fn threadgroup_memory(&self) -> usize {
        PipelineLimits::APPLE.max_memory
    }

    /// The time budget of a dispatch, and of all dispatches between two commits, at an M1's peak rates: 2 TFLOP/s and
    /// 68 GB/s. A system ends work that delays its screen for seconds, and kernels do not reach peak rates.
    fn dispatch_budget(&self) -> Duration {
        Duration::from_millis(100)
    }

    /// Zeroed memory of exactly `len` bytes (at least 16), aligned to 256 bytes.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if memory is exhausted.
    fn allocate(&self, len: usize, placement: Placement) -> Result<GpuBuffer>;

    /// The same for each of `count` buffers, laid out for fast [copies](Self::gather) of all of them.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if memory is exhausted.
    fn allocate_several(&self, len: usize, count: usize, placement: Placement) -> Result<Vec<GpuBuffer>> {
        (0..count).map(|_| self.allocate(len, placement)).collect()
    }

    /// Zeroed memory of the host that this device [copies](Self::copy) from and to.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if memory is exhausted.
    fn allocate_host(&self, len: usize) -> Result<GpuBuffer> {
        self.allocate(len, Placement::Shared)
    }

    /// The pages of a mapped file that hold `bytes` as a buffer, without a copy, and the offset of `bytes` in it; none
    /// if these bytes cannot be shared with the device.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if the device cannot address more memory.
    fn wrap(&self, bytes: &SharedBytes) -> Result<Option<(GpuBuffer, usize)>>;

    /// The kernel `function` of a library, compiled for these constants. The same arguments give the same
    /// pipeline, so that it is compiled once. Several threads may compile at the same time.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] with the compiler's message.
    fn pipeline(&self, library: &'static Library, function: &str, constants: &[Constant])
    -> Result<Pipeline>;

    /// Queues one kernel. `args` and the list of buffers are read before this returns.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the launch is outside the limits of the device or the kernel fails.
    fn dispatch(&self, launch: &Launch<'_>) -> Result<()>;

    /// Copies `bytes` to `offset`. Work that is queued and still reads these bytes may see old or new ones; later work
    /// sees the new ones.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the range is not in the buffer.
    fn write(&self, target: &GpuBuffer, offset: usize, bytes: &[u8]) -> Result<()>;

    /// Waits for all queued work and copies from `offset` into `bytes`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the range is not in the buffer or queued work failed.
    fn read(&self, source: &GpuBuffer, offset: usize, bytes: &mut [u8]) -> Result<()>;

    /// The same for memory whose writers have been waited for, without waiting for work that is queued after them.
    ///
    /// # Errors
    /// As [`Self::read`].
    fn read_finished(&self, source: &GpuBuffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.read(source, offset, bytes)
    }

    /// The same for several ranges: buffers, offsets and targets.
    ///
    /// # Errors
    /// As [`Self::read`].
    fn read_finished_ranges(&self, ranges: &mut [(&GpuBuffer, usize, &mut [u8])]) -> Result<()> {
        ranges.iter_mut().try_for_each(|(source, offset, bytes)| self.read_finished(source, *offset, bytes))
    }

    /// Copies `len` bytes from one buffer to another, after queued work: through the host, unless the device can copy
    /// by itself.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if a range is not in its buffer or queued work failed.
    fn copy(&self, source: (&GpuBuffer, usize), target: (&GpuBuffer, usize), len: usize) -> Result<()> {
        let mut bytes = vec![0; len];
        self.read(source.0, source.1, &mut bytes)?;
        self.write(target.0, target.1, &bytes)
    }

    /// Copies `len` bytes from `offset` on of each buffer to consecutive ranges of `target`, from its offset on.
    /// Otherwise like [`copy`](Self::copy).
    ///
    /// # Errors
    /// As [`Self::copy`].
    fn gather(
        &self,
        sources: &[&GpuBuffer],
        offset: usize,
        target: (&GpuBuffer, usize),
        len: usize,
    ) -> Result<()> {
        let mut copies = sources.iter().enumerate();
        copies.try_for_each(|(i, source)| self.copy((source, offset), (target.0, target.1 + i * len), len))
    }

    /// The inverse of [`gather`](Self::gather).
    ///
    /// # Errors
    /// As [`Self::copy`].
    fn scatter(
        &self,
        source: (&GpuBuffer, usize),
        targets: &[&GpuBuffer],
        offset: usize,
        len: usize,
    ) -> Result<()> {
        let mut copies = targets.iter().enumerate();
        copies.try_for_each(|(i, target)| self.copy((source.0, source.1 + i * len), (target, offset), len))
    }

    /// Lets the device start on queued work. Returns a ticket to wait for.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the device rejects the work.
    fn commit(&self) -> Result<Ticket>;

    /// Waits until all work up to a commit is done. Shared memory then holds its results.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the device reported an error.
    fn wait(&self, ticket: Ticket) -> Result<()>;
}

/// Classes of chips, each with its own parameters of kernels. The last letter of an Apple GPU's architecture name gives
/// its class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChipClass {
    /// Phones, and the plain and Pro chips: 4 to 20 cores.
    Base,
    /// Max chips: 24 to 40 cores.
    Max,
    /// Ultra chips: two Max chips.
    Ultra,
    /// NVIDIA's GPUs, which also have kernels of their own.
    Nvidia,
}

/// The location of a buffer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Accessible to the device only.
    Private,
    /// Accessible to both; [`GpuMemory::host`] returns its address.
    Shared,
}

/// Memory of a [`Gpu`].
#[expect(clippy::len_without_is_empty, reason = "no memory is empty")]
pub trait GpuMemory: fmt::Debug + Send + Sync {
    /// Bytes.
    fn len(&self) -> usize;

    /// The host's address of the memory, if it has one.
    fn host(&self) -> Option<NonNull<u8>>;

    /// For the device that allocated it.
    fn as_any(&self) -> &dyn Any;
}

/// A buffer in memory of a [`Gpu`], freed when dropped.
#[derive(Debug)]
pub struct GpuBuffer(pub Box<dyn GpuMemory>);

impl GpuBuffer {
    /// Bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "no buffer is empty")]
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// A compiled kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pipeline {
    /// Its index in the device's own list.
    pub index: usize,
    /// Its limits on the device.
    pub limits: PipelineLimits,
}

/// The limits of a compiled kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipelineLimits {
    /// Maximum threads of a threadgroup: fewer than 1,024 for a kernel that takes many registers.
    pub max_threads: usize,
    /// Threads of a simdgroup.
    pub simd_width: usize,
    /// Bytes of threadgroup memory that the kernel declares itself.
    pub static_memory: usize,
    /// Bytes of threadgroup memory that exist.
    pub max_memory: usize,
}

/// A point in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// The value of a function constant of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Constant {
    /// `constant bool name [[function_constant(index)]]`.
    Bool(u32, bool),
    /// `constant ushort name [[function_constant(index)]]`.
    U16(u32, u16),
}

/// A kernel's use of a buffer. A wrong declaration is a race, so the tests compare it with actual accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Only read.
    Read,
    /// Only written.
    Write,
    /// Read and written.
    ReadWrite,
}

/// A buffer of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Binding<'a> {
    /// The buffer.
    pub buffer: &'a GpuBuffer,
    /// The offset of the kernel's view, in bytes.
    pub offset: usize,
    /// The kernel's use of it.
    pub access: Access,
}

impl<'a> Binding<'a> {
    /// All of a buffer, for reading.
    #[must_use]
    pub fn read(buffer: &'a GpuBuffer) -> Self {
        Self { buffer, offset: 0, access: Access::Read }
    }

    /// All of a buffer, for writing.
    #[must_use]
    pub fn write(buffer: &'a GpuBuffer) -> Self {
        Self { buffer, offset: 0, access: Access::Write }
    }

    /// All of a buffer, for reading and writing.
    #[must_use]
    pub fn read_write(buffer: &'a GpuBuffer) -> Self {
        Self { buffer, offset: 0, access: Access::ReadWrite }
    }

    /// The same from `offset` bytes on.
    #[must_use]
    pub fn at(self, offset: usize) -> Self {
        Self { offset, ..self }
    }
}

/// A launch of one kernel with all its inputs.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The kernel.
    pub pipeline: Pipeline,
    /// The structure of arguments, at `buffer(0)`; at most 4096 bytes.
    pub args: &'a [u8],
    /// The buffers from `buffer(1)` on.
    pub buffers: &'a [Binding<'a>],
    /// Bytes of `threadgroup(0)`; 0 if the kernel has none. At most 32768 together with the kernel's own declarations.
    pub threadgroup_memory: usize,
    /// Threadgroups in each dimension; none may be 0.
    pub grid: [usize; 3],
    /// Threads of a threadgroup, a multiple of 32 and at most the pipeline's limit.
    pub num_threads: usize,
}

impl PipelineLimits {
    /// The limits of a kernel that takes few registers, on every supported Apple GPU.
    pub const APPLE: Self =
        Self { max_threads: 1024, simd_width: 32, static_memory: 0, max_memory: 32 << 10 };
}

impl Launch<'_> {
    /// Rejects launches that Metal would refuse, or accept with undefined behaviour. `kernel` is the launched kernel's
    /// name, `limits` are the limits of its pipeline on the device.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] with the value and its limit.
    pub fn check(&self, kernel: &str, limits: PipelineLimits) -> Result<()> {
        let Launch { num_threads, grid, threadgroup_memory, .. } = *self;
        let PipelineLimits { max_threads, simd_width, static_memory, max_memory } = limits;
        let invalid = |what: String| Err(Error::internal(format!("{kernel}: {what}")));
        if self.args.len() > MAX_ARGUMENT_BYTES {
            return invalid(format!(
                "{} bytes of arguments; the most are {MAX_ARGUMENT_BYTES}",
                self.args.len()
            ));
        }
        if self.buffers.len() > MAX_BUFFERS {
            return invalid(format!("{} buffers; the most are {MAX_BUFFERS}", self.buffers.len()));
        }
        if grid.contains(&0) {
            return invalid(format!("a grid of {grid:?} threadgroups, none of which may be 0"));
        }
        if num_threads == 0 || !num_threads.is_multiple_of(simd_width) {
            return invalid(format!("{num_threads} threads; it has to be a multiple of {simd_width}"));
        }
        if !threadgroup_memory.is_multiple_of(THREADGROUP_UNIT) {
            return invalid(format!(
                "{threadgroup_memory} bytes of threadgroup memory; it has to be a multiple of {THREADGROUP_UNIT}"
            ));
        }
        // The rest depends on the device and on its compiler's output for the kernel.
        let unfit = |what: String| {
            let error = Error::internal(format!("{kernel} cannot run on this device: {what}"));
            Err(error.with_hint(WITHOUT_KERNELS))
        };
        if num_threads > max_threads {
            return unfit(format!(
                "it takes {num_threads} threads in a group, and its registers allow {max_threads}"
            ));
        }
        let memory = threadgroup_memory.saturating_add(static_memory);
        if memory > max_memory {
            return unfit(format!(
                "it takes {memory} bytes of threadgroup memory, and there are {max_memory}"
            ));
        }
        Ok(())
    }
}
