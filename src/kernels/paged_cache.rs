//! How the CPU's kernels find keys and values in the pool of a layer.
//!
//! A block has space for `block_size` tokens of one sequence. Its layout serves the attention kernel:
//! * K is `[kv_head][group][head_dim][16]`: sixteen tokens side by side for each value of the head, so
//!   that the scores of sixteen tokens are computed in the lanes of a vector, without sums across lanes;
//! * V is `[kv_head][slot][head_dim]`, each row padded to a multiple of sixteen values.
//!
//! [`crate::q8_0`] has its own groups of sixteen, whose codes serve byte dot products.
//!
//! With latent attention there is one key head, whose first values are also the values: there is K alone.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

use crate::simd::F32x16;
use crate::{Error, Result, q8_0};

/// Tokens that are adjacent in K, and the multiple that rows of V are padded to.
pub const LANES: usize = 16;

/// Values of a token's head that share a scale, in types with scales.
pub const GROUP: usize = 32;

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
    /// Whole numbers from -127 to 127 times a scale in half precision, for each [`GROUP`] values of a token's head; the
    /// last group of a head may be shorter. The scale is the smallest that reaches the largest magnitude.
    Q8_0,
    /// Floats of eight bits, [`E4m3`](crate::fp8::E4m3), without a scale: exactly half the memory of f16.
    Fp8E4m3,
}

impl KvCacheDType {
    /// Every choice, as spelled in flags.
    pub const NAMES: [&str; 6] = ["auto", "f16", "bf16", "f32", "q8_0", "fp8_e4m3"];

    /// All types.
    pub const ALL: [Self; 5] = [Self::F16, Self::Bf16, Self::F32, Self::Q8_0, Self::Fp8E4m3];

    /// Bytes of this many values of a token's head, with their scales but without a layout's padding.
    #[must_use]
    pub fn row_bytes(self, num_values: usize) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2 * num_values,
            Self::F32 => 4 * num_values,
            Self::Q8_0 => num_values + num_values.div_ceil(GROUP) * size_of::<f16>(),
            Self::Fp8E4m3 => num_values,
        }
    }
}

impl fmt::Display for KvCacheDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::Q8_0 => "q8_0",
            Self::Fp8E4m3 => "fp8_e4m3",
        })
    }
}

impl FromStr for KvCacheDType {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let name = name.to_ascii_lowercase();
        match name.as_str() {
            "auto" => Ok(Self::default()),
            "f16" | "float16" | "half" => Ok(Self::F16),
            "bf16" | "bfloat16" => Ok(Self::Bf16),
            "f32" | "float32" | "float" => Ok(Self::F32),
            "q8_0" => Ok(Self::Q8_0),
            "fp8" | "fp8_e4m3" => Ok(Self::Fp8E4m3),
            // vLLM's.
            name if name.starts_with("fp8") => {
                Err(Error::invalid_request(format!("{name:?} is a type of the KV cache without a kernel"))
                    .with_hint("use fp8_e4m3 or q8_0, which take as much memory"))
            }
            _ => Err(Error::invalid_request(format!("{name:?} is not a type for the KV cache"))
                .with_hint(format!("use one of {}", Self::NAMES.join(", ")))),
        }
    }
}

/// The contents of a block, their format, and the index of a value in a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// How values are stored.
    pub dtype: KvCacheDType,
    /// Tokens in a block.
    pub block_size: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Values of a key head.
    pub head_dim: usize,
    /// Whether there is a V. Without one, values are the first ones of keys.
    pub has_values: bool,
}

impl KvLayout {
    /// Values between two rows of V.
    #[must_use]
    pub fn v_stride(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Groups of sixteen slots in a block, of which the last may be filled up.
    pub(crate) fn num_sixteens(&self) -> usize {
        self.block_size.div_ceil(LANES)
    }

    fn k_head_len(&self) -> usize {
        self.block_size.next_multiple_of(LANES) * self.head_dim
    }

    fn v_head_len(&self) -> usize {
        if self.has_values { self.block_size * self.v_stride() } else { 0 }
    }

    /// Bytes of a block of K, the padding counted in.
    #[must_use]
    pub fn k_block_bytes(&self) -> usize {
        match self.dtype {
            KvCacheDType::Q8_0 => self.num_kv_heads * self.num_sixteens() * q8_0::key_bytes(self),
            dtype => dtype.row_bytes(self.k_block_len()),
        }
    }

    /// Bytes of a block of V, the padding counted in.
    #[must_use]
    pub fn v_block_bytes(&self) -> usize {
        match self.dtype {
            _ if !self.has_values => 0,
            KvCacheDType::Q8_0 => self.num_kv_heads * self.num_sixteens() * q8_0::value_bytes(self),
            dtype => dtype.row_bytes(self.v_block_len()),
        }
    }

    /// Bytes of a block: its keys, then its values if there are any.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.k_block_bytes() + self.v_block_bytes()
    }

    /// Values of a block of K, the padding counted in.
    #[must_use]
    pub fn k_block_len(&self) -> usize {
        self.num_kv_heads * self.k_head_len()
    }

    /// Values of a block of V, the padding counted in.
    #[must_use]
    pub fn v_block_len(&self) -> usize {
        self.num_kv_heads * self.v_head_len()
    }

    /// The group of sixteen tokens that begins at `slot` (a multiple of sixteen) of a block, in K.
    #[must_use]
    #[inline(always)]
    pub fn k_group(&self, block: usize, kv_head: usize, slot: usize) -> usize {
        block * self.k_block_len() + kv_head * self.k_head_len() + slot * self.head_dim
    }

    /// The row of the token at `slot` of a block, in V.
    #[must_use]
    #[inline(always)]
    pub fn v_row(&self, block: usize, kv_head: usize, slot: usize) -> usize {
        block * self.v_block_len() + kv_head * self.v_head_len() + slot * self.v_stride()
    }
}

