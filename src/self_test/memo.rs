//! The expected results of checks, computed once for all devices.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::oracle::Expected;
use crate::Result;

/// Keeps the expected result of every check for its lifetime. Threads that run the same check wait for one of them.
#[derive(Default)]
pub struct Memo(Mutex<HashMap<String, Slot>>);

/// Locked while it is computed.
type Slot = Arc<Mutex<Option<Arc<Expected>>>>;

impl fmt::Debug for Memo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Memo")
    }
}

impl Memo {
    /// The result for [`Report::expected`](super::Report::expected).
    ///
    /// # Errors
    /// Those of `compute`, which is then tried again the next time.
    pub fn expected(
        &self,
        name: &str,
        compute: &mut dyn FnMut() -> Result<Expected>,
    ) -> Result<Arc<Expected>> {
        let slot = {
            let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(known.entry(name.to_owned()).or_default())
        };
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(expected) = &*slot {
            return Ok(Arc::clone(expected));
        }
        let expected = Arc::new(compute()?);
        Ok(Arc::clone(slot.insert(expected)))
    }
}
