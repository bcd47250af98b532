//! Writes small GGUF files for tests, valid or broken at one chosen position.

/// A file under construction. The fields are what the bytes will claim, true or not.
#[derive(Clone)]
pub(in crate::weights) struct TestFile {
    pub(in crate::weights) version: u32,
    pub(in crate::weights) alignment: usize,
    pub(in crate::weights) entries: Vec<(String, u32, Vec<u8>)>,
    pub(in crate::weights) tensors: Vec<TestTensor>,
    /// Replace the true counts.
    pub(in crate::weights) num_tensors: Option<u64>,
    pub(in crate::weights) num_entries: Option<u64>,
}

#[derive(Clone)]
pub(in crate::weights) struct TestTensor {
    pub(in crate::weights) name: String,
    pub(in crate::weights) num_dims: u32,
    /// In file order: the row length first.
    pub(in crate::weights) dims: Vec<u64>,
    pub(in crate::weights) type_id: u32,
    pub(in crate::weights) offset: u64,
    pub(in crate::weights) data: Vec<u8>,
}

impl TestFile {
    pub(in crate::weights) fn new() -> Self {
        Self {
            version: 3,
            alignment: 32,
            entries: Vec::new(),
            tensors: Vec::new(),
            num_tensors: None,
            num_entries: None,
        }
    }

    /// Two F32 tensors, one Q8_0 tensor and metadata of several kinds.
    pub(in crate::weights) fn sample() -> Self {
        let mut file = Self::new();
        file.string("general.architecture", "llama");
        file.entry("llama.block_count", 4, &2_u32.to_le_bytes());
        file.entry("llama.rope.freq_base", 6, &1e4_f32.to_le_bytes());
        file.array("tokenizer.ggml.tokens", 8, 3, &[text("a"), text("bc"), text("")].concat());
        file.array("tokenizer.ggml.scores", 6, 2, &[0_u8; 8]);
        file.array("tokenizer.ggml.token_type", 5, 2, &[1, 0, 0, 0, 3, 0, 0, 0]);
        file.entry("tokenizer.ggml.add_bos_token", 7, &[1]);
        file.tensor("output_norm.weight", &[4], 0, &[0; 16]);
        file.tensor("token_embd.weight", &[32, 3], 8, &[0; 102]);
        file.tensor("output.weight", &[4, 2, 3], 0, &[0; 96]);
        file
    }

    pub(in crate::weights) fn entry(&mut self, key: &str, value_type: u32, value: &[u8]) {
        self.entries.push((key.to_owned(), value_type, value.to_vec()));
    }

    pub(in crate::weights) fn string(&mut self, key: &str, value: &str) {
        self.entry(key, 8, &text(value));
    }

    pub(in crate::weights) fn array(&mut self, key: &str, element_type: u32, len: u64, elements: &[u8]) {
        let value = [&element_type.to_le_bytes(), len.to_le_bytes().as_slice(), elements].concat();
        self.entry(key, 9, &value);
    }

    /// Adds a tensor after the others.
    pub(in crate::weights) fn tensor(&mut self, name: &str, dims: &[u64], type_id: u32, data: &[u8]) {
        let end = self.tensors.last().map_or(0, |last| last.offset as usize + last.data.len());
        self.tensors.push(TestTensor {
            name: name.to_owned(),
            num_dims: dims.len() as u32,
            dims: dims.to_vec(),
            type_id,
            offset: end.next_multiple_of(self.alignment) as u64,
            data: data.to_vec(),
        });
    }

    pub(in crate::weights) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        self.put_len(&mut out, self.num_tensors.unwrap_or(self.tensors.len() as u64));
        self.put_len(&mut out, self.num_entries.unwrap_or(self.entries.len() as u64));
        for (key, value_type, value) in &self.entries {
            self.put_len(&mut out, key.len() as u64);
            out.extend(key.as_bytes());
            out.extend(value_type.to_le_bytes());
            out.extend(value);
        }
        for tensor in &self.tensors {
            self.put_len(&mut out, tensor.name.len() as u64);
            out.extend(tensor.name.as_bytes());
            out.extend(tensor.num_dims.to_le_bytes());
            for dim in &tensor.dims {
                self.put_len(&mut out, *dim);
            }
            out.extend(tensor.type_id.to_le_bytes());
            out.extend(tensor.offset.to_le_bytes());
        }
        let data_start = out.len().next_multiple_of(self.alignment);
        for tensor in &self.tensors {
            if let Some(start) = data_start.checked_add(tensor.offset as usize)
                && start < 1 << 20
            {
                out.resize(out.len().max(start), 0);
                out.extend(&tensor.data);
            }
        }
        out
    }

    fn put_len(&self, out: &mut Vec<u8>, len: u64) {
        if self.version == 1 {
            out.extend((len as u32).to_le_bytes());
        } else {
            out.extend(len.to_le_bytes());
        }
    }
}

/// A string as versions 2 and 3 store it.
pub(in crate::weights) fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
}
