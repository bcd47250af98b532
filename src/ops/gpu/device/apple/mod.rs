//! The GPU of a Mac, through candle's layer over Metal.
//!
//! candle provides the device, fences, the residency set and the command encoder, which inserts barriers between
//! dispatches by the buffers that each declares to read and to write. The command buffers are this module's own:
//! candle's queue cannot wait for a single one, which reading a result one step late needs.
//!
//! Metal tracks no hazards for any buffer here. candle's barriers order the dispatches within an encoder; a fence
//! orders encoders; the host reads results after it has waited for their command buffer.

mod memory;
mod pipelines;
mod queue;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ptr;
use std::sync::Arc;

use candle_metal_kernels::MetalKernelError;
use candle_metal_kernels::metal::{ComputeCommandEncoder, Device};
use objc2::available;
use objc2::rc::autoreleasepool;
use objc2_metal::{MTLDevice, MTLGPUFamily, MTLSize};

use self::memory::{AppleMemory, Region};
use self::pipelines::Pipelines;
use self::queue::Queue;
use super::{Access, ChipClass, Constant, Gpu, GpuBuffer, Launch, Library, Pipeline, Placement, Ticket};
use crate::weights::SharedBytes;
use crate::{Error, ErrorKind, Result};

/// With this variable set to 1, each dispatch ends with a barrier. If that changes a result, a kernel uses a buffer in
/// a way that it does not declare.
const BARRIERS_VARIABLE: &str = "TINYVLLM_METAL_BARRIERS";

/// Uploads are copied through shared memory in chunks of at most this size.
const STAGING_BYTES: usize = 64 << 20;

/// The GPU of this Mac.
pub struct AppleGpu {
    name: String,
    class: ChipClass,
    device: Device,
    queue: Arc<Queue>,
    pipelines: Pipelines,
}

impl AppleGpu {
    /// Opens the system's GPU.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if there is none that the kernels can run on.
    pub fn open() -> Result<Self> {
        let unsupported = |what: &str| {
            Error::unsupported(format!("--device metal is not available: {what}"))
                .with_hint("use --device cpu")
        };
        if !cfg!(target_arch = "aarch64") {
            return Err(unsupported("the kernels are for Apple silicon, and this build is for Intel"));
        }
        // bfloat in kernels, and the architecture's name.
        if !available!(macos = 14.0) {
            return Err(unsupported("it needs macOS 14 or newer"));
        }
        autoreleasepool(|_| {
            let device = Device::system_default()
                .ok_or_else(|| unsupported("the system has no Metal device for this process"))?;
            let name = device.as_ref().name().to_string();
            if !device.as_ref().supportsFamily(MTLGPUFamily::Apple7) {
                let name = device.as_ref().name();
                return Err(unsupported(&format!(
                    "the GPU {name} has no simdgroup matrix multiplication, which exists from the M1 on"
                )));
            }
            let with_barriers = std::env::var_os(BARRIERS_VARIABLE).is_some_and(|value| value == "1");
            Ok(Self {
                class: ChipClass::from_names(&device.architecture_name(), &name),
                queue: Arc::new(Queue::new(&device, with_barriers)?),
                pipelines: Pipelines::new(&device),
                device,
                name,
            })
        })
    }
}

impl fmt::Debug for AppleGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AppleGpu({}, {:?})", self.name, self.class)
    }
}

// Objects that Metal autoreleases are freed at the end of each call: the engine's thread has no pool of its own, so
// they would accumulate otherwise.
impl Gpu for AppleGpu {
    fn name(&self) -> &str {
        &self.name
    }

    fn class(&self) -> ChipClass {
        self.class
    }

    fn working_set_bytes(&self) -> u64 {
        self.device.as_ref().recommendedMaxWorkingSetSize()
    }

    fn allocate(&self, len: usize, placement: Placement) -> Result<GpuBuffer> {
        autoreleasepool(|_| {
            let memory = AppleMemory::allocate(&self.device, &self.queue, len, placement)?;
            Ok(GpuBuffer(Box::new(memory)))
        })
    }

    fn wrap(&self, bytes: &SharedBytes) -> Result<Option<(GpuBuffer, usize)>> {
        autoreleasepool(|_| {
            let wrapped = AppleMemory::wrap(&self.device, &self.queue, bytes)?;
            Ok(wrapped.map(|(memory, offset)| (GpuBuffer(Box::new(memory)), offset)))
        })
    }

    fn pipeline(
        &self,
        library: &'static Library,
        function: &str,
        constants: &[Constant],
    ) -> Result<Pipeline> {
        autoreleasepool(|_| self.pipelines.pipeline(library, function, constants))
    }

    fn dispatch(&self, launch: &Launch<'_>) -> Result<()> {
        let kernel = self.pipelines.kernel(launch.pipeline)?;
        launch.check(kernel.name(), kernel.limits())?;
        ensure_bindings(launch).map_err(|error| error.context(kernel.name()))?;
        let size = |[width, height, depth]: [usize; 3]| MTLSize { width, height, depth };
        let encode = |encoder: &ComputeCommandEncoder| -> Result<()> {
            if !launch.args.is_empty() {
                encoder.set_bytes_directly(0, launch.args.len(), launch.args.as_ptr().cast());
            }
            for (index, binding) in launch.buffers.iter().enumerate() {
                let buffer = Some(AppleMemory::of(binding.buffer)?.buffer());
                match binding.access {
                    Access::Read => encoder.set_input_buffer(index + 1, buffer, binding.offset),
                    // An output waits for earlier reads and writes alike, so it may be read as well.
                    Access::Write | Access::ReadWrite => {
                        encoder.set_output_buffer(index + 1, buffer, binding.offset);
                    }
                }
            }
            encoder.dispatch_thread_groups(size(launch.grid), size([launch.num_threads, 1, 1]));
            Ok(())
        };
        autoreleasepool(|_| self.queue.compute(kernel.state(), launch.threadgroup_memory, encode))
    }

