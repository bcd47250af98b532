//! Per-layer settings of attention.

use serde_json::Value;

use super::json::{Json, shown};
use crate::config::architecture::Architecture;
use crate::config::defaults::HfWindow;
use crate::{Error, Result};

/// The settings of a layer's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerAttention {
    /// A token attends to itself and the `window - 1` tokens before it; to all before it if none.
    pub window: Option<usize>,
    /// Which of the model's rotations its queries and keys have.
    pub rotation: Rotation,
}

/// One of the rotations of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rotation {
    /// `rope` of the configuration.
    Usual,
    /// `local_rope` of the configuration.
    Local,
    /// None: queries and keys are not rotated.
    None,
}

impl LayerAttention {
    /// All layers alike, with the usual rotation.
    #[must_use]
    pub fn all(num_layers: usize, window: Option<usize>) -> Vec<Self> {
        vec![Self { window, rotation: Rotation::Usual }; num_layers]
    }

    /// Layers with these windows, where they have one with their own rotation if there is one.
    pub(super) fn with_windows(windows: Vec<Option<usize>>, has_local_rope: bool) -> Vec<Self> {
        let own = |window: Option<usize>| match window {
            Some(_) if has_local_rope => Self { window, rotation: Rotation::Local },
            _ => Self { window, rotation: Rotation::Usual },
        };
        windows.into_iter().map(own).collect()
    }

    /// The same layers, some of them without rotation.
    pub(super) fn with_rotations(mut layers: Vec<Self>, is_rotated: &[bool]) -> Vec<Self> {
        for (layer, _) in layers.iter_mut().zip(is_rotated).filter(|(_, is_rotated)| !**is_rotated) {
            layer.rotation = Rotation::None;
        }
        layers
    }

    /// Whether each layer is another one than the last one of every `period` layers.
    pub(super) fn all_but_every(period: usize, num_layers: usize) -> Vec<bool> {
        (1..=num_layers).map(|number| !number.is_multiple_of(period)).collect()
    }
}

/// The window of each layer, as the architecture's class takes the keys of a `config.json`.
pub(super) fn windows(
    file: Json<'_>,
    architecture: &Architecture,
    num_layers: usize,
    notices: &mut Vec<String>,
) -> Result<Vec<Option<usize>>> {
    let none = || vec![None; num_layers];
    let (default, is_switched) = match architecture.hf_defaults.window {
        HfWindow::Unknown => {
            if let Some(kinds) = file.list("layer_types")? {
                kinds_of_layers(kinds, num_layers)?;
            }
            if let Some(window) = file.present("sliding_window") {
                let (window, name) = (shown(window), architecture.hf_name);
                notices.push(format!(
                    "sliding_window = {window} in config.json is ignored: it does not apply to {name}"
                ));
            }
            return Ok(none());
        }
        HfWindow::All(default) => (default, false),
        HfWindow::Local(default) => (Some(default), false),
        HfWindow::SwitchedAll | HfWindow::SwitchedLast(_) => (Some(4_096), true),
    };
    let switch = file.bool("use_sliding_window")?;
    if switch == Some(false) || (is_switched && switch != Some(true)) {
        return Ok(none());
    }
    let default = default.filter(|_| file.is_missing("sliding_window"));
    let Some(window) = file.usize("sliding_window")?.or(default) else { return Ok(none()) };
    let has_window: Vec<bool> = match (file.list("layer_types")?, architecture.hf_defaults.window) {
        (Some(kinds), _) => kinds_of_layers(kinds, num_layers)?,
        (None, HfWindow::SwitchedLast(default)) => {
            let first = file.usize_or("max_window_layers", Some(default))?;
            (0..num_layers).map(|layer| layer >= first).collect()
        }
        (None, HfWindow::Local(_)) => {
            // Folders that transformers 5 has written have the name with the line.
            let period = match file.usize("sliding_window_pattern")? {
                Some(period) => Some(period),
                None => file.usize("_sliding_window_pattern")?,
            };
            let period = period.or(architecture.local_period).filter(|period| *period > 0);
            LayerAttention::all_but_every(period.unwrap_or(usize::MAX), num_layers)
        }
        // Its layers with a window are those without rotation.
        (None, _) if architecture.unrotated_period.is_some() => {
            rotated(file, architecture, num_layers)?.into_iter().map(|is_rotated| !is_rotated).collect()
        }
        (None, _) => vec![true; num_layers],
    };
    Ok(has_window.into_iter().map(|has_window| has_window.then_some(window)).collect())
}

/// Whether each layer is rotated, as the architecture's class takes the keys of a `config.json`.
pub(super) fn rotated(file: Json<'_>, architecture: &Architecture, num_layers: usize) -> Result<Vec<bool>> {
    if architecture.hf_defaults.has_position_kind_key {
        return Ok(vec![file.str("position_embedding_type")? == Some("rope"); num_layers]);
    }
    let Some(period) = architecture.unrotated_period else { return Ok(vec![true; num_layers]) };
    let Some(flags) = file.numbers("no_rope_layers")? else {
        let period = file.usize_or("no_rope_layer_interval", Some(period))?;
        return Ok(LayerAttention::all_but_every(period.max(1), num_layers));
    };
    if flags.len() != num_layers {
        let len = flags.len();
        return Err(Error::invalid_model(format!(
            "no_rope_layers has {len} entries for {num_layers} layers"
        )));
    }
    // In spite of the name, 1 is for those that are rotated.
    Ok(flags.into_iter().map(|flag| flag != 0.0).collect())
}

/// Whether each layer has a window, from the names of its kind.
fn kinds_of_layers(kinds: &[Value], num_layers: usize) -> Result<Vec<bool>> {
    let has_window = |kind: &Value| match kind.as_str() {
        Some("sliding_attention") => Ok(true),
        // The second name is that of Granite 4.
        Some("full_attention" | "attention") => Ok(false),
        _ => Err(Error::unsupported(format!("layer_types has {}, which is not supported", shown(kind)))
            .with_hint("supported are layers of the kinds full_attention and sliding_attention")),
    };
    let all: Vec<bool> = kinds.iter().map(has_window).collect::<Result<_>>()?;
    if kinds.len() != num_layers {
        return Err(Error::invalid_model(format!(
            "layer_types has {} entries for {num_layers} layers",
            kinds.len()
        )));
    }
    Ok(all)
}
