//! The paged cache of keys and values: one pool of blocks for each layer.
//!
//! A block has room for `block_size` tokens of one sequence. Which block belongs to whom is decided
//! elsewhere; here a block is a number. The layout inside a block serves the attention kernels: for the CPU it is that of
//! [`cpu::paged_cache`](crate::ops::cpu::paged_cache), for a GPU K and V are both `[kv_head][slot][head_dim]`, and for candle a
//! row for each slot. With latent attention there is one key head, whose first values are also
//! the values: there is K alone.
//!
//! The memory is zero and takes no room before it is first written.

use std::fmt;

use half::f16;

use crate::config::ModelConfig;
use crate::ops::context::Context;
use crate::ops::cpu::paged_cache::{GROUP, KvCacheDType, KvLayout};
use crate::ops::device::{Device, Held, LayerPools, on_device, with_held};
use crate::ops::gpu::GpuBuffer;
use crate::{Error, ErrorKind, Result};

/// The keys and values of a layer on a device.
pub(crate) trait DevicePools: fmt::Debug {
    /// Copies block `source` to `target`; both exist.
    fn copy_block(&mut self, source: usize, target: usize) -> Result<()>;

    /// Bytes of a block: its keys, then its values if there are any.
    fn block_bytes(&self) -> usize;

    /// Copies a block that exists to `bytes`, which are as many as a block has, in a form of the device's own.
    fn read_block(&self, block: usize, bytes: &mut [u8]) -> Result<()>;

    /// The same for several blocks. Work that writes them has been [waited for](Self::wait).
    fn read_blocks(&self, parts: &mut [(usize, &mut [u8])]) -> Result<()> {
        parts.iter_mut().try_for_each(|(block, bytes)| self.read_block(*block, bytes))
    }

    /// Memory of the host that blocks are copied to, for devices that have their own.
    fn allocate_host(&self, _num_bytes: usize) -> Result<GpuBuffer> {
        Err(Error::unsupported("the cache is in memory of the host already"))
    }

    /// Copies a block to such memory, behind the work that the device was given and before what comes.
    fn copy_out(&self, _block: usize, _target: (&GpuBuffer, usize)) -> Result<()> {
        Err(Error::unsupported("the cache is in memory of the host already"))
    }

    /// The same the other way round.
    fn copy_in(&mut self, _block: usize, _source: (&GpuBuffer, usize)) -> Result<()> {
        Err(Error::unsupported("the cache is in memory of the host already"))
    }

    /// Waits for all work that was given to the device.
    fn wait(&self) -> Result<()> {
        Ok(())
    }

    /// [`read_block`](Self::read_block) the other way round.
    fn write_block(&mut self, block: usize, bytes: &[u8]) -> Result<()>;
}

/// What a device implements of the cache.
pub(crate) trait CacheOps: Device {
    /// Zeros for the keys and values of a layer. The product of the sizes is in range.
    fn pools(&self, layout: KvLayout, num_blocks: usize) -> Result<Self::Pools>;
}

/// The keys and values of all layers.
pub struct KvCache {
    layout: KvLayout,
    num_blocks: usize,
    layers: Vec<Held<LayerPools>>,
}

/// Blocks in memory of the host. What is in them is the device's business: it copies in the order of its work.
#[derive(Debug)]
pub struct HostBlocks {
    memory: GpuBuffer,
    num_blocks: usize,
    block_bytes: usize,
}

impl HostBlocks {
    /// Where place `index` begins, for blocks of so many bytes.
    fn start_of(&self, index: usize, block_bytes: usize) -> Result<usize> {
        if index >= self.num_blocks || block_bytes != self.block_bytes {
            return Err(Error::internal(format!(
                "place {index} for a block of {block_bytes} bytes among {} of {}",
                self.num_blocks, self.block_bytes
            )));
        }
        Ok(index * self.block_bytes)
    }
}

impl fmt::Debug for KvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvCache")
            .field("layout", &self.layout)
            .field("num_blocks", &self.num_blocks)
            .field("num_layers", &self.layers.len())
            .finish()
    }
}

