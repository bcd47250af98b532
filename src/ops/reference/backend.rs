//! candle's device.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Shape, Tensor};

use super::Result;
use crate::Error;

/// A device of candle's and its type of arithmetic.
#[derive(Debug)]
pub struct ReferenceBackend {
    device: Device,
    dtype: DType,
    busy_nanoseconds: AtomicU64,
}

impl ReferenceBackend {
    /// candle's CPU device in f32.
    #[must_use]
    pub fn cpu() -> Self {
        Self::new(Device::Cpu, DType::F32)
    }

    /// candle's CPU device in f64: the oracle.
    #[must_use]
    pub fn oracle() -> Self {
        Self::new(Device::Cpu, DType::F64)
    }

    /// candle's Metal device in f32.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if this build or this machine has none.
    pub fn metal() -> crate::Result<Self> {
        let device = Device::new_metal(0).map_err(|error| {
            Error::unsupported(format!("--device metal is not available to candle: {error}"))
                .with_hint("use --device cpu")
        })?;
        Ok(Self::new(device, DType::F32))
    }

    fn new(device: Device, dtype: DType) -> Self {
        Self { device, dtype, busy_nanoseconds: AtomicU64::new(0) }
    }

    /// The device and the type of its arithmetic.
    #[must_use]
    pub fn description(&self) -> String {
        let device = if self.device.is_metal() { "metal" } else { "cpu" };
        format!("{device} (reference kernels: candle in {})", self.dtype.as_str())
    }

    /// Threads of candle's own pool; `RAYON_NUM_THREADS` sets them.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        candle_core::utils::get_num_threads()
    }

    /// Bytes that the system recommends to use at most; none for the CPU.
    #[must_use]
    pub fn working_set_bytes(&self) -> Option<u64> {
        #[cfg(all(target_os = "macos", feature = "metal"))]
        if let Device::Metal(metal) = &self.device {
            return Some(metal.device().recommended_max_working_set_size() as u64);
        }
        None
    }

    /// Runs an op on this many rows, and measures its time. Without rows it does nothing, since some functions of
    /// candle's reject tensors without values.
    pub(crate) fn run(&self, num_rows: usize, work: impl FnOnce() -> Result<()>) -> crate::Result<()> {
        if num_rows == 0 {
            return Ok(());
        }
        let start = Instant::now();
        let result = work();
        self.busy_nanoseconds.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(result?)
    }

    pub(crate) fn busy_time(&self) -> Duration {
        Duration::from_nanos(self.busy_nanoseconds.load(Ordering::Relaxed))
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// A tensor of the host on this backend's device, in its type.
    pub(super) fn bring(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(tensor.to_dtype(self.dtype)?.to_device(&self.device)?)
    }

    pub(super) fn tensor(&self, values: &[f32], shape: impl Into<Shape>) -> Result<Tensor> {
        self.bring(&Tensor::from_slice(values, shape, &Device::Cpu)?)
    }

    /// Indices of rows.
    pub(super) fn indices(&self, indices: impl IntoIterator<Item = usize>) -> Result<Tensor> {
        let indices: Vec<u32> = indices.into_iter().map(|index| index as u32).collect();
        let len = indices.len();
        Ok(Tensor::from_vec(indices, len, &self.device)?)
    }
}