/// The pools of a layer, and how they are laid out.
#[derive(Debug, Clone, Copy)]
pub struct CachePools<'a> {
    /// The index of values, and their format.
    pub layout: KvLayout,
    /// The bytes of all blocks' K.
    pub k: &'a [u8],
    /// The same of V, if there is one.
    pub v: Option<&'a [u8]>,
}

/// The same to write to.
#[derive(Debug)]
pub struct CachePoolsMut<'a> {
    /// The index of values, and their format.
    pub layout: KvLayout,
    /// The bytes of all blocks' K.
    pub k: &'a mut [u8],
    /// The same of V, if there is one.
    pub v: Option<&'a mut [u8]>,
}

/// A format of the cache, for writing.
pub trait KvFormat: Sized + Send + Sync + 'static {
    /// Rounds values `first..` of a key to the slot of a block: [`GROUP`] of them, or the last ones; `first` is a multiple
    /// of `GROUP`.
    ///
    /// # Safety
    /// The pool has this layout and the block, and no other code uses this head of the slot; see [`F32x16`] for the
    /// vector.
    unsafe fn store_key<V: F32x16>(pool: *mut Self, layout: &KvLayout, at: Slot, first: usize, key: &[f32]);

    /// The same of a value.
    ///
    /// # Safety
    /// As of [`Self::store_key`].
    unsafe fn store_value<V: F32x16>(
        pool: *mut Self,
        layout: &KvLayout,
        at: Slot,
        first: usize,
        value: &[f32],
    );
}

/// The index of a token's head.
#[derive(Debug, Clone, Copy)]
pub struct Slot {
    /// The block.
    pub block: usize,
    /// The key and value head.
    pub kv_head: usize,
    /// The slot in the block.
    pub slot: usize,
}

impl Slot {
    /// The slot with this number of the whole cache.
    #[must_use]
    #[inline(always)]
    pub fn of(layout: &KvLayout, slot: usize, kv_head: usize) -> Self {
        Self { block: slot / layout.block_size, kv_head, slot: slot % layout.block_size }
    }
}

impl<E: KvElement> KvFormat for E {
    #[inline(always)]
    unsafe fn store_key<V: F32x16>(pool: *mut Self, layout: &KvLayout, at: Slot, first: usize, key: &[f32]) {
        let group = layout.k_group(at.block, at.kv_head, at.slot / LANES * LANES) + at.slot % LANES;
        for (d, values) in (first..).step_by(LANES).zip(key.chunks(LANES)) {
            // SAFETY: the group is in the pool and has sixteen values for each of `head_dim`.
            unsafe {
                let keys = round::<V, E>(values);
                for (index, key) in keys[..values.len()].iter().enumerate() {
                    pool.add(group + (d + index) * LANES).write(*key);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn store_value<V: F32x16>(
        pool: *mut Self,
        layout: &KvLayout,
        at: Slot,
        first: usize,
        value: &[f32],
    ) {
        let row = layout.v_row(at.block, at.kv_head, at.slot);
        for (d, values) in (first..).step_by(LANES).zip(value.chunks(LANES)) {
            // SAFETY: the row is in the pool, and rows of V are padded to whole vectors.
            unsafe { pool.add(row + d).cast::<[E; LANES]>().write_unaligned(round::<V, E>(values)) };
        }
    }
}

/// Pads to sixteen values with zeros.
///
/// # Safety
/// See [`F32x16`].
#[inline(always)]
unsafe fn round<V: F32x16, E: KvElement>(values: &[f32]) -> [E; LANES] {
    let mut padded = [0.0; LANES];
    padded[..values.len()].copy_from_slice(values);
    // SAFETY: the array has sixteen values.
    unsafe { E::round(V::load(padded.as_ptr())) }
}

/// A type that the cache can hold.
pub trait KvElement: Copy + Send + Sync + 'static {
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
    use crate::ErrorKind;

    #[test]
    fn dtype_names_parse_and_print() {
        for dtype in KvCacheDType::ALL {
            assert!(KvCacheDType::NAMES.contains(&dtype.to_string().as_str()));
            assert_eq!(dtype.to_string().parse::<KvCacheDType>().unwrap(), dtype);
        }
        assert_eq!("auto".parse::<KvCacheDType>().unwrap(), KvCacheDType::F16);
        assert_eq!("BFloat16".parse::<KvCacheDType>().unwrap(), KvCacheDType::Bf16);
        assert_eq!("fp8".parse::<KvCacheDType>().unwrap(), KvCacheDType::Fp8E4m3);
        for (name, way_out) in [("int4", "bf16"), ("fp8_e5m2", "use fp8_e4m3 or q8_0")] {
            let error = name.parse::<KvCacheDType>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidRequest);
            assert!(error.message().contains(name) && error.hint().unwrap().contains(way_out), "{error:?}");
        }
    }

    #[test]
    fn eight_bit_floats_take_half_of_the_memory() {
        for (block_size, head_dim, has_values) in [(16, 128, true), (7, 80, true), (32, 576, false)] {
            let bytes = |dtype| {
                let layout = KvLayout { dtype, block_size, num_kv_heads: 2, head_dim, has_values };
                layout.block_bytes()
            };
            assert_eq!(2 * bytes(KvCacheDType::Fp8E4m3), bytes(KvCacheDType::F16));
        }
    }

    #[test]
    fn every_slot_has_memory_of_its_own() {
        for (block_size, head_dim) in [(1, 24), (16, 64), (24, 80), (32, 16)] {
            let layout = KvLayout {
                dtype: KvCacheDType::F16,
                block_size,
                num_kv_heads: 3,
                head_dim,
                has_values: true,
            };
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
