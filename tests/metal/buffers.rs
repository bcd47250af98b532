//! Values into buffers and out of them.

use bytemuck::{Pod, Zeroable};
use tinyvllm::ops::gpu::{Gpu, GpuBuffer, Placement};

/// A buffer with these values, and at least 16 bytes.
pub(crate) fn buffer<T: Pod>(gpu: &dyn Gpu, values: &[T]) -> GpuBuffer {
    let bytes = bytemuck::cast_slice(values);
    let buffer = gpu.allocate(bytes.len().max(16), Placement::Private).unwrap();
    gpu.write(&buffer, 0, bytes).unwrap();
    buffer
}

/// The first `len` values of a buffer.
pub(crate) fn values<T: Pod + Zeroable>(gpu: &dyn Gpu, buffer: &GpuBuffer, len: usize) -> Vec<T> {
    let mut values = vec![T::zeroed(); len];
    gpu.read(buffer, 0, bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}
