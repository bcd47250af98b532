//! The keys and values of a layer in a GPU's memory: K and V both `[kv_head][slot][head_dim]` in a block.

use std::sync::Arc;

use bytemuck::bytes_of;

use super::attention::LatentRows;
use super::attention::Pools;
use super::backend::GpuBackend;
use super::cost::Cost;
use super::kernel::Kernel;
use super::{Binding, GpuBuffer, Placement};
use crate::ops::KvCacheDType;
use crate::ops::cpu::paged_cache::KvLayout;
use crate::ops::kv_cache::{CacheOps, DevicePools, row_block_bytes};
use crate::{Error, Result};

/// The blocks of a layer.
#[derive(Debug)]
pub(crate) struct GpuPools {
    gpu: Arc<GpuBackend>,
    layout: KvLayout,
    k: GpuBuffer,
    /// None if values are the first ones of the keys.
    v: Option<GpuBuffer>,
}

impl GpuPools {
    /// Keys and values.
    pub(crate) fn pools(&self) -> Result<Pools<'_>> {
        let v = self.v.as_ref().ok_or_else(|| Error::internal("the cache has latent rows only"))?;
        let KvLayout { dtype, block_size, num_kv_heads, head_dim, .. } = self.layout;
        Ok(Pools { k: &self.k, v, dtype, num_kv_heads, head_dim, block_size })
    }

    /// Latent rows.
    pub(crate) fn rows(&self) -> Result<LatentRows<'_>> {
        let KvLayout { dtype, block_size, head_dim: row_dim, .. } = self.layout;
        match self.v {
            None => Ok(LatentRows { rows: &self.k, dtype, row_dim, block_size }),
            Some(_) => Err(Error::internal("the cache has keys and values, and no latent rows")),
        }
    }
}

impl GpuPools {
    fn buffers(&self) -> impl Iterator<Item = &GpuBuffer> {
        std::iter::once(&self.k).chain(&self.v)
    }

    /// Bytes of a block of one buffer.
    fn buffer_block_bytes(&self) -> usize {
        row_block_bytes(&self.layout)
    }
}

impl DevicePools for GpuPools {
    fn copy_block(&mut self, source: usize, target: usize) -> Result<()> {
        let block_bytes = self.buffer_block_bytes();
        self.buffers()
            .try_for_each(|pool| copy_block(&self.gpu, pool, block_bytes, source as u32, target as u32))
    }

    fn block_bytes(&self) -> usize {
        self.buffers().count() * self.buffer_block_bytes()
    }

    fn read_block(&self, block: usize, bytes: &mut [u8]) -> Result<()> {
        let len = self.buffer_block_bytes();
        let mut parts = self.buffers().zip(bytes.chunks_exact_mut(len));
        parts.try_for_each(|(pool, bytes)| self.gpu.device().read(pool, block * len, bytes))
    }

    fn read_blocks(&self, parts: &mut [(usize, &mut [u8])]) -> Result<()> {
        let len = self.buffer_block_bytes();
        let pieces = parts.iter_mut().flat_map(|(block, bytes)| {
            let at = *block * len;
            self.buffers().zip(bytes.chunks_exact_mut(len)).map(move |(pool, bytes)| (pool, at, bytes))
        });
        self.gpu.device().read_finished_pieces(&mut pieces.collect::<Vec<_>>())
    }

    fn wait(&self) -> Result<()> {
        let device = self.gpu.device();
        device.wait(device.commit()?)
    }

    fn allocate_host(&self, num_bytes: usize) -> Result<GpuBuffer> {
        self.gpu.device().allocate_host(num_bytes)
    }

    fn copy_out(&self, block: usize, target: (&GpuBuffer, usize)) -> Result<()> {
        let len = self.buffer_block_bytes();
        let copy = |(index, pool)| {
            self.gpu.device().copy((pool, block * len), (target.0, target.1 + index * len), len)
        };
        self.buffers().enumerate().try_for_each(copy)
    }

    fn copy_in(&mut self, block: usize, source: (&GpuBuffer, usize)) -> Result<()> {
        let len = self.buffer_block_bytes();
        let copy = |(index, pool)| {
            self.gpu.device().copy((source.0, source.1 + index * len), (pool, block * len), len)
        };
        self.buffers().enumerate().try_for_each(copy)
    }

    fn write_block(&mut self, block: usize, bytes: &[u8]) -> Result<()> {
        let len = self.buffer_block_bytes();
        let mut parts = self.buffers().zip(bytes.chunks_exact(len));
        parts.try_for_each(|(pool, bytes)| self.gpu.device().write(pool, block * len, bytes))
    }
}

/// That GPUs have kernels for a type.
///
/// # Errors
/// [`crate::ErrorKind::Unsupported`] if they have none, with the way out.
pub(crate) fn check_kv_cache_dtype(dtype: KvCacheDType) -> Result<()> {
    match dtype {
        KvCacheDType::F16 | KvCacheDType::Bf16 | KvCacheDType::F32 => Ok(()),
        KvCacheDType::Q8_0 => Err(Error::unsupported(format!(
            "--kv-cache-dtype {dtype} is for the CPU: on GPUs the cache is f16, bf16 or f32"
        ))
        .with_hint("use --kv-cache-dtype f16, or --device cpu")),
    }
}

impl CacheOps for Arc<GpuBackend> {
    fn check_dtype(&self, dtype: KvCacheDType) -> Result<()> {
        check_kv_cache_dtype(dtype)
    }

    fn pools(&self, layout: KvLayout, num_blocks: usize) -> Result<GpuPools> {
        let len = row_block_bytes(&layout) * num_blocks;
        let allocate = || self.device().allocate(len.max(16), Placement::Private);
        let v = layout.has_values.then(allocate).transpose()?;
        Ok(GpuPools { gpu: Self::clone(self), layout, k: allocate()?, v })
    }
}

/// Copies block `source` to `target` in a pool of blocks of `block_bytes`, a multiple of 16.
fn copy_block(
    gpu: &GpuBackend,
    pool: &GpuBuffer,
    block_bytes: usize,
    source: u32,
    target: u32,
) -> Result<()> {
    let num_words = block_bytes / 16;
    let args = [source, target, num_words as u32];
    let buffers = [Binding::read_write(pool)];
    let cost = Cost::bytes(2 * block_bytes);
    gpu.launch_simdgroups(Kernel::CopyBlock, bytes_of(&args), &buffers, [num_words.div_ceil(32), 1, 1], cost)
}
