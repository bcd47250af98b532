//! The paged cache of keys and values: one pool of blocks for each layer.
//!
//! A block has room for `block_size` tokens of one sequence. Which block belongs to whom is decided
//! elsewhere; here a block is a number. The layout inside a block serves the attention kernels: for the CPU it is that of
//! [`cpu::paged_cache`](crate::ops::cpu::paged_cache), for a GPU K and V are both `[kv_head][slot][head_dim]`, without
//! padding, and for candle a row for each slot. With latent attention there is one key head, whose first values are also
//! the values: there is K alone.
//!
//! The memory is zero and takes no room before it is first written.

use std::fmt;
use std::sync::Arc;

use memmap2::MmapMut;

use crate::config::ModelConfig;
use crate::ops::context::{Backend, Context};
use crate::ops::cpu::paged_cache::{CachePools, CachePoolsMut, KvCacheDType, KvLayout};
use crate::ops::gpu::{self, GpuBackend, GpuBuffer, LatentRows, Placement, Pools};
use crate::ops::reference::ReferencePools;
use crate::{Error, ErrorKind, Result};

/// The keys and values of all layers.
pub struct KvCache {
    layout: KvLayout,
    dtype: KvCacheDType,
    num_blocks: usize,
    layers: Vec<LayerPools>,
    /// The device, if it is a GPU.
    gpu: Option<Arc<GpuBackend>>,
}

enum LayerPools {
    Cpu { k: MmapMut, v: Option<MmapMut> },
    Gpu { k: GpuBuffer, v: Option<GpuBuffer> },
    Reference(ReferencePools),
}

impl fmt::Debug for KvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvCache")
            .field("layout", &self.layout)
            .field("dtype", &self.dtype)
            .field("num_blocks", &self.num_blocks)
            .field("num_layers", &self.layers.len())
            .finish()
    }
}

impl KvCache {
    /// A cache of `num_blocks` blocks of `block_size` tokens for a model.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`] if a size is 0, [`ErrorKind::Capacity`] if the system does not give
    /// the memory.
    pub fn new(
        context: &Context,
        config: &ModelConfig,
        num_blocks: usize,
        block_size: usize,
        dtype: KvCacheDType,
    ) -> Result<Self> {
        let layout = layout_of(config, block_size);
        if num_blocks == 0 || block_size == 0 {
            return Err(Error::invalid_request(format!(
                "a KV cache of {num_blocks} blocks of {block_size} tokens has no room"
            )));
        }
        let bytes = |block_len: usize| {
            block_len
                .checked_mul(dtype.size_in_bytes())
                .and_then(|bytes| bytes.checked_mul(num_blocks))
                .ok_or_else(|| no_memory(num_blocks, block_size, "its size overflows"))
        };
        let map = |block_len: usize| {
            MmapMut::map_anon(bytes(block_len)?).map_err(|error| no_memory(num_blocks, block_size, error))
        };
        let (k_len, v_len, row_len) = (layout.k_block_len(), layout.v_block_len(), row_block_len(&layout));
        let gpu = match context.backend() {
            Backend::Cpu(_) | Backend::Reference(_) => None,
            Backend::Gpu(gpu) => Some(Arc::clone(gpu)),
        };
        let layer = || match context.backend() {
            Backend::Cpu(_) => {
                let v = layout.has_values.then(|| map(v_len)).transpose()?;
                Ok(LayerPools::Cpu { k: map(k_len)?, v })
            }
            Backend::Reference(reference) => {
                let (num_slots, width) = (num_blocks * block_size, layout.num_kv_heads * layout.head_dim);
                let pools = ReferencePools::new(reference, num_slots, width, layout.has_values, dtype)?;
                Ok(LayerPools::Reference(pools))
            }
            Backend::Gpu(gpu) => {
                let allocate = || gpu.device().allocate(bytes(row_len)?.max(16), Placement::Private);
                let v = layout.has_values.then(allocate).transpose()?;
                Ok(LayerPools::Gpu { k: allocate()?, v })
            }
        };
        let layers = (0..config.num_layers).map(|_| layer()).collect::<Result<_>>()?;
        Ok(Self { layout, dtype, num_blocks, layers, gpu })
    }

