//! The GGUF container.

mod file;
mod header;
mod metadata;
mod reader;
mod tensor_type;

pub use file::GgufFile;
pub use header::{Header, TensorInfo, parse_header};
pub use metadata::{Metadata, Value};
pub use tensor_type::TensorType;

#[cfg(test)]
pub(in crate::weights) mod test_file;
