//! The paged cache of keys and values: one pool of blocks for each layer.
//!
//! A block has room for `block_size` tokens of one sequence. Which block belongs to whom is decided
//! elsewhere; here a block is a number. The layout inside a block serves the attention kernel. On the CPU:
//! * K is `[kv_head][group][head_dim][16]`: sixteen tokens side by side for each value of the head, so
//!   that the scores of sixteen tokens are computed in the lanes of a vector, without sums across lanes;
//! * V is `[kv_head][slot][head_dim]`, each row padded to a multiple of sixteen values.
//!
//! With latent attention there is one key head, whose first values are also the values: there is K alone.
//!
//! The memory is zero and takes no room before it is first written.
//!
//! On a GPU both are `[kv_head][slot][head_dim]`, without padding; for candle a row for each slot.

use std::fmt;
use std::ptr;
use std::str::FromStr;
use std::sync::Arc;

use half::{bf16, f16};
use memmap2::MmapMut;

use crate::config::ModelConfig;
use crate::ops::context::{Backend, Context};
use crate::ops::cpu::simd::F32x16;
use crate::ops::gpu::{self, GpuBackend, GpuBuffer, LatentRows, Placement, Pools};
use crate::ops::reference::ReferencePools;
use crate::{Error, ErrorKind, Result};

/// Tokens that lie side by side in K, and values that rows of V are padded to.
pub(crate) const LANES: usize = 16;

/// How cached keys and values are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum KvCacheDType {
    /// Half precision: the default.
    #[default]
    F16,
    /// The upper half of a single: less exact than f16, but with the range of a single.
    Bf16,
    /// Single precision: exact, and twice the memory.
    F32,
}

impl KvCacheDType {
    /// Every choice, as it is spelled in flags.
    pub const NAMES: [&str; 4] = ["auto", "f16", "bf16", "f32"];

    /// Bytes of a value.
    #[must_use]
    pub fn size_in_bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

impl fmt::Display for KvCacheDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        })
    }
}

impl FromStr for KvCacheDType {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name.to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::default()),
            "f16" => Ok(Self::F16),
            "bf16" => Ok(Self::Bf16),
            "f32" => Ok(Self::F32),
            _ => Err(Error::invalid_request(format!("{name:?} is not a type for the KV cache"))
                .with_hint(format!("use one of {}", Self::NAMES.join(", ")))),
        }
    }
}

/// Where a value lies in a pool. Offsets are in values, not bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvLayout {
    pub(crate) block_size: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    /// Whether there is a V. Without one, values are the first ones of keys.
    pub(crate) has_values: bool,
}

impl KvLayout {
    fn of(config: &ModelConfig, block_size: usize) -> Self {
        match &config.latent_attention {
            None => Self {
                block_size,
                num_kv_heads: config.num_kv_heads,
                head_dim: config.head_dim,
                has_values: true,
            },
            Some(latent) => Self {
                block_size,
                num_kv_heads: 1,
                head_dim: latent.kv_lora_rank + config.rope.dim,
                has_values: false,
            },
        }
    }

    /// Values between two rows of V.
    pub(crate) fn v_stride(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    fn k_head_len(&self) -> usize {
        self.block_size.next_multiple_of(LANES) * self.head_dim
    }

    fn v_head_len(&self) -> usize {
        if self.has_values { self.block_size * self.v_stride() } else { 0 }
    }

    /// Values of a block of K or of V on a GPU: rows of tokens for each head, without padding.
    fn row_block_len(&self) -> usize {
        self.num_kv_heads * self.block_size * self.head_dim
    }

    fn k_block_len(&self) -> usize {
        self.num_kv_heads * self.k_head_len()
    }

    fn v_block_len(&self) -> usize {
        self.num_kv_heads * self.v_head_len()
    }

    /// The group of sixteen tokens that begins at `slot` (a multiple of sixteen) of a block, in K.
    #[inline(always)]
    pub(crate) fn k_group(&self, block: usize, kv_head: usize, slot: usize) -> usize {
        block * self.k_block_len() + kv_head * self.k_head_len() + slot * self.head_dim
    }

    /// The row of the token at `slot` of a block, in V.
    #[inline(always)]
    pub(crate) fn v_row(&self, block: usize, kv_head: usize, slot: usize) -> usize {
        block * self.v_block_len() + kv_head * self.v_head_len() + slot * self.v_stride()
    }
}

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
        let layout = KvLayout::of(config, block_size);
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
        let (k_len, v_len, row_len) = (layout.k_block_len(), layout.v_block_len(), layout.row_block_len());
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
        let layout = KvLayout::of(config, block_size);
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
        let row_bytes = self.layout.row_block_len() * self.dtype.size_in_bytes();
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

