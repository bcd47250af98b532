//! Element types of weight tensors, with their GGUF numbers and block sizes.

use crate::{Error, Result};

/// How the values of a tensor are stored. Quantised types store blocks of values.
///
/// Byte layouts are those of GGUF: see [`crate::blocks`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of a single.
    BF16,
    /// 4-bit codes, one f16 scale for 32 values.
    Q4_0,
    /// 4-bit codes, f16 scale and minimum for 32 values.
    Q4_1,
    /// 5-bit codes, one f16 scale for 32 values.
    Q5_0,
    /// 5-bit codes, f16 scale and minimum for 32 values.
    Q5_1,
    /// 8-bit codes, one f16 scale for 32 values.
    Q8_0,
    /// 4-bit codes in super-blocks of 256 with 6-bit scales and minima.
    Q4K,
    /// 5-bit codes in super-blocks of 256 with 6-bit scales and minima.
    Q5K,
    /// 6-bit codes in super-blocks of 256 with 8-bit scales.
    Q6K,
}

impl DType {
    /// Every type that can be loaded.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// The type with this number in a GGUF file, if it is one that can be loaded.
    #[must_use]
    pub fn from_gguf(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.gguf_id() == id)
    }

    /// The type's number in a GGUF file.
    #[must_use]
    pub fn gguf_id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::BF16 => 30,
        }
    }

    /// The name that GGUF tools print.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Values in a block: 1, 32 or 256. A row is a whole number of blocks.
    #[must_use]
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// True for the block types.
    #[must_use]
    pub fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Bytes of a row of `len` values.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if `len` is not a whole number of blocks or the size overflows.
    pub fn row_bytes(self, len: usize) -> Result<usize> {
        if !len.is_multiple_of(self.block_len()) {
            return Err(Error::invalid_model(format!(
                "a row of {len} values is not a whole number of {} blocks of {}",
                self.name(),
                self.block_len()
            )));
        }
        (len / self.block_len())
            .checked_mul(self.block_bytes())
            .ok_or_else(|| Error::invalid_model(format!("a row of {len} values is too large")))
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_map_both_ways() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_gguf(dtype.gguf_id()), Some(dtype));
        }
        for id in [4, 9, 23, 39, u32::MAX] {
            assert_eq!(DType::from_gguf(id), None);
        }
    }

    #[test]
    fn rows_are_whole_blocks() {
        for (dtype, len, expected) in [
            (DType::F32, 3, Some(12)),
            (DType::BF16, 0, Some(0)),
            (DType::Q4_0, 64, Some(36)),
            (DType::Q4_0, 48, None),
            (DType::Q6K, 512, Some(420)),
            (DType::Q6K, 64, None),
            (DType::F32, usize::MAX, None),
            (DType::Q8_0, usize::MAX - 31, None),
        ] {
            assert_eq!(dtype.row_bytes(len).ok(), expected, "{dtype} {len}");
        }
    }
}
