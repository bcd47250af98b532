//! The tensors of a folder by module, with lookups by suffix.

use std::collections::BTreeMap;

use ::safetensors::Dtype;
use half::{bf16, f16};

use super::fp8;
use crate::weights::SharedBytes;
use crate::{Error, Result};

/// The role of a tensor with a certain suffix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// A tensor of a matrix.
    Component,
    /// About activations that are rounded.
    Activation,
    /// About keys and values that are rounded.
    Cache,
}

/// The endings of names after that of the module, the longer one first where one ends like another.
pub(super) const ENDINGS: [(&str, Role); 35] = [
    // GPTQ and AWQ.
    (".qweight", Role::Component),
    (".qzeros", Role::Component),
    (".scales", Role::Component),
    (".g_idx", Role::Component),
    // compressed-tensors, FP8.
    (".weight_packed", Role::Component),
    (".weight_scale", Role::Component),
    (".weight_scale_inv", Role::Component),
    (".weight_scale_2", Role::Component),
    (".weight_zero_point", Role::Component),
    (".weight_shape", Role::Component),
    (".weight_g_idx", Role::Component),
    (".weight_global_scale", Role::Component),
    // bitsandbytes.
    (".weight.absmax", Role::Component),
    (".weight.quant_map", Role::Component),
    (".weight.nested_absmax", Role::Component),
    (".weight.nested_quant_map", Role::Component),
    (".weight.quant_state.bitsandbytes__nf4", Role::Component),
    (".weight.quant_state.bitsandbytes__fp4", Role::Component),
    (".SCB", Role::Component),
    (".weight_format", Role::Component),
    // Matrices of experts in one tensor, whose names have no ending of their own.
    ("_blocks", Role::Component),
    ("_scale_inv", Role::Component),
    (".input_scale", Role::Activation),
    (".input_global_scale", Role::Activation),
    (".input_zero_point", Role::Activation),
    (".activation_scale", Role::Activation),
    (".input_scale_ub", Role::Activation),
    (".k_scale", Role::Cache),
    (".v_scale", Role::Cache),
    (".q_scale", Role::Cache),
    (".kv_scale", Role::Cache),
    (".output_scale", Role::Cache),
    ("_scales", Role::Component),
    ("_scale", Role::Component),
    (".weight", Role::Component),
];

/// A tensor of a file.
#[derive(Debug, Clone)]
pub(in crate::weights) struct ComponentTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: SharedBytes,
}

impl ComponentTensor {
    /// `bytes` must match the type and the shape.
    pub(in crate::weights) fn new(name: &str, dtype: Dtype, shape: &[usize], bytes: SharedBytes) -> Self {
        Self { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
    }

    /// The name in the file.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub(super) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(super) fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes may go from memory; they stay readable.
    pub(super) fn release(&self) {
        self.bytes.release();
    }

    /// Element `index` of 32-bit words.
    pub(super) fn word(&self, index: usize) -> u32 {
        let bytes = &self.bytes[4 * index..][..4];
        u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    /// Element `index` of floats of any type for which [`Self::is_float`] is true.
    pub(super) fn float(&self, index: usize) -> f32 {
        let half = || [self.bytes[2 * index], self.bytes[2 * index + 1]];
        match self.dtype {
            Dtype::F32 => f32::from_bits(self.word(index)),
            Dtype::F16 => f16::from_le_bytes(half()).to_f32(),
            Dtype::BF16 => bf16::from_le_bytes(half()).to_f32(),
            Dtype::F8_E4M3 => fp8::e4m3(self.bytes[index]),
            Dtype::F8_E8M0 | Dtype::U8 => fp8::e8m0(self.bytes[index]),
            _ => f32::NAN,
        }
    }

    /// Whether the elements are scales: floats, or bytes that are exponents.
    pub(super) fn is_float(&self) -> bool {
        matches!(
            self.dtype,
            Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8_E4M3 | Dtype::F8_E8M0 | Dtype::U8
        )
    }

    /// The same if it has this type.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] with both types otherwise.
    pub(super) fn of_type(&self, types: &[Dtype]) -> Result<&Self> {
        if types.contains(&self.dtype) {
            return Ok(self);
        }
        let types: Vec<_> = types.iter().map(ToString::to_string).collect();
        Err(Error::unsupported(format!(
            "tensor {:?} has the type {}, which cannot be read there (only {})",
            self.name,
            self.dtype,
            types.join(", ")
        ))
        .with_hint(WAY_OUT))
    }

    /// The same if it has this shape.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] with both shapes otherwise.
    pub(super) fn of_shape(&self, shape: &[usize]) -> Result<&Self> {
        if self.shape == shape { Ok(self) } else { Err(self.wrong_shape(format!("{shape:?} is needed"))) }
    }

    /// The error for a shape that does not match; `needed` is the expected one.
    pub(super) fn wrong_shape(&self, needed: impl std::fmt::Display) -> Error {
        Error::invalid_model(format!("tensor {:?} has the shape {:?}, but {needed}", self.name, self.shape))
    }

    /// Rows and columns of a matrix.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if it is not a matrix, or an empty one.
    pub(super) fn matrix(&self) -> Result<[usize; 2]> {
        match self.shape[..] {
            [rows, cols] if rows > 0 && cols > 0 => Ok([rows, cols]),
            _ => Err(self.wrong_shape("it has to be a matrix")),
        }
    }
}

/// The hint for a weight format that is not supported.
pub(super) const WAY_OUT: &str =
    "use the unquantised model, with --quantization to make it smaller, or a GGUF file";

/// The tensors of one matrix, by the suffixes of their names.
#[derive(Debug)]
pub(super) struct Module<'a> {
    stem: &'a str,
    parts: BTreeMap<&'static str, (usize, &'a ComponentTensor)>,
}

