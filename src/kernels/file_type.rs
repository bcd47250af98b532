//! Element types that files hold: those that weights are kept as, and those that are repacked when they are loaded.

use crate::{DType, Error, Result};

/// How a file stores the values of a tensor. Byte layouts are those of GGUF: see [`crate::blocks`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FileType {
    /// The type in memory.
    Kept(DType),
    /// In a type that has no kernels.
    Repacked(RepackedType),
}

/// A type of files without kernels. The type that it is [kept as](Self::kept_as) represents its values exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RepackedType {
    /// Eight values from a book of 256, 4-bit scales of 32 values.
    Iq2Xxs,
    /// Eight values from a book of 512, 4-bit scales of 16 values.
    Iq2Xs,
    /// Eight values from a book of 1,024, 4-bit scales of 16 values.
    Iq2S,
    /// Four values from a book of 256, 4-bit scales of 32 values.
    Iq3Xxs,
    /// Four values from a book of 512, 4-bit scales of 32 values.
    Iq3S,
    /// Eight values from a book of 2,048, 3-bit scales of 32 values.
    Iq1S,
    /// The same with scales of 16 values.
    Iq1M,
    /// −1, 0 and 1, five in a byte.
    Tq1_0,
    /// −1, 0 and 1, four in a byte.
    Tq2_0,
    /// −1 and 1, one f16 scale for 128 values.
    Q1_0,
    /// −1 to 2, one f16 scale for 64 values.
    Q2_0,
}

/// The properties of a [`RepackedType`].
struct Description {
    gguf_id: u32,
    name: &'static str,
    block_len: usize,
    block_bytes: usize,
    kept_as: DType,
}

impl RepackedType {
    /// Every one.
    pub const ALL: [Self; 11] = [
        Self::Iq2Xxs,
        Self::Iq2Xs,
        Self::Iq2S,
        Self::Iq3Xxs,
        Self::Iq3S,
        Self::Iq1S,
        Self::Iq1M,
        Self::Tq1_0,
        Self::Tq2_0,
        Self::Q1_0,
        Self::Q2_0,
    ];

    fn description(self) -> Description {
        let (gguf_id, name, block_len, block_bytes, kept_as) = match self {
            Self::Iq2Xxs => (16, "IQ2_XXS", 256, 66, DType::Q8S),
            Self::Iq2Xs => (17, "IQ2_XS", 256, 74, DType::Q8S),
            Self::Iq2S => (22, "IQ2_S", 256, 82, DType::Q8S),
            Self::Iq3Xxs => (18, "IQ3_XXS", 256, 98, DType::Q8S),
            Self::Iq3S => (21, "IQ3_S", 256, 110, DType::Q6K),
            Self::Iq1S => (19, "IQ1_S", 256, 50, DType::Q8S),
            Self::Iq1M => (29, "IQ1_M", 256, 56, DType::Q8S),
            Self::Tq1_0 => (34, "TQ1_0", 256, 54, DType::Q2K),
            Self::Tq2_0 => (35, "TQ2_0", 256, 66, DType::Q2K),
            Self::Q1_0 => (41, "Q1_0", 128, 18, DType::Q4_0),
            Self::Q2_0 => (42, "Q2_0", 64, 18, DType::Q4_0),
        };
        Description { gguf_id, name, block_len, block_bytes, kept_as }
    }

    /// The type that represents its values exactly and has kernels.
    #[must_use]
    pub fn kept_as(self) -> DType {
        self.description().kept_as
    }
}

impl FileType {
    /// Every type that can be loaded from a file.
    pub fn all() -> impl Iterator<Item = Self> {
        let kept = DType::ALL.into_iter().map(Self::Kept);
        kept.chain(RepackedType::ALL.map(Self::Repacked)).filter(|file_type| file_type.gguf_id().is_some())
    }

    /// The type with this number in a GGUF file, if it is one that can be loaded.
    #[must_use]
    pub fn from_gguf(id: u32) -> Option<Self> {
        Self::all().find(|file_type| file_type.gguf_id() == Some(id))
    }

    /// The type's number in a GGUF file; none for the type that only memory has.
    #[must_use]
    pub fn gguf_id(self) -> Option<u32> {
        let dtype = match self {
            Self::Kept(dtype) => dtype,
            Self::Repacked(repacked) => return Some(repacked.description().gguf_id),
        };
        Some(match dtype {
            DType::F32 => 0,
            DType::F16 => 1,
            DType::Q4_0 => 2,
            DType::Q4_1 => 3,
            DType::Q5_0 => 6,
            DType::Q5_1 => 7,
            DType::Q8_0 => 8,
            DType::Q2K => 10,
            DType::Q3K => 11,
            DType::Q4K => 12,
            DType::Q5K => 13,
            DType::Q6K => 14,
            DType::Iq4Nl => 20,
            DType::Iq4Xs => 23,
            DType::BF16 => 30,
            DType::Mxfp4 => 39,
            DType::Q8S => return None,
        })
    }

    /// The type that the values are kept as in memory.
    #[must_use]
    pub fn kept_as(self) -> DType {
        match self {
            Self::Kept(dtype) => dtype,
            Self::Repacked(repacked) => repacked.kept_as(),
        }
    }

    /// The name that GGUF tools print.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kept(dtype) => dtype.name(),
            Self::Repacked(repacked) => repacked.description().name,
        }
    }

    /// Values in a block. A row is a whole number of blocks.
    #[must_use]
    pub fn block_len(self) -> usize {
        match self {
            Self::Kept(dtype) => dtype.block_len(),
            Self::Repacked(repacked) => repacked.description().block_len,
        }
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        match self {
            Self::Kept(dtype) => dtype.block_bytes(),
            Self::Repacked(repacked) => repacked.description().block_bytes,
        }
    }

    /// Bits that a value takes, with its share of the scales.
    #[must_use]
    pub fn bits_per_value(self) -> f64 {
        (8 * self.block_bytes()) as f64 / self.block_len() as f64
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

impl From<DType> for FileType {
    fn from(dtype: DType) -> Self {
        Self::Kept(dtype)
    }
}

impl std::fmt::Display for FileType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_map_both_ways() {
        let mut count = 0;
        for file_type in FileType::all() {
            assert_eq!(file_type.gguf_id().and_then(FileType::from_gguf), Some(file_type));
            count += 1;
        }
        // All but the type of memory alone.
        assert_eq!(count, DType::ALL.len() + RepackedType::ALL.len() - 1);
        for id in [4, 9, 15, 24, 31, 40, 43, u32::MAX] {
            assert_eq!(FileType::from_gguf(id), None, "{id}");
        }
    }

    #[test]
    fn rows_of_repacked_types_are_rows_of_what_they_are_kept_as() {
        for file_type in RepackedType::ALL.map(FileType::Repacked) {
            let kept = file_type.kept_as();
            assert!(file_type.block_len().is_multiple_of(kept.block_len()), "{file_type}");
            assert!(file_type.bits_per_value() < FileType::from(kept).bits_per_value(), "{file_type}");
        }
    }
}
