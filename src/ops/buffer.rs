//! Preallocated activations.

use std::sync::Arc;

use crate::ops::context::{Backend, Context};
use crate::ops::cpu::AlignedFloats;
use crate::ops::gpu::{GpuBackend, GpuBuffer, Placement};
use crate::ops::reference::ReferenceBuffer;
use crate::{Error, ErrorKind, Result};

/// Rows of f32 in device memory that is allocated once and written in place: `[max_rows, width]`.
///
/// A step uses the first rows; the rest keeps what earlier steps left.
#[derive(Debug)]
pub struct Buffer {
    memory: Memory,
    max_rows: usize,
    width: usize,
}

#[derive(Debug)]
enum Memory {
    Host(AlignedFloats),
    Gpu(Arc<GpuBackend>, GpuBuffer),
    Reference(ReferenceBuffer),
}

impl Buffer {
    /// Zeros, for the device alone.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if there is no memory.
    pub fn new(context: &Context, max_rows: usize, width: usize) -> Result<Self> {
        Self::placed(context, max_rows, width, Placement::Private)
    }

    /// Zeros, for the device and for the host, which reads them in every step.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if there is no memory.
    pub fn shared(context: &Context, max_rows: usize, width: usize) -> Result<Self> {
        Self::placed(context, max_rows, width, Placement::Shared)
    }

    fn placed(context: &Context, max_rows: usize, width: usize, placement: Placement) -> Result<Self> {
        let memory = match context.backend() {
            Backend::Cpu(_) => {
                let len = max_rows.saturating_mul(width);
                let values = AlignedFloats::try_zeroed(len).ok_or_else(|| no_memory(max_rows, width))?;
                Memory::Host(values)
            }
            Backend::Gpu(gpu) => {
                let buffer = gpu.device().allocate((max_rows * width * 4).max(16), placement)?;
                Memory::Gpu(Arc::clone(gpu), buffer)
            }
            Backend::Reference(reference) => {
                Memory::Reference(ReferenceBuffer::new(reference, max_rows, width)?)
            }
        };
        Ok(Self { memory, max_rows, width })
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

    /// Calls `read` with the first `num_rows` rows, after all work that a GPU still has to do.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there are fewer rows or the work failed.
    pub fn read<R>(&self, num_rows: usize, read: impl FnOnce(&[f32]) -> R) -> Result<R> {
        let len = self.len_of(num_rows)?;
        match &self.memory {
            Memory::Host(values) => Ok(read(&values[..len])),
            Memory::Gpu(gpu, buffer) => {
                let mut values = vec![0.0_f32; len];
                gpu.read(buffer, bytemuck::cast_slice_mut(&mut values))?;
                Ok(read(&values))
            }
            Memory::Reference(buffer) => {
                let values: Vec<f32> = buffer.read(num_rows)?.into_iter().map(|value| value as f32).collect();
                Ok(read(&values))
            }
        }
    }

    /// Calls `write` with the first `num_rows` rows, for what comes next to see.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there are fewer rows or work on them failed.
    pub fn write<R>(&mut self, num_rows: usize, write: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
        let len = self.len_of(num_rows)?;
        match &mut self.memory {
            Memory::Host(values) => Ok(write(&mut values[..len])),
            Memory::Gpu(gpu, buffer) => {
                let mut values = vec![0.0_f32; len];
                gpu.read(buffer, bytemuck::cast_slice_mut(&mut values))?;
                let result = write(&mut values);
                gpu.device().write(buffer, 0, bytemuck::cast_slice(&values))?;
                Ok(result)
            }
            Memory::Reference(buffer) => {
                let mut values: Vec<f32> =
                    buffer.read(num_rows)?.into_iter().map(|value| value as f32).collect();
                let result = write(&mut values);
                buffer.write(&values)?;
                Ok(result)
            }
        }
    }

    /// The first `num_rows` rows with all the digits that the device computed.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(crate) fn read_exact(&self, num_rows: usize) -> Result<Vec<f64>> {
        match &self.memory {
            Memory::Reference(buffer) => Ok(buffer.read(self.len_of(num_rows)? / self.width.max(1))?),
            _ => self.read(num_rows, |values| values.iter().map(|value| f64::from(*value)).collect()),
        }
    }

    /// The memory of a buffer on a GPU.
    pub(crate) fn gpu(&self) -> Result<&GpuBuffer> {
        match &self.memory {
            Memory::Gpu(_, buffer) => Ok(buffer),
            _ => Err(elsewhere()),
        }
    }

    /// The tensor of a buffer of candle's.
    pub(crate) fn reference(&self) -> Result<&ReferenceBuffer> {
        match &self.memory {
            Memory::Reference(buffer) => Ok(buffer),
            _ => Err(elsewhere()),
        }
    }

    /// The same, to be written.
    pub(crate) fn reference_mut(&mut self) -> Result<&mut ReferenceBuffer> {
        match &mut self.memory {
            Memory::Reference(buffer) => Ok(buffer),
            _ => Err(elsewhere()),
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

fn elsewhere() -> Error {
    Error::internal("a buffer is used on another device than it is on")
}

fn no_memory(max_rows: usize, width: usize) -> Error {
    Error::new(ErrorKind::Capacity, format!("no memory for {max_rows} rows of {width} values"))
        .with_hint("let a step have fewer tokens: --max-num-batched-tokens")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cpu::CpuLevel;

    #[test]
    fn more_than_there_is_is_an_error() {
        let context = Context::cpu(1, CpuLevel::detect());
        let error = Buffer::new(&context, usize::MAX, 2).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Capacity);
    }

    #[test]
    fn what_is_written_is_read_and_rows_are_checked() {
        let context = Context::cpu(1, CpuLevel::detect());
        let mut buffer = Buffer::new(&context, 3, 2).unwrap();
        buffer.write(2, |values| values.copy_from_slice(&[1.0, 2.0, 3.0, 4.0])).unwrap();
        assert_eq!(buffer.read(3, <[f32]>::to_vec).unwrap(), [1.0, 2.0, 3.0, 4.0, 0.0, 0.0]);
        assert_eq!(buffer.read(3, |values| values.as_ptr().addr() % 64).unwrap(), 0, "vectors cross lines");
        assert!(buffer.read(4, <[f32]>::len).unwrap_err().message().contains("4 rows"));
        assert!(buffer.write(4, |_| ()).is_err());
    }
}