    fn write(&self, target: &GpuBuffer, offset: usize, bytes: &[u8]) -> Result<()> {
        let memory = AppleMemory::of(target)?;
        memory.ensure_holds(offset, bytes.len())?;
        match memory.region() {
            Region::Mapped => Err(Error::internal("weights in a mapped file cannot be written")),
            Region::Shared(address) => {
                // SAFETY: the range is in the buffer, which is not freed while `target` borrows it, and no Rust
                // reference points into it. The contract of `write` allows the device to read these bytes meanwhile.
                unsafe {
                    ptr::copy_nonoverlapping(bytes.as_ptr(), address.as_ptr().add(offset), bytes.len());
                }
                Ok(())
            }
            Region::Private => autoreleasepool(|_| self.write_private(memory, offset, bytes)),
        }
    }

    fn read(&self, source: &GpuBuffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let memory = AppleMemory::of(source)?;
        memory.ensure_holds(offset, bytes.len())?;
        autoreleasepool(|_| match memory.region() {
            Region::Private => self.read_private(memory, offset, bytes),
            Region::Shared(_) | Region::Mapped => {
                self.wait(self.queue.commit()?)?;
                memory.copy_to(offset, bytes);
                Ok(())
            }
        })
    }

    fn commit(&self) -> Result<Ticket> {
        autoreleasepool(|_| self.queue.commit())
    }

    fn wait(&self, ticket: Ticket) -> Result<()> {
        autoreleasepool(|_| self.queue.wait(ticket))
    }
}

impl AppleGpu {
    /// The device copies words of 4 bytes, so a range with a partial word at either end is read first.
    fn write_private(&self, memory: &AppleMemory, offset: usize, bytes: &[u8]) -> Result<()> {
        let words = words_around(offset, bytes.len());
        if words == (offset..offset + bytes.len()) {
            return self.upload(memory, offset, bytes);
        }
        let mut patched = vec![0; words.len()];
        self.download(memory, words.start, &mut patched)?;
        patched[offset - words.start..][..bytes.len()].copy_from_slice(bytes);
        self.upload(memory, words.start, &patched)
    }

    fn read_private(&self, memory: &AppleMemory, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let words = words_around(offset, bytes.len());
        let mut around = vec![0; words.len()];
        self.download(memory, words.start, &mut around)?;
        bytes.copy_from_slice(&around[offset - words.start..][..bytes.len()]);
        Ok(())
    }

    /// Queues a copy to whole words of private memory.
    fn upload(&self, memory: &AppleMemory, offset: usize, bytes: &[u8]) -> Result<()> {
        for (index, chunk) in bytes.chunks(STAGING_BYTES).enumerate() {
            let staging = memory::staging_with(&self.device, chunk)?;
            self.queue.blit(|blit| {
                let offset = offset + index * STAGING_BYTES;
                blit.copy_from_buffer(&staging, 0, memory.buffer(), offset, chunk.len());
            })?;
            self.queue.limit_staged(chunk.len(), STAGING_BYTES)?;
        }
        Ok(())
    }

    /// Waits for a copy of whole words of private memory.
    fn download(&self, memory: &AppleMemory, offset: usize, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return self.wait(self.queue.commit()?);
        }
        let staging = memory::staging(&self.device, bytes.len())?;
        self.queue.blit(|blit| blit.copy_from_buffer(memory.buffer(), offset, &staging, 0, bytes.len()))?;
        self.wait(self.queue.commit()?)?;
        // SAFETY: the staging memory is `bytes.len()` bytes long, no other code has it, and the device has finished
        // writing it.
        unsafe { ptr::copy_nonoverlapping(staging.contents(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

/// The words of 4 bytes that a range of bytes touches. The end is in the buffer: its memory is rounded up.
fn words_around(offset: usize, len: usize) -> std::ops::Range<usize> {
    match len {
        0 => offset..offset,
        _ => offset / 4 * 4..(offset + len).next_multiple_of(4),
    }
}

fn ensure_bindings(launch: &Launch<'_>) -> Result<()> {
    for (index, binding) in launch.buffers.iter().enumerate() {
        let memory = AppleMemory::of(binding.buffer)?;
        memory
            .ensure_holds(binding.offset, 1)
            .map_err(|error| error.context(format!("buffer {}", index + 1)))?;
        if binding.access != Access::Read && matches!(memory.region(), Region::Mapped) {
            return Err(Error::internal(format!("buffer {} is a mapped file and is written", index + 1)));
        }
    }
    Ok(())
}

/// Metal's error, including the details that candle leaves out of its message.
fn metal_message(doing: impl fmt::Display, error: MetalKernelError) -> String {
    let error = match error {
        MetalKernelError::WithBacktrace { inner, .. } => *inner,
        error => error,
    };
    match error {
        MetalKernelError::FailedToCreatePipeline(message)
        | MetalKernelError::LoadLibraryError(message)
        | MetalKernelError::LoadFunctionError(message) => format!("{doing}: {message}"),
        error => format!("{doing}: {error}"),
    }
}

/// The device returned no object, which happens only if memory or the system's limits are exhausted.
fn exhausted(what: &str) -> Error {
    Error::new(ErrorKind::Capacity, format!("the device has no memory for {what}"))
}
