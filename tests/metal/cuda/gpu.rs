//! A [`Gpu`] that executes the kernels of `metal_kernels` on an NVIDIA GPU.
//!
//! It needs nothing but the driver and a folder with what `compile.rs` made of the kernels: for each set of values
//! of a library's function constants a module.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_uint, c_void};
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr::{from_mut, null_mut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tinyvllm::ops::gpu::{
    ChipClass, Constant, Gpu, GpuBuffer, Launch, Library, Pipeline, PipelineLimits, Placement, Ticket,
};
use tinyvllm::weights::SharedBytes;
use tinyvllm::{Error, Result};

use super::driver::{Address, Handle};
use super::memory::{Device, DeviceMemory};

/// Of `MslArguments` in `shim/entry_cuda.hpp`; no kernel has as many.
const MAX_ARGUMENT_BYTES: usize = 512;
/// As if it were one of Apple's.
/// Attributes of functions, by the driver's numbers.
const MAX_THREADS_PER_BLOCK: c_int = 0;
const SHARED_SIZE_BYTES: c_int = 1;

/// `MslArguments` of `shim/entry_cuda.hpp`.
#[repr(C)]
struct Arguments {
    buffers: [Address; 31],
    /// There is one list of threadgroup memory at most, which begins at 0.
    threadgroup_offsets: [u32; 8],
    bytes: Bytes,
}

/// As a kernel's own structure of arguments, aligned for everything.
#[repr(C, align(16))]
struct Bytes([u8; MAX_ARGUMENT_BYTES]);

/// The device.
#[derive(Debug)]
pub(crate) struct CudaGpu {
    device: Arc<Device>,
    folder: PathBuf,
    class: ChipClass,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Modules by the library and its function constants.
    modules: HashMap<(&'static str, Vec<Constant>), Handle>,
    known: HashMap<(&'static str, String, Vec<Constant>), Pipeline>,
    functions: Vec<(String, Handle)>,
    last_ticket: u64,
}

// SAFETY: handles of the driver may be used in any thread.
unsafe impl Send for State {}

impl CudaGpu {
    /// The first GPU of this machine, with the kernels in `folder`, as a chip of `class`.
    ///
    /// # Errors
    /// [`tinyvllm::ErrorKind::Internal`] if there is none.
    pub(crate) fn open(folder: &Path, class: ChipClass) -> Result<Self> {
        let (device, folder) = (Device::open()?, folder.to_path_buf());
        Ok(Self { device, folder, class, state: Mutex::default() })
    }

    /// Seconds that the device takes for what `work` queues.
    ///
    /// # Errors
    /// Those of `work` and of the device.
    pub(crate) fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let driver = self.device.enter()?;
        let mut events = [null_mut(); 2];
        let mut milliseconds = 0.0;
        // SAFETY: events are recorded in the one queue of the device and destroyed when both have passed.
        unsafe {
            for event in &mut events {
                driver.check("cuEventCreate", (driver.new_event)(event, 0))?;
            }
            driver.check("cuCtxSynchronize", (driver.synchronize)())?;
            driver.check("cuEventRecord", (driver.record_event)(events[0], null_mut()))?;
            work()?;
            driver.check("cuEventRecord", (driver.record_event)(events[1], null_mut()))?;
            driver.check("cuEventSynchronize", (driver.wait_for_event)(events[1]))?;
            let elapsed = (driver.elapsed_time)(&raw mut milliseconds, events[0], events[1]);
            driver.check("cuEventElapsedTime", elapsed)?;
            for event in events {
                driver.check("cuEventDestroy", (driver.destroy_event)(event))?;
            }
        }
        Ok(f64::from(milliseconds) / 1e3)
    }

    /// Queues a copy of the whole of one buffer to another.
    ///
    /// # Errors
    /// [`tinyvllm::ErrorKind::Internal`] if the other is smaller.
    pub(crate) fn copy(&self, source: &GpuBuffer, target: &GpuBuffer) -> Result<()> {
        let driver = self.device.enter()?;
        let len = source.len();
        let (from, to) = (DeviceMemory::of(source)?.range(0, len)?, DeviceMemory::of(target)?.range(0, len)?);
        // SAFETY: both ranges are inside their buffers.
        let result = unsafe { (driver.copy_on_device)(to, from, len, null_mut()) };
        driver.check("cuMemcpyDtoDAsync", result)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The module of a library with its function constants: the one compiled for the flags, in which numbers are set.
    fn module(&self, library: &'static Library, constants: &[Constant]) -> Result<Handle> {
        let path = self.folder.join(format!("{}-{}.cubin", library.name, set_of(constants)?));
        let failed = |error: &dyn Display| Error::internal(format!("{}: {error}", path.display()));
        let image = fs::read(&path).map_err(|error| failed(&error))?;
        let driver = self.device.enter()?;
        let mut module = null_mut();
        // SAFETY: the image is all of a file that the assembler made, whose header tells its length.
        let result = unsafe { (driver.load_module)(&raw mut module, image.as_ptr().cast()) };
        driver.check("cuModuleLoadData", result).map_err(|error| failed(&error))?;
        for constant in constants {
            let Constant::U16(index, value) = *constant else { continue };
            let name = format!("msl_constant_{index}");
            let symbol = CString::new(name.as_str()).map_err(|error| failed(&error))?;
            let (mut at, mut len) = (0, 0);
            // SAFETY: the module was just loaded, and the name is a string.
            let result = unsafe { (driver.variable)(&raw mut at, &raw mut len, module, symbol.as_ptr()) };
            driver.check(&name, result).map_err(|error| failed(&error))?;
            let bytes = value.to_ne_bytes();
            if len != bytes.len() {
                return Err(failed(&format!("{name} has {len} bytes")));
            }
            // SAFETY: the variable has as many bytes.
            let result = unsafe { (driver.copy_to_device)(at, bytes.as_ptr().cast(), len) };
            driver.check(&name, result).map_err(|error| failed(&error))?;
        }
        Ok(module)
    }
}

/// The number of a set of flags.
fn set_of(constants: &[Constant]) -> Result<u32> {
    constants.iter().try_fold(0, |set, constant| match *constant {
        Constant::Bool(index @ 0..32, value) => Ok(set | u32::from(value) << index),
        Constant::Bool(..) => {
            Err(Error::internal(format!("{constant:?} is beyond the flags that have a bit")))
        }
        Constant::U16(..) => Ok(set),
    })
}

impl Gpu for CudaGpu {
    fn name(&self) -> &str {
        &self.device.name
    }

    fn class(&self) -> ChipClass {
        self.class
    }

    fn working_set_bytes(&self) -> u64 {
        self.device.num_bytes
    }

    fn allocate(&self, len: usize, _placement: Placement) -> Result<GpuBuffer> {
        // Memory that both see would be on the host's side of the bus.
        Ok(GpuBuffer(Box::new(self.device.allocate(len)?)))
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
        // A kernel without function constants has the same code in every module.
        let key = (library.name, function.to_owned(), constants.to_vec());
        let mut state = self.state();
        if let Some(pipeline) = state.known.get(&key) {
            return Ok(*pipeline);
        }
        let of_module = (library.name, constants.to_vec());
        let module = match state.modules.get(&of_module) {
            Some(module) => *module,
            None => {
                let module = self.module(library, constants)?;
                state.modules.insert(of_module, module);
                module
            }
        };
        let driver = self.device.enter()?;
        let symbol = CString::new(format!("msl_{function}"));
        let symbol = symbol.map_err(|error| Error::internal(error.to_string()))?;
        let mut handle = null_mut();
        // SAFETY: the module is loaded for good, and the name is a string.
        let result = unsafe { (driver.function)(&raw mut handle, module, symbol.as_ptr()) };
        driver.check(&format!("{function} of {}", library.name), result)?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: the function is one of a loaded module, and the value is there to be written.
            let result = unsafe { (driver.function_attribute)(&raw mut value, attribute, handle) };
            driver.check(&format!("{function} of {}", library.name), result)?;
            Ok::<_, Error>(usize::try_from(value).unwrap_or(0))
        };
        // As many as its registers allow, and what it declares itself.
        let limits = PipelineLimits {
            max_threads: attribute(MAX_THREADS_PER_BLOCK)?,
            static_memory: attribute(SHARED_SIZE_BYTES)?,
            ..PipelineLimits::APPLE
        };
        let pipeline = Pipeline { index: state.functions.len(), limits };
        state.functions.push((function.to_owned(), handle));
        state.known.insert(key, pipeline);
        Ok(pipeline)
    }

    fn dispatch(&self, launch: &Launch<'_>) -> Result<()> {
        let state = self.state();
        let function = state.functions.get(launch.pipeline.index);
        let (name, function) = function.ok_or_else(|| Error::internal("a pipeline of another device"))?;
        let Launch { args, buffers, threadgroup_memory, grid, num_threads, .. } = *launch;
        launch.check(name, launch.pipeline.limits)?;
        if args.len() > MAX_ARGUMENT_BYTES {
            return Err(Error::internal(format!("{name}: {} bytes of arguments", args.len())));
        }
        let mut arguments = Arguments {
            buffers: [0; 31],
            threadgroup_offsets: [0; 8],
            bytes: Bytes([0; MAX_ARGUMENT_BYTES]),
        };
        arguments.bytes.0[..args.len()].copy_from_slice(args);
        for (at, binding) in arguments.buffers[1..].iter_mut().zip(buffers) {
            *at = DeviceMemory::of(binding.buffer)?.range(binding.offset, 1)?;
        }
        let mut list = [from_mut(&mut arguments).cast::<c_void>()];
        let [x, y, z] = grid.map(|side| c_uint::try_from(side).unwrap_or(c_uint::MAX));
        let driver = self.device.enter()?;
        // SAFETY: every kernel takes this structure, which is copied before the call returns. The driver checks
        // the sizes. What a kernel accesses beyond its buffers is its own fault, which the emulator finds.
        let result = unsafe {
            (driver.launch)(
                *function,
                x,
                y,
                z,
                num_threads as c_uint,
                1,
                1,
                threadgroup_memory as c_uint,
                null_mut(),
                list.as_mut_ptr(),
                null_mut(),
            )
        };
        driver.check(name, result)
    }

    fn write(&self, target: &GpuBuffer, offset: usize, bytes: &[u8]) -> Result<()> {
        let at = DeviceMemory::of(target)?.range(offset, bytes.len())?;
        let driver = self.device.enter()?;
        // SAFETY: the range is inside the buffer.
        let result = unsafe { (driver.copy_to_device)(at, bytes.as_ptr().cast(), bytes.len()) };
        driver.check("cuMemcpyHtoD", result)
    }

    fn read(&self, source: &GpuBuffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let at = DeviceMemory::of(source)?.range(offset, bytes.len())?;
        let driver = self.device.enter()?;
        // SAFETY: the range is inside the buffer. The copy waits for everything that was queued before it.
        let result = unsafe { (driver.copy_to_host)(bytes.as_mut_ptr().cast(), at, bytes.len()) };
        driver.check("cuMemcpyDtoH", result)
    }

    fn commit(&self) -> Result<Ticket> {
        let mut state = self.state();
        state.last_ticket += 1;
        Ok(Ticket(state.last_ticket))
    }

    /// The device starts on work at once, and one wait is as good as another.
    fn wait(&self, _ticket: Ticket) -> Result<()> {
        let driver = self.device.enter()?;
        // SAFETY: takes nothing.
        driver.check("queued work", unsafe { (driver.synchronize)() })
    }
}
