//! Preallocated activations.

use std::cell::Cell;

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Storage, Tensor};

use crate::{Error, Result};

/// Rows of f32 in a tensor that is allocated once and written in place: `[max_rows, width]`.
///
/// A step uses the first rows; the rest keeps what earlier steps left.
#[derive(Debug)]
pub struct Buffer {
    tensor: Tensor,
    max_rows: usize,
    width: usize,
}

impl Buffer {
    /// Zeros.
    ///
    /// # Errors
    /// If the device has no memory.
    pub fn new(device: &Device, max_rows: usize, width: usize) -> Result<Self> {
        Ok(Self { tensor: Tensor::zeros((max_rows, width), DType::F32, device)?, max_rows, width })
    }

    /// Most rows of a step.
    #[must_use]
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// Values of a row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// The memory, on whichever device it is.
    #[must_use]
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Calls `read` with the first `num_rows` rows of a buffer on the CPU.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there are fewer rows or the buffer is on another device.
    pub fn read<R>(&self, num_rows: usize, read: impl FnOnce(&[f32]) -> R) -> Result<R> {
        let len = self.len_of(num_rows)?;
        let (storage, _) = self.tensor.storage_and_layout();
        match &*storage {
            Storage::Cpu(CpuStorage::F32(values)) => Ok(read(&values[..len])),
            _ => Err(Error::internal("a buffer was read that is not on the CPU")),
        }
    }

    /// Calls `write` with the first `num_rows` rows of a buffer on the CPU.
    ///
    /// `write` must not use this buffer in another way: it is locked.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there are fewer rows or the buffer is on another device.
    pub fn write<R>(&mut self, num_rows: usize, write: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
        let len = self.len_of(num_rows)?;
        let access = WriteAccess { len, write: Cell::new(Some(write)), result: Cell::new(None) };
        self.tensor.inplace_op1(&access)?;
        access.result.into_inner().ok_or_else(|| Error::internal("a buffer was not written"))
    }

    fn len_of(&self, num_rows: usize) -> Result<usize> {
        if num_rows > self.max_rows {
            return Err(Error::internal(format!(
                "{num_rows} rows do not fit into a buffer of {}",
                self.max_rows
            )));
        }
        Ok(num_rows * self.width)
    }
}

/// The way to a tensor's memory that candle offers: an operation in place.
struct WriteAccess<F, R> {
    len: usize,
    write: Cell<Option<F>>,
    result: Cell<Option<R>>,
}

impl<R, F: FnOnce(&mut [f32]) -> R> InplaceOp1 for WriteAccess<F, R> {
    fn name(&self) -> &'static str {
        "write-buffer"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        if let (CpuStorage::F32(values), Some(write)) = (storage, self.write.take()) {
            self.result.set(Some(write(&mut values[..self.len])));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_rows_are_checked() {
        let mut buffer = Buffer::new(&Device::Cpu, 3, 2).unwrap();
        buffer.write(2, |values| values.copy_from_slice(&[1.0, 2.0, 3.0, 4.0])).unwrap();
        assert_eq!(buffer.read(3, <[f32]>::to_vec).unwrap(), [1.0, 2.0, 3.0, 4.0, 0.0, 0.0]);
        assert!(buffer.read(4, <[f32]>::len).unwrap_err().message().contains("4 rows"));
        assert!(buffer.write(4, |_| ()).is_err());
    }
}
