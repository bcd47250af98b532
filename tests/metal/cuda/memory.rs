//! The device and its memory.

use std::any::Any;
use std::ffi::{CStr, c_char};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use tinyvllm::ops::gpu::{GpuBuffer, GpuMemory};
use tinyvllm::{Error, ErrorKind, Result};

use super::driver::{Address, Driver, Handle};

/// The first GPU of this machine. Everything that it does is in one queue.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) driver: Driver,
    pub(super) name: String,
    pub(super) num_bytes: u64,
    context: Handle,
}

// SAFETY: the driver's functions may be called from any thread; a context is current in many at a time.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    pub(super) fn open() -> Result<Arc<Self>> {
        let driver = Driver::load()?;
        let (mut device, mut num_bytes, mut context) = (0, 0, null_mut());
        let mut name = [0; 256];
        // SAFETY: each pointer is to a variable of the wanted type, and the name has the length that is told.
        unsafe {
            driver.check("cuInit", (driver.init)(0))?;
            driver.check("cuDeviceGet", (driver.device)(&raw mut device, 0))?;
            driver.check("its name", (driver.device_name)(name.as_mut_ptr(), name.len() as i32, device))?;
            driver.check("its memory", (driver.device_memory)(&raw mut num_bytes, device))?;
            driver.check("its context", (driver.retain_context)(&raw mut context, device))?;
        }
        // SAFETY: the driver ends the name with a zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr().cast::<c_char>()) };
        let name = name.to_string_lossy().into_owned();
        Ok(Arc::new(Self { driver, name, num_bytes: num_bytes as u64, context }))
    }

    /// The driver, in a thread that may use it.
    pub(super) fn enter(&self) -> Result<&Driver> {
        // SAFETY: the context lives as long as the process.
        let result = unsafe { (self.driver.set_context)(self.context) };
        self.driver.check("cuCtxSetCurrent", result).map(|()| &self.driver)
    }

    /// Zeroed memory.
    pub(super) fn allocate(self: &Arc<Self>, len: usize) -> Result<DeviceMemory> {
        let driver = self.enter()?;
        let mut at = 0;
        // SAFETY: the address is written to a variable.
        let result = unsafe { (driver.allocate)(&raw mut at, len) };
        driver
            .check("cuMemAlloc", result)
            .map_err(|error| Error::new(ErrorKind::Capacity, format!("{len} bytes: {error}")))?;
        let memory = DeviceMemory { device: Arc::clone(self), at, len };
        // SAFETY: all of it was just allocated.
        driver.check("cuMemsetD8Async", unsafe { (driver.fill)(at, 0, len, null_mut()) })?;
        Ok(memory)
    }
}

/// Memory of a device, which the host does not see.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    device: Arc<Device>,
    at: Address,
    len: usize,
}

impl DeviceMemory {
    pub(super) fn of(buffer: &GpuBuffer) -> Result<&Self> {
        buffer.0.as_any().downcast_ref().ok_or_else(|| Error::internal("a buffer of another device"))
    }

    /// The address of the `len` bytes from `offset` on.
    pub(super) fn range(&self, offset: usize, len: usize) -> Result<Address> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::internal(format!("{len} bytes from {offset} of a buffer of {}", self.len)));
        }
        Ok(self.at + offset as u64)
    }
}

impl GpuMemory for DeviceMemory {
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

impl Drop for DeviceMemory {
    /// After everything that is queued: the driver waits before it frees.
    fn drop(&mut self) {
        if let Ok(driver) = self.device.enter() {
            // It fails if earlier work did, which whoever waited for that work was told.
            // SAFETY: allocated once and freed once; nobody else has the address any more.
            _ = unsafe { (driver.free)(self.at) };
        }
    }
}
