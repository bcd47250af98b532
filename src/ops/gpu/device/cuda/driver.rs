//! The GPU as the driver provides it, and the driver's errors.

use std::ffi::{c_int, c_uint};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::DriverError;
use cudarc::driver::result::{self, ctx, device, primary_ctx, stream};
use cudarc::driver::sys::CUdevice_attribute::{
    self, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
};
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUresult, CUstream};

use super::repeated::Repeated;
use crate::{Error, ErrorKind, Result};

/// The oldest driver, by its version of CUDA: the first that loads the compiler's output.
const MIN_DRIVER: c_int = 12_000;

/// The oldest GPUs: those with instructions for bf16 (Ampere).
const MIN_ARCHITECTURE: c_int = 80;

/// A GPU with its queue of work, and a second queue for results that are read while the first one works.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) name: String,
    /// The driver's version of CUDA, such as 12080.
    pub(super) driver: c_int,
    /// The compute capability, such as 90.
    pub(super) architecture: c_int,
    /// Multiprocessors.
    pub(super) num_cores: usize,
    /// Maximum shared memory of a thread block, in bytes.
    pub(super) threadgroup_memory: usize,
    pub(super) queue: CUstream,
    pub(super) reading: CUstream,
    launches: Mutex<Repeated<Self>>,
    context: CUcontext,
}

// SAFETY: the driver's functions may be called from any thread; a context may be current in several at a time.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// An error with the operation that failed.
pub(super) trait Doing<T> {
    /// Adds the operation before the driver's text.
    ///
    /// # Errors
    /// The driver's; [`ErrorKind::Capacity`] if it has no memory, [`ErrorKind::DeviceLost`] if the GPU cannot be used
    /// any more, else [`ErrorKind::Internal`].
    fn doing(self, what: &str) -> Result<T>;
}

impl<T> Doing<T> for Result<T, DriverError> {
    fn doing(self, what: &str) -> Result<T> {
        self.map_err(|error| {
            let message = format!("{what}: {}", text(error));
            match error.0 {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::new(ErrorKind::Capacity, message).with_hint(
                    "end what else uses the GPU, lower --gpu-memory-utilization, or use --device cpu",
                ),
                lost if is_lost(lost) => Error::new(ErrorKind::DeviceLost, message).with_hint(
                    "start the program again; if it fails again, see what `nvidia-smi` and the system's log say",
                ),
                _ => Error::internal(message),
            }
        })
    }
}

/// Whether every later call will fail too: an error of a kernel or of the hardware lasts until the process ends.
pub(super) fn is_lost(result: CUresult) -> bool {
    matches!(
        result,
        CUresult::CUDA_ERROR_DEINITIALIZED
            | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
            | CUresult::CUDA_ERROR_UNKNOWN
    )
}

/// The driver's name and text of an error.
fn text(error: DriverError) -> String {
    let name = error.error_name().map_or_else(|_| "unknown error".into(), |name| name.to_string_lossy());
    let text = error.error_string().map_or_else(|_| "".into(), |text| text.to_string_lossy());
    format!("{name} ({text})")
}

/// Whether there is a driver that does not report that it finds no GPU.
pub(super) fn is_present() -> bool {
    // SAFETY: the library's initialisers have no requirements.
    let has_driver = unsafe { sys::is_culib_present() };
    has_driver
        && match result::init() {
            Ok(()) => device::get_count().is_ok_and(|count| count > 0),
            Err(error) => error.0 != CUresult::CUDA_ERROR_NO_DEVICE,
        }
}

fn unavailable(ordinal: usize, why: &str) -> Error {
    Error::unsupported(format!("--device cuda:{ordinal} is not available: {why}"))
}

