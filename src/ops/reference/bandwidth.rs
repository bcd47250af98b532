//! candle's devices have no measurement of bandwidth.

use super::ReferenceBackend;
use crate::ops::bandwidth::Bandwidth;

impl Bandwidth for ReferenceBackend {}