impl KvCache {
    /// A cache of `num_blocks` blocks of `block_size` tokens for a model.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`] if a size is 0, [`ErrorKind::Capacity`] if the system does not give the memory.
    pub fn new(
        context: &Context,
        config: &ModelConfig,
        num_blocks: usize,
        block_size: usize,
        dtype: KvCacheDType,
    ) -> Result<Self> {
        let layout = layout_of(config, block_size, dtype);
        if num_blocks == 0 || block_size == 0 {
            return Err(Error::invalid_request(format!(
                "a KV cache of {num_blocks} blocks of {block_size} tokens has no room"
            )));
        }
        let largest = layout.k_block_bytes().max(layout.v_block_bytes()).max(row_block_bytes(&layout));
        if largest.checked_mul(num_blocks).is_none() {
            return Err(no_memory(num_blocks, block_size, "its size overflows"));
        }
        let layer = || {
            on_device!(context.backend(), |device| {
                Ok(Held::new(device, device.pools(layout, num_blocks)?))
            })
        };
        let layers = (0..config.num_layers).map(|_| layer()).collect::<Result<_>>()?;
        Ok(Self { layout, num_blocks, layers })
    }

    /// Bytes that one token takes in all layers of a model, the padding counted in.
    #[must_use]
    pub fn bytes_per_token(config: &ModelConfig, block_size: usize, dtype: KvCacheDType) -> usize {
        let block_size = block_size.max(1);
        let layout = layout_of(config, block_size, dtype);
        let in_rows = row_block_bytes(&layout) * if layout.has_values { 2 } else { 1 };
        (config.num_layers * layout.block_bytes().max(in_rows)).div_ceil(block_size)
    }

    /// Blocks of each layer.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Tokens in a block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.layout.block_size
    }

    /// How values are stored.
    #[must_use]
    pub fn dtype(&self) -> KvCacheDType {
        self.layout.dtype
    }

    /// Copies all layers of block `source` to block `target`.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if one of them does not exist.
    pub fn copy_block(&mut self, source: u32, target: u32) -> Result<()> {
        let (source, target) = (source as usize, target as usize);
        if source.max(target) >= self.num_blocks {
            return Err(Error::internal(format!(
                "cannot copy block {source} to {target} in a cache of {} blocks",
                self.num_blocks
            )));
        }
        for layer in &mut self.layers {
            with_held!(layer, |pools| pools.copy_block(source, target))?;
        }
        Ok(())
    }

    /// Bytes of a block in all layers.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.layers.iter().map(layer_bytes).sum()
    }

    /// Copies a block, layer by layer, to `bytes`, exactly. What they mean is the device's own: they are for a cache of the
    /// same model, type and kind of device.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if the block does not exist, `bytes` are not [`block_bytes`](Self::block_bytes) or work on the
    /// device failed.
    pub fn read_block(&self, block: u32, bytes: &mut [u8]) -> Result<()> {
        self.check_block(block, bytes.len())?;
        let mut rest = bytes;
        for layer in &self.layers {
            let (own, others) = rest.split_at_mut(layer_bytes(layer));
            with_held!(layer, |pools| pools.read_block(block as usize, own))?;
            rest = others;
        }
        Ok(())
    }

    /// Copies several blocks as [`read_block`](Self::read_block) does, each to bytes of its own, and waits only once for the
    /// work that is under way.
    ///
    /// # Errors
    /// As there.
    pub fn read_blocks(&self, blocks: &[u32], bytes: &mut [Vec<u8>]) -> Result<()> {
        for (block, bytes) in blocks.iter().zip(&*bytes) {
            self.check_block(*block, bytes.len())?;
        }
        self.wait()?;
        let mut start = 0;
        for layer in &self.layers {
            let end = start + layer_bytes(layer);
            let own = bytes.iter_mut().map(|bytes| &mut bytes[start..end]);
            let mut parts: Vec<_> = blocks.iter().map(|block| *block as usize).zip(own).collect();
            with_held!(layer, |pools| pools.read_blocks(&mut parts))?;
            start = end;
        }
        Ok(())
    }

    /// Puts into a block what [`read_block`](Self::read_block) has read of one.
    ///
    /// # Errors
    /// As there.
    pub fn write_block(&mut self, block: u32, bytes: &[u8]) -> Result<()> {
        self.check_block(block, bytes.len())?;
        let mut rest = bytes;
        for layer in &mut self.layers {
            let (own, others) = rest.split_at(layer_bytes(layer));
            with_held!(layer, |pools| pools.write_block(block as usize, own))?;
            rest = others;
        }
        Ok(())
    }

    /// Memory of the host for so many blocks.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the cache is there itself, [`ErrorKind::Capacity`] if the system does not give the memory.
    pub fn host_blocks(&self, num_blocks: usize) -> Result<HostBlocks> {
        let num_bytes = self.block_bytes().checked_mul(num_blocks).ok_or_else(|| {
            Error::new(ErrorKind::Capacity, format!("the size of {num_blocks} blocks of the host overflows"))
        })?;
        let layer = self.layers.first().ok_or_else(|| Error::internal("a cache without layers"))?;
        let memory = with_held!(layer, |pools| pools.allocate_host(num_bytes.max(16)))?;
        Ok(HostBlocks { memory, num_blocks, block_bytes: self.block_bytes() })
    }

    /// Copies a block to place `index` in memory of the host, behind the work that the device was given and before what it is
    /// given later. Nobody waits for that.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if there is no such block or place, or work on the device failed.
    pub fn copy_out(&self, block: u32, host: &HostBlocks, index: usize) -> Result<()> {
        let mut start = host.start_of(index, self.block_bytes())?;
        self.check_block(block, self.block_bytes())?;
        for layer in &self.layers {
            with_held!(layer, |pools| pools.copy_out(block as usize, (&host.memory, start)))?;
            start += layer_bytes(layer);
        }
        Ok(())
    }

    /// Puts into a block what is at place `index` in memory of the host, in the same way.
    ///
    /// # Errors
    /// As there.
    pub fn copy_in(&mut self, block: u32, host: &HostBlocks, index: usize) -> Result<()> {
        let mut start = host.start_of(index, self.block_bytes())?;
        self.check_block(block, self.block_bytes())?;
        for layer in &mut self.layers {
            with_held!(layer, |pools| pools.copy_in(block as usize, (&host.memory, start)))?;
            start += layer_bytes(layer);
        }
        Ok(())
    }

    /// Waits for all work that the device was given.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if it failed.
    pub fn wait(&self) -> Result<()> {
        self.layers.first().map_or(Ok(()), |layer| with_held!(layer, |pools| pools.wait()))
    }

    fn check_block(&self, block: u32, num_bytes: usize) -> Result<()> {
        if block as usize >= self.num_blocks || num_bytes != self.block_bytes() {
            return Err(Error::internal(format!(
                "{num_bytes} bytes for block {block} of a cache of {} blocks of {} bytes",
                self.num_blocks,
                self.block_bytes()
            )));
        }
        Ok(())
    }

    pub(crate) fn layout(&self) -> KvLayout {
        self.layout
    }

    pub(crate) fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The keys and values of a layer.
    pub(crate) fn layer(&self, layer: usize) -> &Held<LayerPools> {
        &self.layers[layer]
    }

    pub(crate) fn layer_mut(&mut self, layer: usize) -> &mut Held<LayerPools> {
        &mut self.layers[layer]
    }
}

