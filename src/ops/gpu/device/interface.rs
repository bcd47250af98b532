//! What the launch code asks of a GPU: memory, pipelines, dispatches.
//!
//! Everything that decides *what* is launched (kernels, grids, arguments, scratch memory) is written once
//! against [`Gpu`]. On a Mac the trait is candle's Metal device; in the tests it is a machine that executes
//! the same kernel sources on the processor and checks every access.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::time::Duration;

use super::Library;
use crate::weights::SharedBytes;
use crate::{Error, Result};

/// Bytes that can be given to a kernel beside its buffers.
const MAX_ARGUMENT_BYTES: usize = 4096;

/// Metal has 31 places for buffers; the first is that of the arguments.
const MAX_BUFFERS: usize = 30;

/// Metal's unit of threadgroup memory.
pub(in crate::ops::gpu) const THREADGROUP_UNIT: usize = 16;

/// What to do on a device that a kernel cannot run on.
pub(crate) const WITHOUT_KERNELS: &str = "use --kernels reference, which needs none of these kernels";

/// A GPU with one queue of work.
///
/// Dispatches take effect in the order in which they are made: a dispatch sees what earlier ones wrote to
/// the buffers that both of them declare.
pub trait Gpu: fmt::Debug + Send + Sync {
    /// What `--device` calls such a GPU.
    fn kind(&self) -> &'static str {
        "metal"
    }

    /// The name of the chip, such as `Apple M2 Max`.
    fn name(&self) -> &str;

    /// Which parameters suit the chip.
    fn class(&self) -> ChipClass;

    /// Bytes that the system recommends to use at most; of memory that is the GPU's own, those that are free.
    fn working_set_bytes(&self) -> u64;

    /// Bytes a second that a large copy inside its memory reads and writes together, measured; none if there is no such
    /// measurement.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if there is no memory for it, else the device's.
    fn measure_copy_bandwidth(&self) -> Result<Option<f64>> {
        Ok(None)
    }

    /// How many threadgroups that fill a core are computed at a time, if that is known. What is computed does not depend
    /// on it, only how it is divided.
    fn num_cores(&self) -> usize {
        1
    }

    /// Bytes of threadgroup memory that a kernel can have which declares none itself.
    fn threadgroup_memory(&self) -> usize {
        PipelineLimits::APPLE.max_memory
    }

    /// How long a dispatch may take, and all dispatches between two commits, by what an M1 can do at best: 2 TFLOP/s
    /// and 68 GB/s. A system ends work that keeps its screen waiting for seconds, and kernels do not reach what a
    /// chip can do.
    fn patience(&self) -> Duration {
        Duration::from_millis(100)
    }

    /// Zeroed memory of exactly `len` bytes (at least 16), aligned to 256 bytes.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if there is none.
    fn allocate(&self, len: usize, placement: Placement) -> Result<GpuBuffer>;

    /// Zeroed memory of the host that this device [copies](Self::copy) from and to.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if there is none.
    fn allocate_host(&self, len: usize) -> Result<GpuBuffer> {
        self.allocate(len, Placement::Shared)
    }

    /// The pages of a mapped file that hold `bytes` as a buffer, without a copy, and where in it `bytes` begin;
    /// none if these bytes cannot be shared with the device.
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

    /// Copies `bytes` to `offset`. Work that is queued and still reads these bytes may see old or new ones;
    /// work that is queued later sees the new ones.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the range is not in the buffer.
    fn write(&self, target: &GpuBuffer, offset: usize, bytes: &[u8]) -> Result<()>;

    /// Waits for all queued work and copies from `offset` into `bytes`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the range is not in the buffer or queued work failed.
    fn read(&self, source: &GpuBuffer, offset: usize, bytes: &mut [u8]) -> Result<()>;

    /// The same for memory that only work writes that has been waited for, without waiting for what is queued behind it.
    ///
    /// # Errors
    /// As [`Self::read`].
    fn read_finished(&self, source: &GpuBuffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.read(source, offset, bytes)
    }

    /// The same for several pieces: buffers, where in them, and where to.
    ///
    /// # Errors
    /// As [`Self::read`].
    fn read_finished_pieces(&self, pieces: &mut [(&GpuBuffer, usize, &mut [u8])]) -> Result<()> {
        pieces.iter_mut().try_for_each(|(source, offset, bytes)| self.read_finished(source, *offset, bytes))
    }

    /// Copies `len` bytes from one buffer to another, behind what is queued: by way of the host, unless the device can do it
    /// alone.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if a range is not in its buffer or queued work failed.
    fn copy(&self, source: (&GpuBuffer, usize), target: (&GpuBuffer, usize), len: usize) -> Result<()> {
        let mut bytes = vec![0; len];
        self.read(source.0, source.1, &mut bytes)?;
        self.write(target.0, target.1, &bytes)
    }

    /// Lets the device start on what is queued, and gives what to wait for.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the device does not take the work.
    fn commit(&self) -> Result<Ticket>;

    /// Waits until everything up to a commit is done. Shared memory then holds its results.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the device reported an error.
    fn wait(&self, ticket: Ticket) -> Result<()>;
}

