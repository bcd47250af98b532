//! The expected results of checks, computed once for all devices of this process.

use std::sync::{Arc, LazyLock};

use tinyvllm::Result;
use tinyvllm::self_test::{Check, Expected, Memo, Report};

static MEMO: LazyLock<Memo> = LazyLock::new(Memo::default);

/// The result for [`Report::expected`].
pub(crate) fn expected(name: &str, compute: &mut dyn FnMut() -> Result<Expected>) -> Result<Arc<Expected>> {
    MEMO.expected(name, compute)
}

/// Receives all checks, and keeps their expected results.
pub(crate) struct Remembering<F>(pub(crate) F);

impl<F: FnMut(Check)> Report for Remembering<F> {
    fn hear(&mut self, check: Check) {
        self.0(check);
    }

    fn expected(
        &mut self,
        name: &str,
        compute: &mut dyn FnMut() -> Result<Expected>,
    ) -> Result<Arc<Expected>> {
        expected(name, compute)
    }
}
