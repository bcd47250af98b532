//! Rotation and attention have separate definitions.

use super::ReferenceBackend;
use crate::ops::rope_attention::RopeAttention;

impl RopeAttention for ReferenceBackend {}