/// Parameters of kernels are chosen for each class, which of Apple's GPUs is the last letter of their name for the
/// architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChipClass {
    /// Phones, and the plain and Pro chips: 4 to 20 cores.
    Base,
    /// Max chips: 24 to 40 cores.
    Max,
    /// Ultra chips: two Max chips.
    Ultra,
    /// NVIDIA's GPUs, which have kernels of their own besides.
    Nvidia,
}

/// Where the memory of a buffer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Seen by the device only.
    Private,
    /// Seen by both; [`GpuMemory::host`] gives its address.
    Shared,
}

/// Memory of a [`Gpu`].
#[expect(clippy::len_without_is_empty, reason = "no memory is empty")]
pub trait GpuMemory: fmt::Debug + Send + Sync {
    /// Bytes.
    fn len(&self) -> usize;

    /// Where the host sees the memory, if it does.
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
    /// Its place in the device's own list.
    pub index: usize,
    /// What the device can do with it.
    pub limits: PipelineLimits,
}

/// What a device allows of a compiled kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipelineLimits {
    /// Most threads of a threadgroup: fewer than 1,024 for a kernel that takes many registers.
    pub max_threads: usize,
    /// Threads of a simdgroup.
    pub simd_width: usize,
    /// Bytes of threadgroup memory that the kernel declares itself.
    pub static_memory: usize,
    /// Bytes of threadgroup memory that there are.
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

/// How a kernel uses a buffer. A wrong declaration is a race, so the tests compare it with what is done.
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
    /// Where the kernel's view of it begins, in bytes.
    pub offset: usize,
    /// What the kernel does with it.
    pub access: Access,
}

impl<'a> Binding<'a> {
    /// All of a buffer, to be read.
    #[must_use]
    pub fn read(buffer: &'a GpuBuffer) -> Self {
        Self { buffer, offset: 0, access: Access::Read }
    }

    /// All of a buffer, to be written.
    #[must_use]
    pub fn write(buffer: &'a GpuBuffer) -> Self {
        Self { buffer, offset: 0, access: Access::Write }
    }

    /// All of a buffer, to be read and written.
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

/// One kernel with everything that it needs.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The kernel.
    pub pipeline: Pipeline,
    /// The structure of arguments, at `buffer(0)`; at most 4096 bytes.
    pub args: &'a [u8],
    /// The buffers from `buffer(1)` on.
    pub buffers: &'a [Binding<'a>],
    /// Bytes of `threadgroup(0)`; 0 if the kernel has none. At most 32768 together with what it declares itself.
    pub threadgroup_memory: usize,
    /// Threadgroups in each dimension; none may be 0.
    pub grid: [usize; 3],
    /// Threads of a threadgroup, a multiple of 32 and at most what the pipeline allows.
    pub num_threads: usize,
}

impl PipelineLimits {
    /// Those of a kernel that takes few registers, on every Apple GPU that the kernels are for.
    pub const APPLE: Self =
        Self { max_threads: 1024, simd_width: 32, static_memory: 0, max_memory: 32 << 10 };
}

impl Launch<'_> {
    /// What Metal would refuse, or take and do something undefined. `kernel` is the name of what is launched,
    /// `limits` are those of the pipeline as the device has it.
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
        // What is left depends on the device and on what its compiler made of the kernel.
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
