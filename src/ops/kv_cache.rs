//! The paged cache of keys and values: one pool of blocks for each layer.
//!
//! A block has space for `block_size` tokens of one sequence. Here a block is a number; the scheduler assigns it to a
//! sequence. The layout of a block serves the attention kernels: for the CPU it is that of
//! [`cpu::paged_cache`](crate::ops::cpu::paged_cache), for a GPU K and V are both `[kv_head][slot][head_dim]`, and for
//! candle there is a row for each slot. With latent attention there is one key head, whose first values are also the
//! values: there is K alone.
//!
//! The memory is zero, and the system allocates it on the first write.

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

    /// Copies an existing block to `bytes`, which have the size of a block, in the device's own format.
    fn read_block(&self, block: usize, bytes: &mut [u8]) -> Result<()>;

    /// The same for several blocks. The caller has [waited](Self::wait) for work that writes them.
    fn read_blocks(&self, blocks: &mut [(usize, &mut [u8])]) -> Result<()> {
        blocks.iter_mut().try_for_each(|(block, bytes)| self.read_block(*block, bytes))
    }

    /// An allocator of host memory for copies of blocks, on devices with memory of their own.
    fn host_allocator(&self) -> Result<HostAllocator> {
        Err(Error::unsupported("the cache is in memory of the host already"))
    }

    /// Copies a block of all layers, which are this device's, to host memory, in the order of the device's work. The
    /// format is the device's own.
    fn copy_out(
        &self,
        _layers: &[Held<LayerPools>],
        _block: usize,
        _target: (&GpuBuffer, usize),
    ) -> Result<()> {
        Err(Error::unsupported("the cache is in memory of the host already"))
    }

    /// The inverse of [`copy_out`](Self::copy_out).
    fn copy_in(
        &self,
        _layers: &[Held<LayerPools>],
        _block: usize,
        _source: (&GpuBuffer, usize),
    ) -> Result<()> {
        Err(Error::unsupported("the cache is in memory of the host already"))
    }

    /// Waits for all queued work of the device.
    fn wait(&self) -> Result<()> {
        Ok(())
    }

    /// The inverse of [`read_block`](Self::read_block).
    fn write_block(&mut self, block: usize, bytes: &[u8]) -> Result<()>;
}

/// Allocates this many bytes on the host, on any thread.
pub(crate) type HostAllocator = Box<dyn Fn(usize) -> Result<GpuBuffer> + Send>;

/// The operation of a device.
pub(crate) trait CacheOps: Device {
    /// Zeros for the keys and values of each layer. The size of a layer does not overflow.
    fn pools(&self, layout: KvLayout, num_blocks: usize, num_layers: usize) -> Result<Vec<Self::Pools>>;
}

/// The keys and values of all layers.
pub struct KvCache {
    layout: KvLayout,
    num_blocks: usize,
    /// Of layers with a window, if these have other blocks.
    num_window_blocks: Option<usize>,
    layers: Vec<Held<LayerPools>>,
    /// Whether each layer has a window.
    is_windowed: Vec<bool>,
}

/// Blocks in host memory, in the device's format; the device copies them in the order of its work.
#[derive(Debug)]
pub struct HostBlocks {
    memory: GpuBuffer,
    num_blocks: usize,
    block_bytes: usize,
}

