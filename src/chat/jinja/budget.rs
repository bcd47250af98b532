//! What one rendering may cost: bytes of values, work inside filters and methods, and time.
//!
//! Steps of the template itself are counted by the template engine. What a single step may take, such as a string
//! times a million, is charged here by whoever does it, before it is done. One budget belongs to one rendering; it is
//! found through the thread, since values that are compared or written have no other way to it.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use minijinja::{Error, ErrorKind};

use super::value::Namespace;

/// Units of work between two looks at the clock.
const WORK_BETWEEN_LOOKS: usize = 1 << 16;

/// The limits of one rendering.
#[derive(Debug, Clone, Copy)]
pub(in crate::chat) struct Limits {
    /// Instructions of the template.
    pub(in crate::chat) steps: u64,
    /// Bytes of all values that are made while rendering.
    pub(in crate::chat) value_bytes: usize,
    /// Bytes that are written.
    pub(in crate::chat) output_bytes: usize,
    /// From start to end.
    pub(in crate::chat) time: Duration,
}

impl Limits {
    /// Limits for whatever a conversation of `input_bytes` needs. A rendering makes the same text several times: it
    /// trims, splits and joins it. So the limit grows with the input.
    pub(in crate::chat) fn for_input(input_bytes: usize) -> Self {
        Self {
            steps: 20_000_000,
            value_bytes: input_bytes.saturating_mul(32).saturating_add(64 << 20),
            output_bytes: 64 << 20,
            time: Duration::from_secs(4),
        }
    }
}

/// Says that a limit was reached, as the source of a template error.
#[derive(Debug)]
pub(in crate::chat) struct Exceeded(pub(in crate::chat) String);

impl std::fmt::Display for Exceeded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Exceeded {}

struct Budget {
    limits: Limits,
    bytes_left: usize,
    unlooked_work: usize,
    deadline: Instant,
    /// All that were made. They are emptied at the end, since they may hold each other.
    namespaces: Vec<Arc<Namespace>>,
}

thread_local! {
    static CURRENT: RefCell<Option<Budget>> = const { RefCell::new(None) };
}

/// The budget of a rendering on this thread, until this is dropped.
pub(in crate::chat) struct Rendering(());

impl Rendering {
    pub(in crate::chat) fn begin(limits: Limits) -> Self {
        let budget = Budget {
            limits,
            bytes_left: limits.value_bytes,
            unlooked_work: 0,
            deadline: Instant::now() + limits.time,
            namespaces: Vec::new(),
        };
        CURRENT.with(|current| *current.borrow_mut() = Some(budget));
        Self(())
    }
}

impl Drop for Rendering {
    fn drop(&mut self) {
        let budget = CURRENT.with(|current| current.borrow_mut().take());
        for namespace in budget.iter().flat_map(|budget| &budget.namespaces) {
            namespace.clear();
        }
    }
}

/// Pays for values of so many bytes, and for the work of making them.
pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    CURRENT.with(|current| {
        let mut current = current.borrow_mut();
        let Some(budget) = current.as_mut() else { return Ok(()) };
        match budget.bytes_left.checked_sub(bytes) {
            Some(left) => budget.bytes_left = left,
            None => {
                let limit = budget.limits.value_bytes;
                return Err(exceeded(format!("makes values of more than {limit} bytes")));
            }
        }
        budget.work(bytes)
    })
}

/// Pays for work that leaves nothing behind, such as a search in so many bytes.
pub(super) fn work(units: usize) -> Result<(), Error> {
    CURRENT.with(|current| match current.borrow_mut().as_mut() {
        Some(budget) => budget.work(units),
        None => Ok(()),
    })
}

/// Keeps a namespace until the end of the rendering.
pub(super) fn keep(namespace: &Arc<Namespace>) {
    CURRENT.with(|current| {
        if let Some(budget) = current.borrow_mut().as_mut() {
            budget.namespaces.push(Arc::clone(namespace));
        }
    });
}

impl Budget {
    fn work(&mut self, units: usize) -> Result<(), Error> {
        // A call costs something by itself.
        self.unlooked_work = self.unlooked_work.saturating_add(units).saturating_add(16);
        if self.unlooked_work < WORK_BETWEEN_LOOKS {
            return Ok(());
        }
        self.unlooked_work = 0;
        if Instant::now() < self.deadline {
            return Ok(());
        }
        Err(exceeded(format!("takes more than {:?}", self.limits.time)))
    }
}

fn exceeded(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Exceeded(message))
}
