//! Preallocated activations.

use std::fmt;

use crate::ops::context::Context;
use crate::ops::device::{Buffers, Device, Held, on_device, with_held};
use crate::ops::gpu::Placement;
use crate::{Error, ErrorKind, Result};

/// Rows on a device.
pub(crate) trait Rows: fmt::Debug {
    /// Calls `read` with the first `len` values, after all queued work of a GPU.
    fn read<R>(&self, len: usize, read: impl FnOnce(&[f32]) -> R) -> Result<R>;

    /// Calls `write` with the first `len` values, before the ops that follow.
    fn write<R>(&mut self, len: usize, write: impl FnOnce(&mut [f32]) -> R) -> Result<R>;

    /// The first `len` values in the device's full precision.
    fn read_exact(&self, len: usize) -> Result<Vec<f64>> {
        self.read(len, |values| values.iter().map(|value| f64::from(*value)).collect())
    }
}

/// The buffers of a device.
pub(crate) trait NewRows: Device {
    /// Zeros, `[max_rows, width]`.
    fn new_rows(&self, max_rows: usize, width: usize, placement: Placement) -> Result<Self::Buffer>;
}

/// Rows of f32 in device memory that is allocated once and written in place: `[max_rows, width]`.
///
/// A step uses the first rows; the rest keeps values of earlier steps.
#[derive(Debug)]
pub struct Buffer {
    held: Held<Buffers>,
    max_rows: usize,
    width: usize,
}

impl Buffer {
    /// Zeros, for the device alone.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if memory is exhausted.
    pub fn new(context: &Context, max_rows: usize, width: usize) -> Result<Self> {
        Self::placed(context, max_rows, width, Placement::Private)
    }

    /// Zeros, for the device and for the host, which reads them in every step.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if memory is exhausted.
    pub fn shared(context: &Context, max_rows: usize, width: usize) -> Result<Self> {
        Self::placed(context, max_rows, width, Placement::Shared)
    }

    fn placed(context: &Context, max_rows: usize, width: usize, placement: Placement) -> Result<Self> {
        let held = on_device!(context.backend(), |device| {
            Held::new(device, device.new_rows(max_rows, width, placement)?)
        });
        Ok(Self { held, max_rows, width })
    }

    /// Maximum rows of a step.
    #[must_use]
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// Values of a row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Calls `read` with the first `num_rows` rows, after all queued work of a GPU.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there are fewer rows or the work failed.
    pub fn read<R>(&self, num_rows: usize, read: impl FnOnce(&[f32]) -> R) -> Result<R> {
        let len = self.len_of(num_rows)?;
        with_held!(&self.held, |rows| rows.read(len, read))
    }

    /// Calls `write` with the first `num_rows` rows, before the ops that follow.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there are fewer rows or work on them failed.
    pub fn write<R>(&mut self, num_rows: usize, write: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
        let len = self.len_of(num_rows)?;
        with_held!(&mut self.held, |rows| rows.write(len, write))
    }

    /// The first `num_rows` rows in the device's full precision.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(crate) fn read_exact(&self, num_rows: usize) -> Result<Vec<f64>> {
        let len = self.len_of(num_rows)?;
        with_held!(&self.held, |rows| rows.read_exact(len))
    }

    pub(crate) fn held(&self) -> &Held<Buffers> {
        &self.held
    }

    pub(crate) fn held_mut(&mut self) -> &mut Held<Buffers> {
        &mut self.held
    }

    /// The number of values in the first `num_rows` rows, if they exist.
    pub(crate) fn len_of(&self, num_rows: usize) -> Result<usize> {
        if num_rows > self.max_rows {
            return Err(Error::internal(format!(
                "{num_rows} rows do not fit into a buffer of {}",
                self.max_rows
            )));
        }
        Ok(num_rows * self.width)
    }
}

pub(super) fn no_memory(max_rows: usize, width: usize) -> Error {
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
