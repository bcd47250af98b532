//! Any bytes as a GGUF file: an error, or a header whose tensors can all be read.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tinyvllm::weights::gguf::{TensorType, parse_header};

fuzz_target!(|bytes: &[u8]| {
    let Ok(header) = parse_header(bytes) else { return };
    for tensor in &header.tensors {
        let data = bytes.get(tensor.range.clone()).expect("the range was checked against the file");
        if let TensorType::Known(dtype) = tensor.tensor_type {
            let row_len = tensor.shape.last().copied().unwrap_or(1);
            let row_bytes = dtype.row_bytes(row_len).expect("the shape was checked against the type");
            assert_eq!(data.len(), tensor.num_elements() / row_len * row_bytes);
        }
    }
    for key in header.metadata.entries.keys() {
        let _ = header.metadata.usize(key);
        let _ = header.metadata.f64(key);
    }
});
