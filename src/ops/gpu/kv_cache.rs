//! The keys and values of a layer in a GPU's memory: K and V both `[kv_head][slot][head_dim]` in a block.
//!
//! Of q8_0 a value is a byte, its code with 128 added, and behind all blocks of a pool are the scales of their rows: one in
//! half precision for each 32 values, an even number for each row. Blocks are filled up to whole units of 16 bytes of both.

use std::sync::Arc;

use bytemuck::bytes_of;

use super::attention::LatentRows;
use super::attention::{Pages, Pools};
use super::backend::GpuBackend;
use super::cost::Cost;
use super::kernel::Kernel;
use super::{Binding, GpuBuffer, Placement};
use crate::ops::cpu::paged_cache::KvLayout;
use crate::ops::kv_cache::{CacheOps, DevicePools, row_block_bytes, row_block_parts, row_block_rows};
use crate::{Error, Result};

/// The blocks of a layer.
#[derive(Debug)]
pub(crate) struct GpuPools {
    gpu: Arc<GpuBackend>,
    layout: KvLayout,
    num_blocks: usize,
    k: GpuBuffer,
    /// None if values are the first ones of the keys.
    v: Option<GpuBuffer>,
}

impl GpuPools {
    /// Keys and values.
    pub(crate) fn pools(&self) -> Result<Pools<'_>> {
        let v = self.v.as_ref().ok_or_else(|| Error::internal("the cache has latent rows only"))?;
        let KvLayout { dtype, num_kv_heads, head_dim, .. } = self.layout;
        Ok(Pools { k: &self.k, v, dtype, num_kv_heads, head_dim, pages: self.pages() })
    }

    /// Latent rows.
    pub(crate) fn rows(&self) -> Result<LatentRows<'_>> {
        let KvLayout { dtype, head_dim: row_dim, .. } = self.layout;
        match self.v {
            None => Ok(LatentRows { rows: &self.k, dtype, row_dim, pages: self.pages() }),
            Some(_) => Err(Error::internal("the cache has keys and values, and no latent rows")),
        }
    }
}

impl GpuPools {
    fn pages(&self) -> Pages {
        let KvLayout { block_size, num_kv_heads, head_dim, .. } = self.layout;
        let [values, _] = row_block_parts(&self.layout);
        Pages {
            num_kv_heads: num_kv_heads as u32,
            block_size: block_size as u32,
            head_dim: head_dim as u32,
            block_rows: row_block_rows(&self.layout) as u32,
            scales: (self.num_blocks * values / 16) as u32,
        }
    }

    fn buffers(&self) -> impl Iterator<Item = &GpuBuffer> {
        std::iter::once(&self.k).chain(&self.v)
    }

    /// What a block has in each buffer: the buffer, where its blocks begin, and bytes of one.
    fn parts(&self) -> impl Iterator<Item = (&GpuBuffer, usize, usize)> {
        let [values, scales] = row_block_parts(&self.layout);
        let begin_of_scales = self.num_blocks * values;
        let parts = [(0, values), (begin_of_scales, scales)].into_iter().filter(|(_, len)| *len > 0);
        self.buffers().flat_map(move |pool| parts.clone().map(move |(begin, len)| (pool, begin, len)))
    }
}

impl DevicePools for GpuPools {
    fn copy_block(&mut self, source: usize, target: usize) -> Result<()> {
        self.parts().try_for_each(|(pool, begin, len)| {
            copy_block(&self.gpu, pool, begin, len, source as u32, target as u32)
        })
    }

    fn block_bytes(&self) -> usize {
        self.parts().map(|(_, _, len)| len).sum()
    }

    fn read_block(&self, block: usize, bytes: &mut [u8]) -> Result<()> {
        self.wait()?;
        self.read_blocks(&mut [(block, bytes)])
    }

    fn read_blocks(&self, parts: &mut [(usize, &mut [u8])]) -> Result<()> {
        let mut pieces = Vec::new();
        for (block, bytes) in parts {
            let mut rest = &mut **bytes;
            for (pool, begin, len) in self.parts() {
                let (own, others) = rest.split_at_mut(len);
                pieces.push((pool, begin + *block * len, own));
                rest = others;
            }
        }
        self.gpu.device().read_finished_pieces(&mut pieces)
    }

    fn wait(&self) -> Result<()> {
        let device = self.gpu.device();
        device.wait(device.commit()?)
    }

    fn allocate_host(&self, num_bytes: usize) -> Result<GpuBuffer> {
        self.gpu.device().allocate_host(num_bytes)
    }

    fn copy_out(&self, block: usize, target: (&GpuBuffer, usize)) -> Result<()> {
        let mut at = target.1;
        for (pool, begin, len) in self.parts() {
            self.gpu.device().copy((pool, begin + block * len), (target.0, at), len)?;
            at += len;
        }
        Ok(())
    }

    fn copy_in(&mut self, block: usize, source: (&GpuBuffer, usize)) -> Result<()> {
        let mut at = source.1;
        for (pool, begin, len) in self.parts() {
            self.gpu.device().copy((source.0, at), (pool, begin + block * len), len)?;
            at += len;
        }
        Ok(())
    }

    fn write_block(&mut self, block: usize, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        for (pool, begin, len) in self.parts() {
            let (own, others) = rest.split_at(len);
            self.gpu.device().write(pool, begin + block * len, own)?;
            rest = others;
        }
        Ok(())
    }
}

impl CacheOps for Arc<GpuBackend> {
    fn pools(&self, layout: KvLayout, num_blocks: usize) -> Result<GpuPools> {
        let len = row_block_bytes(&layout) * num_blocks;
        let allocate = || self.device().allocate(len.max(16), Placement::Private);
        let v = layout.has_values.then(allocate).transpose()?;
        Ok(GpuPools { gpu: Self::clone(self), layout, num_blocks, k: allocate()?, v })
    }
}

/// Copies block `source` to `target` among blocks of `block_bytes`, a multiple of 16, that begin at `begin` of a pool.
fn copy_block(
    gpu: &GpuBackend,
    pool: &GpuBuffer,
    begin: usize,
    block_bytes: usize,
    source: u32,
    target: u32,
) -> Result<()> {
    let num_words = block_bytes / 16;
    let args = [source, target, num_words as u32];
    let buffers = [Binding::read_write(pool).at(begin)];
    let cost = Cost::bytes(2 * block_bytes);
    gpu.launch_simdgroups(Kernel::CopyBlock, bytes_of(&args), &buffers, [num_words.div_ceil(32), 1, 1], cost)
}
