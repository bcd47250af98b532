//! The host samples.

use super::ReferenceBackend;
use crate::ops::sample::Sample;

impl Sample for ReferenceBackend {}