    /// Bytes that one token takes in all layers of a model, the padding counted in.
    #[must_use]
    pub fn bytes_per_token(config: &ModelConfig, block_size: usize, dtype: KvCacheDType) -> usize {
        let block_size = block_size.max(1);
        let layout = layout_of(config, block_size);
        let block_bytes = (layout.k_block_len() + layout.v_block_len()) * dtype.size_in_bytes();
        (config.num_layers * block_bytes).div_ceil(block_size)
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
        self.dtype
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
        let k_bytes = self.layout.k_block_len() * self.dtype.size_in_bytes();
        let v_bytes = self.layout.v_block_len() * self.dtype.size_in_bytes();
        let row_bytes = row_block_len(&self.layout) * self.dtype.size_in_bytes();
        for layer in &mut self.layers {
            match (layer, &self.gpu) {
                (LayerPools::Cpu { k, v }, _) => {
                    k.copy_within(source * k_bytes..(source + 1) * k_bytes, target * k_bytes);
                    if let Some(v) = v {
                        v.copy_within(source * v_bytes..(source + 1) * v_bytes, target * v_bytes);
                    }
                }
                (LayerPools::Gpu { k, v }, Some(gpu)) => {
                    for pool in [Some(&*k), v.as_ref()].into_iter().flatten() {
                        gpu::copy_block(gpu, pool, row_bytes, source as u32, target as u32)?;
                    }
                }
                (LayerPools::Gpu { .. }, None) => return Err(elsewhere()),
                (LayerPools::Reference(pools), _) => {
                    pools.copy_block(self.layout.block_size, source, target)?;
                }
            }
        }
        Ok(())
    }

    pub(crate) fn layout(&self) -> KvLayout {
        self.layout
    }

    pub(crate) fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The pools of a layer, where the CPU's kernels read them.
    pub(crate) fn pools(&self, layer: usize) -> Result<CachePools<'_>> {
        let LayerPools::Cpu { k, v } = &self.layers[layer] else { return Err(elsewhere()) };
        Ok(CachePools { layout: self.layout, dtype: self.dtype, k, v: v.as_deref() })
    }

    pub(crate) fn pools_mut(&mut self, layer: usize) -> Result<CachePoolsMut<'_>> {
        let LayerPools::Cpu { k, v } = &mut self.layers[layer] else { return Err(elsewhere()) };
        Ok(CachePoolsMut { layout: self.layout, dtype: self.dtype, k, v: v.as_deref_mut() })
    }

    /// The pools of a layer as candle's tensors.
    pub(crate) fn reference(&self, layer: usize) -> Result<&ReferencePools> {
        match &self.layers[layer] {
            LayerPools::Reference(pools) => Ok(pools),
            _ => Err(elsewhere()),
        }
    }

    pub(crate) fn reference_mut(&mut self, layer: usize) -> Result<&mut ReferencePools> {
        match &mut self.layers[layer] {
            LayerPools::Reference(pools) => Ok(pools),
            _ => Err(elsewhere()),
        }
    }

    /// The pools of a layer on a GPU.
    pub(crate) fn gpu(&self, layer: usize) -> Result<Pools<'_>> {
        let LayerPools::Gpu { k, v: Some(v) } = &self.layers[layer] else { return Err(elsewhere()) };
        let KvLayout { block_size, num_kv_heads, head_dim, .. } = self.layout;
        Ok(Pools { k, v, dtype: self.dtype, num_kv_heads, head_dim, block_size })
    }

    /// The latent rows of a layer on a GPU.
    pub(crate) fn gpu_rows(&self, layer: usize) -> Result<LatentRows<'_>> {
        let LayerPools::Gpu { k: rows, v: None } = &self.layers[layer] else { return Err(elsewhere()) };
        let KvLayout { block_size, head_dim: row_dim, .. } = self.layout;
        Ok(LatentRows { rows, dtype: self.dtype, row_dim, block_size })
    }
}

/// The layout of a model's rows, on any device.
fn layout_of(config: &ModelConfig, block_size: usize) -> KvLayout {
    match &config.latent_attention {
        None => KvLayout {
            block_size,
            num_kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            has_values: true,
        },
        Some(latent) => KvLayout {
            block_size,
            num_kv_heads: 1,
            head_dim: latent.kv_lora_rank + config.rope.dim,
            has_values: false,
        },
    }
}

/// Values of a block of K or of V on a GPU: rows of tokens for each head, without padding.
fn row_block_len(layout: &KvLayout) -> usize {
    layout.num_kv_heads * layout.block_size * layout.head_dim
}

fn elsewhere() -> Error {
    Error::internal("the KV cache is on another device")
}

fn no_memory(num_blocks: usize, block_size: usize, reason: impl fmt::Display) -> Error {
    Error::new(
        ErrorKind::Capacity,
        format!("cannot allocate a KV cache of {num_blocks} blocks of {block_size} tokens: {reason}"),
    )
    .with_hint("use a smaller cache or a shorter context")
}