    /// The pools of K and V of a layer, as pointers to values of the cache's type; that of V is null if there is none.
    pub(crate) fn pools(&self, layer: usize) -> Result<(*const u8, *const u8)> {
        match &self.layers[layer] {
            LayerPools::Cpu { k, v } => Ok((k.as_ptr(), v.as_ref().map_or(ptr::null(), |v| v.as_ptr()))),
            _ => Err(elsewhere()),
        }
    }

    pub(crate) fn pools_mut(&mut self, layer: usize) -> Result<(*mut u8, *mut u8)> {
        match &mut self.layers[layer] {
            LayerPools::Cpu { k, v } => {
                Ok((k.as_mut_ptr(), v.as_mut().map_or(ptr::null_mut(), |v| v.as_mut_ptr())))
            }
            _ => Err(elsewhere()),
        }
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

/// A type that the cache can hold.
pub(crate) trait KvElement: Copy + Send + Sync + 'static {
    /// Reads sixteen values.
    ///
    /// # Safety
    /// There are sixteen readable values at `source`; see [`F32x16`] for the vector.
    unsafe fn load<V: F32x16>(source: *const Self) -> V;

    /// Rounds sixteen values.
    ///
    /// # Safety
    /// See [`F32x16`].
    unsafe fn round<V: F32x16>(values: V) -> [Self; LANES];
}

impl KvElement for f16 {
    #[inline(always)]
    unsafe fn load<V: F32x16>(source: *const Self) -> V {
        // SAFETY: the caller guarantees sixteen readable values; f16 is a transparent u16.
        unsafe { V::load_f16(source.cast()) }
    }

    #[inline(always)]
    unsafe fn round<V: F32x16>(values: V) -> [Self; LANES] {
        let mut rounded = [Self::ZERO; LANES];
        // SAFETY: the array has sixteen values; f16 is a transparent u16.
        unsafe { values.store_f16(rounded.as_mut_ptr().cast()) };
        rounded
    }
}

impl KvElement for bf16 {
    #[inline(always)]
    unsafe fn load<V: F32x16>(source: *const Self) -> V {
        // SAFETY: the caller guarantees sixteen readable values; bf16 is a transparent u16.
        unsafe { V::load_bf16(source.cast()) }
    }

    #[inline(always)]
    unsafe fn round<V: F32x16>(values: V) -> [Self; LANES] {
        let mut exact = [0.0; LANES];
        // SAFETY: the array has sixteen values.
        unsafe { values.store(exact.as_mut_ptr()) };
        exact.map(Self::from_f32)
    }
}

impl KvElement for f32 {
    #[inline(always)]
    unsafe fn load<V: F32x16>(source: *const Self) -> V {
        // SAFETY: the caller guarantees sixteen readable values.
        unsafe { V::load(source) }
    }

    #[inline(always)]
    unsafe fn round<V: F32x16>(values: V) -> [Self; LANES] {
        let mut exact = [0.0; LANES];
        // SAFETY: the array has sixteen values.
        unsafe { values.store(exact.as_mut_ptr()) };
        exact
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtype_names_parse_and_print() {
        for name in ["f16", "bf16", "f32"] {
            assert_eq!(name.parse::<KvCacheDType>().unwrap().to_string(), name);
        }
        assert_eq!("auto".parse::<KvCacheDType>().unwrap(), KvCacheDType::F16);
        let error = "fp8".parse::<KvCacheDType>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidRequest);
        assert!(error.hint().unwrap().contains("bf16"));
    }

    #[test]
    fn every_slot_has_memory_of_its_own() {
        for (block_size, head_dim) in [(1, 24), (16, 64), (24, 80), (32, 16)] {
            let layout = KvLayout { block_size, num_kv_heads: 3, head_dim, has_values: true };
            let mut k_seen = vec![false; 2 * layout.k_block_len()];
            let mut v_seen = vec![false; 2 * layout.v_block_len()];
            for (block, kv_head, slot) in
                (0..2).flat_map(|b| (0..3).flat_map(move |h| (0..block_size).map(move |s| (b, h, s))))
            {
                for d in 0..head_dim {
                    let group = layout.k_group(block, kv_head, slot / LANES * LANES);
                    let k = &mut k_seen[group + d * LANES + slot % LANES];
                    assert!(!std::mem::replace(k, true), "K of slot {slot} overlaps");
                    let v = &mut v_seen[layout.v_row(block, kv_head, slot) + d];
                    assert!(!std::mem::replace(v, true), "V of slot {slot} overlaps");
                }
            }
        }
    }
}
