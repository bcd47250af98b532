//! Rotation and attention are definitions of their own.

use super::ReferenceBackend;
use crate::ops::rope_attention::RopeAttention;

impl RopeAttention for ReferenceBackend {}
