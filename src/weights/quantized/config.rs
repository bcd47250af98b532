//! The quantisation configuration of a folder, in addition to the tensors.

use serde_json::Value;

use super::module::WAY_OUT;
use crate::{Error, Result};

/// `quantization_config` of `config.json`, or the separate file of older programs.
#[derive(Debug, Clone, Default)]
pub(in crate::weights) struct QuantConfig {
    value: Value,
}

impl QuantConfig {
    /// The files of older programs that have the configuration, where `config.json` has none.
    pub(in crate::weights) const FILES: [&str; 3] =
        ["quantize_config.json", "quant_config.json", "hf_quant_config.json"];

    /// From `config.json`, or from the first of [`Self::FILES`] that `read` finds.
    ///
    /// # Errors
    /// Those of `read`.
    pub(in crate::weights) fn new(
        config: &Value,
        read: impl Fn(&str) -> Result<Option<Value>>,
    ) -> Result<Self> {
        let inside = [Some(config), config.get("text_config")]
            .into_iter()
            .flatten()
            .flat_map(|config| [config.get("quantization_config"), config.get("compression_config")])
            .flatten()
            .find(|value| value.is_object());
        if let Some(value) = inside {
            return Ok(Self { value: value.clone() });
        }
        for name in Self::FILES {
            if let Some(value) = read(name)? {
                return Ok(Self { value });
            }
        }
        Ok(Self::default())
    }

    /// The name of the method, if there is one.
    pub(in crate::weights) fn method(&self) -> Option<&str> {
        let nested = || self.value.get("quantization").and_then(|inner| inner.get("quant_algo"));
        self.value.get("quant_method").or_else(nested).and_then(Value::as_str)
    }

    /// A variant that the method's name does not give: the layout, the packing.
    fn format(&self) -> Option<&str> {
        ["checkpoint_format", "format", "packing_format", "version"].iter().find_map(|key| self.str(key))
    }

    /// Names the method in an error about a tensor that cannot be read, if there is one.
    pub(in crate::weights) fn explain(&self, error: Error) -> Error {
        let Some(method) = self.method() else { return error };
        let format = self.format().map(|format| format!(" in the format {format:?}")).unwrap_or_default();
        let message =
            format!("weights quantised by {method:?}{format} are not supported: {}", error.message());
        Error::new(error.kind(), message).with_hint(WAY_OUT)
    }

    pub(super) fn str(&self, key: &str) -> Option<&str> {
        self.value.get(key).and_then(Value::as_str)
    }

    pub(super) fn bool(&self, key: &str) -> Option<bool> {
        self.value.get(key).and_then(Value::as_bool)
    }

    /// A size that has to be positive; -1 and null mean that there is none.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] with the key for anything else.
    pub(super) fn size(&self, keys: &[&str]) -> Result<Option<usize>> {
        let Some((key, value)) = keys.iter().find_map(|key| Some((key, self.value.get(key)?))) else {
            return Ok(None);
        };
        match (value, value.as_u64().and_then(|size| usize::try_from(size).ok())) {
            (_, Some(size)) if size > 0 => Ok(Some(size)),
            _ if value.is_null() || value.as_i64() == Some(-1) => Ok(None),
            _ => Err(Error::invalid_model(format!(
                "{key} of the quantisation is {value}, but has to be a positive number, or -1"
            ))),
        }
    }

    /// Rows and columns that share a scale.
    pub(super) fn block(&self) -> Option<[usize; 2]> {
        let groups = self.value.get("config_groups").and_then(Value::as_object);
        let nested = || groups?.values().find_map(|group| group.get("weights")?.get("block_structure"));
        let sizes = self.value.get("weight_block_size").or_else(nested)?.as_array()?;
        let size = |index: usize| usize::try_from(sizes.get(index)?.as_u64()?).ok().filter(|size| *size > 0);
        Some([size(0)?, size(1)?])
    }

    /// Whether an engine that the model was made for rounds activations.
    pub(super) fn rounds_activations(&self) -> bool {
        let groups = self.value.get("config_groups").and_then(Value::as_object);
        let in_group = |group: &Value| group.get("input_activations").is_some_and(|value| !value.is_null());
        groups.is_some_and(|groups| groups.values().any(in_group))
            || self.value.get("activation_scheme").is_some_and(|value| !value.is_null())
            || self.method() == Some("fbgemm_fp8")
    }
}