impl Device {
    /// The GPU with this number.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if there is no driver, no such GPU or one that is too old.
    pub(super) fn open(ordinal: usize) -> Result<Arc<Self>> {
        let unavailable = |why: &str| unavailable(ordinal, why);
        // SAFETY: the library's initialisers have no requirements.
        if !unsafe { sys::is_culib_present() } {
            let error = unavailable("NVIDIA's driver (libcuda.so.1) is not installed");
            return Err(error.with_hint("leave --device out, or use --device cpu"));
        }
        let mut version = 0;
        // SAFETY: the version is written to a variable. It needs no GPU.
        let known = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
        let broken = |error| {
            let error = unavailable(&text(error));
            error.with_hint("see what `nvidia-smi` says, or use --device cpu")
        };
        known.map_err(broken)?;
        if version < MIN_DRIVER {
            let is = |version: c_int| format!("{}.{}", version / 1000, version % 1000 / 10);
            let why = format!("the driver is for CUDA {}; {} is the oldest", is(version), is(MIN_DRIVER));
            return Err(unavailable(&why).with_hint("install a newer driver, or use --device cpu"));
        }
        result::init().map_err(broken)?;
        let count = device::get_count().map_err(broken)?;
        let number = c_int::try_from(ordinal).ok().filter(|number| *number < count).ok_or_else(|| {
            let found = match count {
                0 => "the driver finds no GPU".to_owned(),
                1 => "the driver finds one GPU, cuda:0".to_owned(),
                _ => format!("the driver finds {count} GPUs, cuda:0 to cuda:{}", count - 1),
            };
            unavailable(&found).with_hint("use a number that `nvidia-smi -L` lists, or --device cpu")
        })?;
        let gpu = device::get(number).doing("opening the GPU")?;
        let name = device::get_name(gpu).doing("the GPU's name")?;
        let architecture = architecture(gpu)?;
        if architecture < MIN_ARCHITECTURE {
            let is = |number: c_int| format!("{}.{}", number / 10, number % 10);
            let (is, min) = (is(architecture), is(MIN_ARCHITECTURE));
            let why =
                format!("{name} has compute capability {is}; {min} is the oldest that the kernels are for");
            return Err(unavailable(&why).with_hint("use --device cpu"));
        }
        let size =
            |which, what: &str| Ok::<_, Error>(usize::try_from(attribute(gpu, which, what)?).unwrap_or(0));
        let num_cores = size(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, "the GPU's multiprocessors")?;
        let threadgroup_memory =
            size(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, "the GPU's shared memory")?;
        // SAFETY: the device exists. The context is never released: it lives as long as the process.
        let context = unsafe { primary_ctx::retain(gpu) }.doing("the GPU's context")?;
        // SAFETY: the context was just made.
        unsafe { ctx::set_current(context) }.doing("the GPU's context")?;
        let new_queue = || stream::create(stream::StreamKind::NonBlocking).doing("a queue of the GPU");
        let (queue, reading) = (new_queue()?, new_queue()?);
        Ok(Arc::new(Self {
            name,
            driver: version,
            architecture,
            num_cores,
            threadgroup_memory,
            queue,
            reading,
            launches: Mutex::default(),
            context,
        }))
    }

    /// Makes the GPU current for this thread's calls.
    pub(super) fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as the process.
        unsafe { ctx::set_current(self.context) }.doing("the GPU's context")
    }

    /// The launches since the last commit.
    pub(super) fn launches(&self) -> MutexGuard<'_, Repeated<Self>> {
        self.launches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the GPU current for work after all launches: queues those that are held back.
    pub(super) fn enter_after_launches(&self) -> Result<()> {
        self.enter()?;
        self.launches().give_up(self)
    }

    /// Waits for everything in the queue.
    pub(super) fn finish(&self) -> Result<()> {
        // SAFETY: the queue lives as long as the process.
        unsafe { stream::synchronize(self.queue) }.doing("the GPU's work")
    }

    /// Bytes of memory that are not in use.
    pub(super) fn free_memory(&self) -> Result<u64> {
        self.enter()?;
        let (free, _all) = result::mem_get_info().doing("the GPU's memory")?;
        Ok(free as u64)
    }
}

fn attribute(gpu: CUdevice, which: CUdevice_attribute, what: &str) -> Result<c_int> {
    // SAFETY: the device exists.
    unsafe { device::get_attribute(gpu, which) }.doing(what)
}

fn architecture(gpu: CUdevice) -> Result<c_int> {
    let part = |which| attribute(gpu, which, "the GPU's compute capability");
    let major = part(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    Ok(10 * major + part(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?)
}

/// Converts to the driver's type for launch sizes, saturating.
pub(super) fn size(value: usize) -> c_uint {
    c_uint::try_from(value).unwrap_or(c_uint::MAX)
}
