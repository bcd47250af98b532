//! Preallocated activations.

use candle_core::{CpuStorage, Device, Storage};

use crate::{Error, Result};

/// Rows of f32 in device memory that is allocated once and written in place: `[max_rows, width]`.
///
/// A step uses the first rows; the rest keeps what earlier steps left. The memory is candle's storage without
/// a tensor around it: what a tensor adds (a graph, locks, views) allocates in every operation.
#[derive(Debug)]
pub struct Buffer {
    storage: Storage,
    max_rows: usize,
    width: usize,
}

impl Buffer {
    /// Zeros.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] for a device without kernels.
    pub fn new(device: &Device, max_rows: usize, width: usize) -> Result<Self> {
        let storage = match device {
            Device::Cpu => Storage::Cpu(CpuStorage::F32(vec![0.0; max_rows * width])),
            other => {
                return Err(Error::unsupported(format!("there are no buffers on {:?}", other.location())));
            }
        };
        Ok(Self { storage, max_rows, width })
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

    /// Calls `read` with the first `num_rows` rows of a buffer on the CPU.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there are fewer rows or the buffer is on another device.
    pub fn read<R>(&self, num_rows: usize, read: impl FnOnce(&[f32]) -> R) -> Result<R> {
        let len = self.len_of(num_rows)?;
        match &self.storage {
            Storage::Cpu(CpuStorage::F32(values)) => Ok(read(&values[..len])),
            _ => Err(Error::internal("a buffer was read that is not on the CPU")),
        }
    }

    /// Calls `write` with the first `num_rows` rows of a buffer on the CPU.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there are fewer rows or the buffer is on another device.
    pub fn write<R>(&mut self, num_rows: usize, write: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
        let len = self.len_of(num_rows)?;
        match &mut self.storage {
            Storage::Cpu(CpuStorage::F32(values)) => Ok(write(&mut values[..len])),
            _ => Err(Error::internal("a buffer was written that is not on the CPU")),
        }
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
