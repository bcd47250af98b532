//! What is chosen by the size of the chip, and what nobody has chosen yet.

use super::ChipClass;
use super::matmul::Order;

/// Parameters of launches. None of them depends on a batch, so that results do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tuning {
    /// Simdgroups that a product with a vector should have in flight, so that enough reads are under way. A
    /// matrix of fewer rows is divided along its columns.
    pub(super) simdgroups_in_flight: usize,
    /// Keys that flash attention takes at a time where heads have 65 to 128 values in half precision: 16 or 32. With
    /// fewer, a core has room for four threadgroups instead of three; with more, there are fewer barriers.
    pub(super) flash_keys: usize,
    /// Whether products go to the kernels of `tensor_cores` and attention to those of `decode_attention`,
    /// `decode_latent_attention` and `prefill_attention`.
    pub(super) has_tensor_cores: bool,
}

impl Tuning {
    pub(crate) fn has_tensor_cores(self) -> bool {
        self.has_tensor_cores
    }

    /// How weights lie in memory.
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

    /// Forms of kernels that may be faster on Apple GPUs, of which none was at hand, by what is different about them.
    /// `tinyvllm self-test` checks and times them beside those that are used.
    /// Where there are tensor cores, prompts have a kernel of their own.
    pub(crate) fn alternatives(self) -> Option<(&'static str, Self)> {
        (!self.has_tensor_cores).then_some(("32 keys at a time", Self { flash_keys: 32, ..self }))
    }
}
