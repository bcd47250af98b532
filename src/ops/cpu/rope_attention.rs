//! Rotation and attention are kernels of their own.

use super::CpuBackend;
use crate::ops::rope_attention::RopeAttention;

impl RopeAttention for CpuBackend {}
