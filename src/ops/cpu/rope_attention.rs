//! The CPU has separate kernels for rotation and attention.

use super::CpuBackend;
use crate::ops::rope_attention::RopeAttention;

impl RopeAttention for CpuBackend {}