impl HostBlocks {
    /// The capacity in blocks.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// The offset of host block `index`, for blocks of this size.
    fn start_of(&self, index: usize, block_bytes: usize) -> Result<usize> {
        if index >= self.num_blocks || block_bytes != self.block_bytes {
            return Err(Error::internal(format!(
                "host block {index} of {block_bytes} bytes is outside {} blocks of {} bytes",
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
            .field("num_window_blocks", &self.num_window_blocks)
            .field("num_layers", &self.layers.len())
            .finish()
    }
}

impl KvCache {
    /// A cache of `num_blocks` blocks of `block_size` tokens for a model.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`] if a size is 0, [`ErrorKind::Capacity`] if the system does not provide the memory.
    pub fn new(
        context: &Context,
        config: &ModelConfig,
        num_blocks: usize,
        block_size: usize,
        dtype: KvCacheDType,
    ) -> Result<Self> {
        Self::with_window_blocks(context, config, num_blocks, None, block_size, dtype)
    }

    /// The same with another number of blocks in layers with a window, if it is given: block numbers there are those of
    /// [`BlockPool::window_slots`](crate::kv_cache::BlockPool::window_slots).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_window_blocks(
        context: &Context,
        config: &ModelConfig,
        num_blocks: usize,
        num_window_blocks: Option<usize>,
        block_size: usize,
        dtype: KvCacheDType,
    ) -> Result<Self> {
        let layout = layout_of(config, block_size, dtype);
        if num_blocks == 0 || num_window_blocks == Some(0) || block_size == 0 {
            return Err(Error::invalid_request(format!(
                "a KV cache of {num_blocks} blocks of {block_size} tokens cannot hold a token"
            )));
        }
        let largest = layout.k_block_bytes().max(layout.v_block_bytes()).max(row_block_bytes(&layout));
        if largest.checked_mul(num_blocks.max(num_window_blocks.unwrap_or(0))).is_none() {
            return Err(no_memory(num_blocks, block_size, "its size overflows"));
        }
        let is_windowed: Vec<bool> = (0..config.num_layers).map(|layer| config.has_window(layer)).collect();
        let num_windowed = match num_window_blocks {
            Some(_) => is_windowed.iter().filter(|is_windowed| **is_windowed).count(),
            None => 0,
        };
        let layers = on_device!(context.backend(), |device| {
            let mut others = device.pools(layout, num_blocks, config.num_layers - num_windowed)?.into_iter();
            let windows = num_window_blocks.map(|num_blocks| device.pools(layout, num_blocks, num_windowed));
            let mut windows = windows.transpose()?.unwrap_or_default().into_iter();
            let own = |is_windowed: &bool| {
                let windowed = if *is_windowed { windows.next() } else { None };
                windowed.or_else(|| others.next()).map(|pools| Held::new(device, pools))
            };
            is_windowed.iter().map_while(own).collect()
        });
        Ok(Self { layout, num_blocks, num_window_blocks, layers, is_windowed })
    }

    /// Bytes of one token in all layers of a model, including padding.
    #[must_use]
    pub fn bytes_per_token(config: &ModelConfig, block_size: usize, dtype: KvCacheDType) -> usize {
        let block_size = block_size.max(1);
        let layout = layout_of(config, block_size, dtype);
        let in_rows = row_block_bytes(&layout) * if layout.has_values { 2 } else { 1 };
        (config.num_layers * layout.block_bytes().max(in_rows)).div_ceil(block_size)
    }

    /// Blocks of each layer, or of those without a window.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Whether layers with a window have blocks of their own.
    #[must_use]
    pub fn has_window_blocks(&self) -> bool {
        self.num_window_blocks.is_some()
    }

    /// Blocks of layers with a window.
    #[must_use]
    pub fn num_window_blocks(&self) -> usize {
        self.num_window_blocks.unwrap_or(self.num_blocks)
    }

    /// Whether a layer has blocks of its own, because it has a window.
    #[must_use]
    pub fn is_windowed(&self, layer: usize) -> bool {
        self.has_window_blocks() && self.is_windowed.get(layer) == Some(&true)
    }

    /// Blocks of a layer.
    pub(crate) fn num_blocks_of(&self, layer: usize) -> usize {
        if self.is_windowed(layer) { self.num_window_blocks() } else { self.num_blocks }
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

    /// Copies block `source` to block `target`, in all layers that do not have [blocks of their
    /// own](Self::is_windowed).
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if one of them does not exist.
    pub fn copy_block(&mut self, source: u32, target: u32) -> Result<()> {
        self.copy_in_layers(source, target, false)
    }

    /// The same in the other layers, by the numbers there.
    ///
    /// # Errors
    /// As [`copy_block`](Self::copy_block).
    pub fn copy_window_block(&mut self, source: u32, target: u32) -> Result<()> {
        self.copy_in_layers(source, target, true)
    }

    fn copy_in_layers(&mut self, source: u32, target: u32, in_windows: bool) -> Result<()> {
        let (source, target) = (source as usize, target as usize);
        for layer in 0..self.layers.len() {
            if self.is_windowed(layer) != in_windows {
                continue;
            }
            let num_blocks = self.num_blocks_of(layer);
            if source.max(target) >= num_blocks {
                return Err(Error::internal(format!(
                    "cannot copy block {source} to {target} in a cache of {num_blocks} blocks"
                )));
            }
            with_held!(&mut self.layers[layer], |pools| pools.copy_block(source, target))?;
        }
        Ok(())
    }

    /// Bytes of a block in all layers.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.layers.iter().map(layer_bytes).sum()
    }

    /// Copies a block, layer by layer, to `bytes`, exactly. The format is the device's own: only a cache of the same
    /// model, type and kind of device can read it.
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

    /// Copies several blocks as [`read_block`](Self::read_block) does, each to bytes of its own, and waits only once
    /// for queued work.
    ///
    /// # Errors
    /// As [`read_block`](Self::read_block).
    pub fn read_blocks(&self, blocks: &[u32], bytes: &mut [Vec<u8>]) -> Result<()> {
        for (block, bytes) in blocks.iter().zip(&*bytes) {
            self.check_block(*block, bytes.len())?;
        }
        self.wait()?;
        let mut start = 0;
        for layer in &self.layers {
            let end = start + layer_bytes(layer);
            let own = bytes.iter_mut().map(|bytes| &mut bytes[start..end]);
            let mut blocks: Vec<_> = blocks.iter().map(|block| *block as usize).zip(own).collect();
            with_held!(layer, |pools| pools.read_blocks(&mut blocks))?;
            start = end;
        }
        Ok(())
    }

    /// Writes a block from bytes of [`read_block`](Self::read_block).
    ///
    /// # Errors
    /// As [`read_block`](Self::read_block).
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

    /// An allocator of host memory for a number of blocks, on any thread. It fails with [`ErrorKind::Capacity`] if the
    /// system does not provide the memory.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the cache is in host memory itself.
    pub fn host_allocator(&self) -> Result<impl Fn(usize) -> Result<HostBlocks> + Send + use<>> {
        let layer = self.layers.first().ok_or_else(|| Error::internal("a cache without layers"))?;
        let allocate = with_held!(layer, |pools| pools.host_allocator())?;
        let block_bytes = self.block_bytes();
        Ok(move |num_blocks: usize| {
            let num_bytes = block_bytes.checked_mul(num_blocks).ok_or_else(|| {
                let message = format!("the size of {num_blocks} blocks of the host overflows");
                Error::new(ErrorKind::Capacity, message)
            })?;
            Ok(HostBlocks { memory: allocate(num_bytes.max(16))?, num_blocks, block_bytes })
        })
    }

    /// Copies a block to host block `index`, in the order of the device's work. No thread waits for the copy.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if one of the blocks does not exist, or work on the device failed.
    pub fn copy_out(&self, block: u32, host: &HostBlocks, index: usize) -> Result<()> {
        let start = host.start_of(index, self.block_bytes())?;
        self.check_block(block, self.block_bytes())?;
        let (layers, target) = (&self.layers, (&host.memory, start));
        layers
            .first()
            .map_or(Ok(()), |first| with_held!(first, |pools| pools.copy_out(layers, block as usize, target)))
    }

    /// Copies host block `index` to a block, in the same way.
    ///
    /// # Errors
    /// As [`copy_out`](Self::copy_out).
    pub fn copy_in(&mut self, block: u32, host: &HostBlocks, index: usize) -> Result<()> {
        let start = host.start_of(index, self.block_bytes())?;
        self.check_block(block, self.block_bytes())?;
        let (layers, source) = (&self.layers, (&host.memory, start));
        layers
            .first()
            .map_or(Ok(()), |first| with_held!(first, |pools| pools.copy_in(layers, block as usize, source)))
    }

    /// Waits for all queued work of the device.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if it failed.
    pub fn wait(&self) -> Result<()> {
        self.layers.first().map_or(Ok(()), |layer| with_held!(layer, |pools| pools.wait()))
    }

    fn check_block(&self, block: u32, num_bytes: usize) -> Result<()> {
        if self.has_window_blocks() {
            return Err(Error::internal("a block of layers with a window is copied with the others"));
        }
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

/// Rows of a block of K or of V, one for each head and token. Those of bytes are padded to a multiple of four, so that
/// values and scales are both whole units of 16 bytes.
pub(super) fn row_block_rows(layout: &KvLayout) -> usize {
    let num_rows = layout.num_kv_heads * layout.block_size;
    match layout.dtype {
        KvCacheDType::Q8_0 | KvCacheDType::Fp8E4m3 => num_rows.next_multiple_of(4),
        KvCacheDType::F16 | KvCacheDType::Bf16 | KvCacheDType::F32 => num_rows,
    }
}

/// Bytes of the values of such a block, and of its scales, an even number for each row.
pub(super) fn row_block_sizes(layout: &KvLayout) -> [usize; 2] {
    let KvLayout { dtype, head_dim, .. } = *layout;
    let row = match dtype {
        KvCacheDType::Q8_0 => [head_dim, head_dim.div_ceil(2 * GROUP) * 2 * size_of::<f16>()],
        _ => [dtype.row_bytes(head_dim), 0],
    };
    row.map(|bytes| row_block_rows(layout) * bytes)
}

/// Bytes of such a block.
pub(super) fn row_block_bytes(layout: &KvLayout) -> usize {
    row_block_sizes(layout).iter().sum()
}

/// The error if the system does not provide the memory.
pub(super) fn no_memory(num_blocks: usize, block_size: usize, reason: impl fmt::Display) -> Error {
    Error::new(
        ErrorKind::Capacity,
        format!("cannot allocate a KV cache of {num_blocks} blocks of {block_size} tokens: {reason}"),
    )
    .with_hint("use a smaller cache or a shorter context")
}
