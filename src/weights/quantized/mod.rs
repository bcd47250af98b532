//! Matrices that other programs have quantised, in folders of safetensors.
//!
//! A method stores a matrix as several tensors: codes, scales, zeros. Here they become one matrix under its canonical
//! name, which is read row by row: as values, or as blocks of a type that holds the same values. The tensors decide how
//! they are read; `config.json` only supplies what they leave open. An invalid matrix is an error when it is requested,
//! which names the tensor. This module does not depend on models and converts nothing by itself.

mod awq;
mod bitsandbytes;
mod config;
mod four_bit_floats;
mod fp8;
mod gptq;
mod grid;
mod integers;
mod module;
mod packed;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use super::names;
pub(super) use config::QuantConfig;
pub(super) use module::ComponentTensor;
use module::{ENDINGS, Module, Role};
use packed::Codec;
pub(super) use packed::{Fidelity, PackedTensor};

use crate::{Error, Result};

/// The quantised matrices of a folder.
#[derive(Debug, Default)]
pub(super) struct PackedTensors {
    /// By canonical name, or the file's own for those that have none.
    tensors: BTreeMap<String, Result<PackedTensor>>,
    /// Indices, in the given list, of tensors that belong to one of them or that are not needed.
    parts: BTreeSet<usize>,
    /// Number of scales for a quantised cache.
    num_cache_scales: usize,
    /// True if there are scales for quantised activations, or the configuration speaks of them.
    rounds_activations: bool,
}

impl PackedTensors {
    /// Finds them among all tensors of a folder.
    pub(super) fn find(parts: &[ComponentTensor], config: &QuantConfig) -> Self {
        let mut modules = BTreeMap::<&str, Module<'_>>::new();
        let mut found = Self { rounds_activations: config.rounds_activations(), ..Self::default() };
        let by_name: BTreeMap<_, _> =
            parts.iter().enumerate().map(|(index, part)| (part.name(), (index, part))).collect();
        for (index, part) in parts.iter().enumerate() {
            let ending = ENDINGS.iter().find_map(|(ending, role)| {
                Some((part.name().strip_suffix(ending).filter(|stem| !stem.is_empty())?, *ending, *role))
            });
            let Some((stem, ending, role)) = ending else { continue };
            match role {
                Role::Component => {
                    modules.entry(stem).or_insert_with(|| Module::new(stem)).add(ending, index, part)
                }
                Role::Activation => {
                    found.rounds_activations = true;
                    found.parts.insert(index);
                }
                Role::Cache => {
                    found.num_cache_scales += 1;
                    found.parts.insert(index);
                }
            }
        }
        for (stem, module) in &mut modules {
            // A matrix of experts has a name without an ending.
            if let Some((index, part)) = by_name.get(stem) {
                module.add("", *index, part);
            }
            let Some(codec) = open(module, config) else {
                // Scales are ignored if the weights are not quantised.
                if module.is_dense(".weight") {
                    found.parts.extend(module.sibling_indices(".weight"));
                }
                continue;
            };
            let name = names::canonical(&format!("{}.weight", module.stem()))
                .or_else(|| names::canonical(module.stem()))
                .unwrap_or_else(|| format!("{}.weight", module.stem()));
            let tensor = codec.map(|codec| PackedTensor::new(&name, module, codec));
            found.parts.extend(module.indices());
            found.tensors.insert(name, tensor);
        }
        found
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Whether the tensor at this position is not one by itself.
    pub(super) fn is_part(&self, index: usize) -> bool {
        self.parts.contains(&index)
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The matrix of this name, if there is one.
    pub(super) fn get(&self, name: &str) -> Option<Result<&PackedTensor>> {
        Some(self.tensors.get(name)?.as_ref().map_err(copy_of))
    }

    /// Those that can be read.
    pub(super) fn iter(&self) -> impl Iterator<Item = &PackedTensor> {
        self.tensors.values().filter_map(|tensor| tensor.as_ref().ok())
    }

    /// Checks that all of them can be read.
    ///
    /// # Errors
    /// That of the first one which cannot.
    pub(super) fn ensure_supported(&self) -> Result<()> {
        match self.tensors.values().find_map(|tensor| tensor.as_ref().err()) {
            Some(error) => Err(copy_of(error)),
            None => Ok(()),
        }
    }

    /// Notices about them. `is_converted`: the user has chosen a type for the matrices.
    pub(super) fn notices(&self, is_converted: bool) -> Vec<String> {
        let mut notices = Vec::new();
        let mut changed = BTreeMap::<(&str, String), usize>::new();
        for tensor in self.iter().filter(|_| !is_converted) {
            let what = match tensor.fidelity() {
                Fidelity::Exact => continue,
                Fidelity::RoundedScales => {
                    format!("are kept as {} with scales that are rounded to half precision", tensor.dtype())
                }
                Fidelity::Encoded(why) => format!(
                    "are rounded to {} while loading, since {why} (--dtype bf16 keeps 16 bits, f32 all)",
                    tensor.dtype()
                ),
            };
            *changed.entry((tensor.method(), what)).or_default() += 1;
        }
        for ((method, what), num) in changed {
            let matrices = if num == 1 { "matrix" } else { "matrices" };
            notices.push(format!("{num} {matrices} of {method} {what}"));
        }
        if self.rounds_activations && !self.is_empty() {
            notices.push(
                "the model is made for activations that are rounded to few bits, which is not done here: results \
                 differ a little from those of an engine that does it"
                    .to_owned(),
            );
        }
        if self.num_cache_scales > 0 {
            notices.push(format!(
                "{} scales for a cache of few bits are not used: keys and values are cached as --kv-cache-dtype says",
                self.num_cache_scales
            ));
        }
        notices
    }
}

/// The reader of a module's tensors; none if they are not a quantised matrix.
fn open(module: &Module<'_>, config: &QuantConfig) -> Option<Result<Box<dyn Codec>>> {
    let open: fn(&Module<'_>, &QuantConfig) -> Result<Box<dyn Codec>> = if module.has(".qweight") {
        match awq::is_packed_like_this(module, config) {
            true => awq::open,
            false => gptq::open,
        }
    } else if module.has(".weight_packed") {
        match module.is_bytes(".weight_packed") {
            true => four_bit_floats::open_packed,
            false => integers::open_compressed,
        }
    } else if module.has("_blocks") {
        four_bit_floats::open_blocks
    } else if module.has(".weight.absmax") || module.has(".weight.quant_map") {
        bitsandbytes::open_four_bits
    } else if module.has(".SCB") {
        bitsandbytes::open_eight_bits
    } else if module.is_fp8(".weight") || module.is_fp8("") {
        fp8::open
    } else if module.is_signed_bytes(".weight") && module.has(".weight_scale") {
        integers::open_bytes
    } else if module.is_bytes(".weight") && module.has(".weight_scale_2") {
        four_bit_floats::open_weight
    } else {
        return None;
    };
    Some(open(module, config))
}

fn copy_of(error: &Error) -> Error {
    let copy = Error::new(error.kind(), error.message());
    match error.hint() {
        Some(hint) => copy.with_hint(hint),
        None => copy,
    }
}
