//! The numbers that GGUF files give to element types, including those that cannot be loaded.

use std::fmt;

use crate::weights::FileType;

/// The element type that a file states for a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorType {
    /// A type that can be loaded.
    Known(FileType),
    /// Any other number. The file can be listed, but such a tensor cannot be read.
    Unknown(u32),
}

impl TensorType {
    pub(super) fn from_id(id: u32) -> Self {
        FileType::from_gguf(id).map_or(Self::Unknown(id), Self::Known)
    }

    /// The loadable type, if it is one.
    #[must_use]
    pub fn file_type(self) -> Option<FileType> {
        match self {
            Self::Known(file_type) => Some(file_type),
            Self::Unknown(_) => None,
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(file_type) => file_type.fmt(f),
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
        15 => "Q8_K",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        31 => "Q4_0_4_4",
        32 => "Q4_0_4_8",
        33 => "Q4_0_8_8",
        36 => "IQ4_NL_4_4",
        37 => "IQ4_NL_4_8",
        38 => "IQ4_NL_8_8",
        40 => "NVFP4",
        _ => return None,
    })
}
