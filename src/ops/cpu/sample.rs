//! The host samples.

use super::CpuBackend;
use crate::ops::sample::Sample;

impl Sample for CpuBackend {}
