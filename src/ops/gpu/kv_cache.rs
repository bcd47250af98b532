//! The keys and values of a layer in a GPU's memory: K and V both `[kv_head][slot][head_dim]` in a block.
//!
//! A value of fp8_e4m3 is a byte. So is one of q8_0, its code with 128 added; the scales of a pool's rows follow all of its blocks: one in
//! half precision for each 32 values, padded to an even number for each row. Blocks are padded to units of 16 bytes,
//! for both.

use std::sync::Arc;

use bytemuck::bytes_of;

use super::attention::LatentRows;
use super::attention::{Pages, Pools};
use super::backend::GpuBackend;
use super::cost::Cost;
use super::kernel::Kernel;
use super::{Binding, GpuBuffer, Placement};
use crate::ops::cpu::paged_cache::KvLayout;
use crate::ops::device::{Held, LayerPools};
use crate::ops::kv_cache::{
    CacheOps, DevicePools, HostAllocator, row_block_bytes, row_block_rows, row_block_sizes,
};
use crate::{Error, Result};

/// The blocks of a layer.
#[derive(Debug)]
pub(crate) struct GpuPools {
    gpu: Arc<GpuBackend>,
    layout: KvLayout,
    num_blocks: usize,
    k: GpuBuffer,
    /// None if the values are the first ones of the keys.
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
        let [values, _] = row_block_sizes(&self.layout);
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

    /// The buffers of layers that all have this layout.
    fn buffers_of<'a>(&self, layers: &'a [Held<LayerPools>]) -> Result<Vec<&'a GpuBuffer>> {
        let pools = layers.iter().map(|layer| layer.on(&self.gpu)).collect::<Result<Vec<&Self>>>()?;
        Ok(pools.into_iter().flat_map(Self::buffers).collect())
    }

    /// The ranges of a block in a buffer, values and scales: the offset of block 0 and the bytes of a block.
    fn ranges_of_a_buffer(&self) -> impl Iterator<Item = (usize, usize)> + Clone + use<> {
        let [values, scales] = row_block_sizes(&self.layout);
        let begin_of_scales = self.num_blocks * values;
        [(0, values), (begin_of_scales, scales)].into_iter().filter(|(_, len)| *len > 0)
    }

    /// The same for each buffer.
    fn ranges(&self) -> impl Iterator<Item = (&GpuBuffer, usize, usize)> {
        let ranges = self.ranges_of_a_buffer();
        self.buffers().flat_map(move |pool| ranges.clone().map(move |(begin, len)| (pool, begin, len)))
    }
}

impl DevicePools for GpuPools {
    fn copy_block(&mut self, source: usize, target: usize) -> Result<()> {
        self.ranges().try_for_each(|(pool, begin, len)| {
            copy_block(&self.gpu, pool, begin, len, source as u32, target as u32)
        })
    }

    fn block_bytes(&self) -> usize {
        self.ranges().map(|(_, _, len)| len).sum()
    }

    fn read_block(&self, block: usize, bytes: &mut [u8]) -> Result<()> {
        self.wait()?;
        self.read_blocks(&mut [(block, bytes)])
    }

    fn read_blocks(&self, blocks: &mut [(usize, &mut [u8])]) -> Result<()> {
        let mut ranges = Vec::new();
        for (block, bytes) in blocks {
            let mut rest = &mut **bytes;
            for (pool, begin, len) in self.ranges() {
                let (own, others) = rest.split_at_mut(len);
                ranges.push((pool, begin + *block * len, own));
                rest = others;
            }
        }
        self.gpu.device().read_finished_ranges(&mut ranges)
    }

    fn wait(&self) -> Result<()> {
        let device = self.gpu.device();
        device.wait(device.commit()?)
    }

    fn host_allocator(&self) -> Result<HostAllocator> {
        let gpu = Arc::clone(&self.gpu);
        Ok(Box::new(move |num_bytes| gpu.device().allocate_host(num_bytes)))
    }

    /// Values of all layers, then scales of all layers: one copy each.
    fn copy_out(&self, layers: &[Held<LayerPools>], block: usize, target: (&GpuBuffer, usize)) -> Result<()> {
        let buffers = self.buffers_of(layers)?;
        let mut at = target.1;
        for (begin, len) in self.ranges_of_a_buffer() {
            self.gpu.device().gather(&buffers, begin + block * len, (target.0, at), len)?;
            at += buffers.len() * len;
        }
        Ok(())
    }

    fn copy_in(&self, layers: &[Held<LayerPools>], block: usize, source: (&GpuBuffer, usize)) -> Result<()> {
        let buffers = self.buffers_of(layers)?;
        let mut at = source.1;
        for (begin, len) in self.ranges_of_a_buffer() {
            self.gpu.device().scatter((source.0, at), &buffers, begin + block * len, len)?;
            at += buffers.len() * len;
        }
        Ok(())
    }

    fn write_block(&mut self, block: usize, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        for (pool, begin, len) in self.ranges() {
            let (own, others) = rest.split_at(len);
            self.gpu.device().write(pool, begin + block * len, own)?;
            rest = others;
        }
        Ok(())
    }
}

impl CacheOps for Arc<GpuBackend> {
    fn pools(&self, layout: KvLayout, num_blocks: usize, num_layers: usize) -> Result<Vec<GpuPools>> {
        let len = row_block_bytes(&layout) * num_blocks;
        let per_layer = if layout.has_values { 2 } else { 1 };
        let buffers =
            self.device().allocate_several(len.max(16), num_layers * per_layer, Placement::Private)?;
        let mut buffers = buffers.into_iter();
        let mut pools = Vec::with_capacity(num_layers);
        while let Some(k) = buffers.next() {
            let v = layout.has_values.then(|| buffers.next()).flatten();
            pools.push(GpuPools { gpu: Self::clone(self), layout, num_blocks, k, v });
        }
        Ok(pools)
    }
}

/// Copies block `source` to `target` among blocks of `block_bytes`, a multiple of 16, from offset `begin` of a pool on.
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