fn layer_bytes(layer: &Held<LayerPools>) -> usize {
    with_held!(layer, |pools| pools.block_bytes())
}

/// The layout of a model's rows, on any device.
fn layout_of(config: &ModelConfig, block_size: usize, dtype: KvCacheDType) -> KvLayout {
    match &config.latent_attention {
        None => KvLayout {
            dtype,
            block_size,
            num_kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            has_values: true,
        },
        Some(latent) => KvLayout {
            dtype,
            block_size,
            num_kv_heads: 1,
            head_dim: latent.kv_lora_rank + config.rope.dim,
            has_values: false,
        },
    }
}

/// Rows of a block of K or of V in rows of tokens for each head. With scales they are filled up to a multiple of four, so that
/// values and scales both are whole units of 16 bytes.
pub(super) fn row_block_rows(layout: &KvLayout) -> usize {
    let num_rows = layout.num_kv_heads * layout.block_size;
    if layout.dtype == KvCacheDType::Q8_0 { num_rows.next_multiple_of(4) } else { num_rows }
}

/// Bytes of the values of such a block and of the scales apart from them, an even number for each row.
pub(super) fn row_block_parts(layout: &KvLayout) -> [usize; 2] {
    let KvLayout { dtype, head_dim, .. } = *layout;
    let row = match dtype {
        KvCacheDType::Q8_0 => [head_dim, head_dim.div_ceil(2 * GROUP) * 2 * size_of::<f16>()],
        _ => [dtype.row_bytes(head_dim), 0],
    };
    row.map(|bytes| row_block_rows(layout) * bytes)
}

/// Bytes of such a block.
pub(super) fn row_block_bytes(layout: &KvLayout) -> usize {
    row_block_parts(layout).iter().sum()
}

/// That the system does not give the memory.
pub(super) fn no_memory(num_blocks: usize, block_size: usize, reason: impl fmt::Display) -> Error {
    Error::new(
        ErrorKind::Capacity,
        format!("cannot allocate a KV cache of {num_blocks} blocks of {block_size} tokens: {reason}"),
    )
    .with_hint("use a smaller cache or a shorter context")
}
