//! The numbers that GGUF files give to element types, including those that cannot be loaded.

use std::fmt;

use crate::weights::DType;

/// The element type that a file states for a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorType {
    /// A type that can be loaded.
    Known(DType),
    /// Any other number. The file can be listed, but such a tensor cannot be read.
    Unknown(u32),
}

impl TensorType {
    pub(super) fn from_id(id: u32) -> Self {
        DType::from_gguf(id).map_or(Self::Unknown(id), Self::Known)
    }

    /// The loadable type, if it is one.
    #[must_use]
    pub fn dtype(self) -> Option<DType> {
        match self {
            Self::Known(dtype) => Some(dtype),
            Self::Unknown(_) => None,
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(dtype) => dtype.fmt(f),
            Self::Unknown(id) => match unsupported_name(*id) {
                Some(name) => f.write_str(name),
                None => write!(f, "number {id}"),
            },
        }
    }
}

fn unsupported_name(id: u32) -> Option<&'static str> {
    Some(match id {
        4 => "Q4_2",
        5 => "Q4_3",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        31 => "Q4_0_4_4",
        32 => "Q4_0_4_8",
        33 => "Q4_0_8_8",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        40 => "NVFP4",
        _ => return None,
    })
}