impl<'a> Module<'a> {
    pub(super) fn new(stem: &'a str) -> Self {
        Self { stem, parts: BTreeMap::new() }
    }

    pub(super) fn add(&mut self, ending: &'static str, index: usize, part: &'a ComponentTensor) {
        self.parts.insert(ending, (index, part));
    }

    /// The common prefix of the names.
    pub(super) fn stem(&self) -> &'a str {
        self.stem
    }

    /// Indices of the tensors.
    pub(super) fn indices(&self) -> impl Iterator<Item = usize> {
        self.parts.values().map(|(index, _)| *index)
    }

    /// The tensors with another suffix.
    pub(super) fn sibling_indices(&self, ending: &str) -> impl Iterator<Item = usize> {
        self.parts.iter().filter(move |(own, _)| **own != ending).map(|(_, (index, _))| *index)
    }

    pub(super) fn parts(&self) -> impl Iterator<Item = &'a ComponentTensor> {
        self.parts.values().map(|(_, part)| *part)
    }

    pub(super) fn has(&self, ending: &str) -> bool {
        self.parts.contains_key(ending)
    }

    pub(super) fn get(&self, ending: &str) -> Option<&'a ComponentTensor> {
        self.parts.get(ending).map(|(_, part)| *part)
    }

    /// The tensor with this suffix.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if there is none.
    pub(super) fn need(&self, ending: &str) -> Result<&'a ComponentTensor> {
        self.get(ending).ok_or_else(|| {
            let sibling = self.parts().next().map(|part| part.name()).unwrap_or_default();
            Error::invalid_model(format!(
                "tensor \"{}{ending}\" is missing, which {sibling:?} needs",
                self.stem
            ))
            .with_hint("the files are damaged or not complete; fetch them again")
        })
    }

    /// Scales with this ending.
    ///
    /// # Errors
    /// If they are missing or no floats.
    pub(super) fn need_floats(&self, ending: &str) -> Result<&'a ComponentTensor> {
        let part = self.need(ending)?;
        if part.is_float() { Ok(part) } else { part.of_type(&[Dtype::F32, Dtype::F16, Dtype::BF16]) }
    }

    pub(super) fn is_fp8(&self, ending: &str) -> bool {
        self.is_of(ending, &[Dtype::F8_E4M3, Dtype::F8_E5M2])
    }

    pub(super) fn is_bytes(&self, ending: &str) -> bool {
        self.is_of(ending, &[Dtype::U8])
    }

    pub(super) fn is_signed_bytes(&self, ending: &str) -> bool {
        self.is_of(ending, &[Dtype::I8])
    }

    pub(super) fn is_dense(&self, ending: &str) -> bool {
        self.is_of(ending, &[Dtype::F32, Dtype::F16, Dtype::BF16])
    }

    fn is_of(&self, ending: &str, types: &[Dtype]) -> bool {
        self.get(ending).is_some_and(|part| types.contains(&part.dtype))
    }
}
