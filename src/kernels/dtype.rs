//! Element types of weights in memory, with their block sizes. [`crate::FileType`] has the types of files.

use crate::Result;

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
    /// 2-bit codes in super-blocks of 256 with 4-bit scales and minima.
    Q2K,
    /// 3-bit codes in super-blocks of 256 with 6-bit scales.
    Q3K,
    /// 4-bit codes of values that are not evenly spaced, one f16 scale for 32 values.
    Iq4Nl,
    /// The same codes in super-blocks of 256 with 6-bit scales.
    Iq4Xs,
    /// 4-bit floats, one power of two for 32 values.
    Mxfp4,
    /// 8-bit codes in super-blocks of 256 with 8-bit scales, in eighths. No file has it: types of other files that have
    /// no kernels are exact in it.
    Q8S,
}

impl DType {
    /// Every type that has kernels.
    pub const ALL: [Self; 17] = [
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
        Self::Q2K,
        Self::Q3K,
        Self::Iq4Nl,
        Self::Iq4Xs,
        Self::Mxfp4,
        Self::Q8S,
    ];

    /// The name that GGUF tools print, where they have one.
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
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Iq4Nl => "IQ4_NL",
            Self::Iq4Xs => "IQ4_XS",
            Self::Mxfp4 => "MXFP4",
            Self::Q8S => "Q8_S",
        }
    }

    /// Values in a block: 1, 32 or 256. A row is a whole number of blocks.
    #[must_use]
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Iq4Nl | Self::Mxfp4 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K | Self::Q2K | Self::Q3K | Self::Iq4Xs | Self::Q8S => 256,
        }
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 | Self::Iq4Nl => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Iq4Xs => 136,
            Self::Mxfp4 => 17,
            Self::Q8S => 274,
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
        crate::FileType::from(self).row_bytes(len)
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
