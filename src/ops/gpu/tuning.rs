//! Choices by the size of the chip, and choices that are not made yet.

use super::ChipClass;
use super::matmul::Order;

/// Parameters of launches. None of them depends on a batch, so results do not either.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tuning {
    /// The target number of simdgroups in flight for a matmul with a vector, so that reads keep the memory busy. A
    /// matrix of fewer rows is divided along its columns.
    pub(super) simdgroups_in_flight: usize,
    /// Keys of a tile of flash attention for heads of 65 to 128 values in half precision: 16 or 32. With 16, a core has
    /// space for four threadgroups instead of three; with 32, there are fewer barriers.
    pub(super) flash_keys: usize,
    /// Whether matmuls use the kernels of `tensor_cores`, and attention those of `decode_attention`,
    /// `decode_latent_attention` and `prefill_attention`.
    pub(super) has_tensor_cores: bool,
}

impl Tuning {
    pub(crate) fn has_tensor_cores(self) -> bool {
        self.has_tensor_cores
    }

    /// The layout of weights in memory.
    pub(super) fn order(self) -> Order {
        if self.has_tensor_cores { Order::Tiles } else { Order::Rows }
    }

    pub(crate) fn of(class: ChipClass) -> Self {
        let simdgroups_in_flight = match class {
            ChipClass::Base => 512,
            ChipClass::Max => 1536,
            ChipClass::Ultra | ChipClass::Nvidia => 3072,
        };
        Self { simdgroups_in_flight, flash_keys: 16, has_tensor_cores: class == ChipClass::Nvidia }
    }

    /// Kernel variants that may be faster on Apple GPUs, with the difference as their name; no GPU was available to
    /// measure them. `tinyvllm self-test` checks and times them along with the default ones. GPUs with tensor cores
    /// have another kernel for prompts.
    pub(crate) fn alternatives(self) -> Option<(&'static str, Self)> {
        (!self.has_tensor_cores).then_some(("32 keys at a time", Self { flash_keys: 32, ..self }))
    }
}
