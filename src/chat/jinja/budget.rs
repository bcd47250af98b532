//! The budget of one rendering: bytes of values, work inside filters, operators and methods, and time.
//!
//! The template engine counts the template's own steps. The cost of a single step, such as a string times a million, is
//! charged here by its caller, before the step. One budget belongs to one rendering, or to several tries of the same;
//! it is found through the thread, since comparing and writing values cannot pass it on.
//!
//! Invariant: an exhausted budget stays exhausted. Code that cannot fail, such as a loop that takes its next item, ends then, and
//! code that can fails.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

use minijinja::{Error, ErrorKind, Value};

use super::value::Namespace;
use crate::deadline::Deadline;

/// Units of work between two looks at the clock.
const WORK_BETWEEN_LOOKS: usize = 1 << 16;
/// The fixed work of a call.
const CALL_WORK: usize = 16;
/// The overhead of an allocation.
const ALLOCATION_BYTES: usize = 32;
/// Bytes that values may take for each byte of a conversation: a rendering makes the same text several times, since it
/// trims, splits and joins it.
const VALUES_PER_BYTE: usize = 32;
/// The budget of every rendering. The longest known templates need a hundredth of it, and several renderings at once
/// fit into a gigabyte.
const MIN_VALUE_BYTES: usize = 64 << 20;
/// Costs below this are not charged to an account ([`on_account`]): it is less than a request's other memory.
const UNCHARGED_BYTES: usize = 256 << 10;
/// Bytes per byte of a conversation that its owner has already charged.
const CHARGED_PER_BYTE: usize = 16;
/// The amount that is drawn from the account at a time.
const ACCOUNT_STEP: usize = 1 << 20;
/// States of loops that values may hold. Each may hold the one before, and they are let go one inside of the other.
const MAX_KEPT_LOOPS: usize = 100;
/// A fuzzer meets the limits as well where they are lower, and tries more in the same time.
const REDUCTION: usize = if cfg!(fuzzing) { 100 } else { 1 };

/// The limits of one rendering.
#[derive(Debug, Clone, Copy)]
pub(in crate::chat) struct Limits {
    /// Instructions of the template.
    pub(in crate::chat) steps: u64,
    /// Bytes of all values that are made while rendering.
    pub(in crate::chat) value_bytes: usize,
    /// Bytes of these that need no account.
    pub(in crate::chat) uncharged_bytes: usize,
    /// Bytes that operators, filters and methods read and write, and a few for each call.
    pub(in crate::chat) work: usize,
    /// Bytes that are written.
    pub(in crate::chat) output_bytes: usize,
    /// Processor time, so that a busy machine refuses no work that an idle one accepts.
    pub(in crate::chat) time: Duration,
}

impl Limits {
    /// The budget for a conversation of `input_bytes`.
    pub(in crate::chat) fn for_input(input_bytes: usize) -> Self {
        let per_byte = |factor: usize, least: usize| input_bytes.saturating_mul(factor).saturating_add(least);
        let micros = u64::try_from(input_bytes).unwrap_or(u64::MAX);
        Self {
            steps: 20_000_000 / REDUCTION as u64,
            value_bytes: per_byte(VALUES_PER_BYTE, MIN_VALUE_BYTES / REDUCTION),
            uncharged_bytes: per_byte(CHARGED_PER_BYTE, UNCHARGED_BYTES),
            work: per_byte(256, (1 << 30) / REDUCTION),
            // More than a source may have, several times.
            output_bytes: per_byte(16, 4 << 20),
            time: Duration::from_secs(2).saturating_add(Duration::from_micros(micros)),
        }
    }

    /// For all the small conversations together that a template is tried with when a model is loaded.
    pub(in crate::chat) fn for_trials() -> Self {
        Self { work: 256 << 20, time: Duration::from_secs(1), ..Self::for_input(0) }
    }
}

/// The cost of several renderings.
#[derive(Debug, Default)]
pub(in crate::chat) struct Spent {
    value_bytes: usize,
    work: usize,
    time: Duration,
    /// The limit that was reached.
    over: Option<String>,
}

impl Spent {
    /// The limit that was reached, if one was, so that there is no use in trying again.
    pub(in crate::chat) fn over(&self) -> Option<&str> {
        self.over.as_deref()
    }

    /// Notes a limit that is counted elsewhere.
    pub(in crate::chat) fn end(&mut self, message: String) {
        self.over.get_or_insert(message);
    }
}

#[cfg(test)]
impl Spent {
    /// Whether no more was taken than one call may be over, and the clock was never needed.
    pub(in crate::chat) fn is_within(&self, limits: &Limits) -> bool {
        self.value_bytes <= limits.value_bytes && self.time < limits.time
    }
}

/// An exceeded limit, as the source of a template error.
#[derive(Debug)]
struct Exceeded(String);

impl std::fmt::Display for Exceeded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Exceeded {}

/// An account that memory comes from, such as one for all requests to a server together.
#[derive(Debug, Clone, Copy)]
pub struct Account {
    /// Takes bytes, if there are this many.
    pub take: fn(usize) -> bool,
    /// Gives bytes back that were taken.
    pub give_back: fn(usize),
}

thread_local! {
    static ACCOUNT: Cell<Option<Account>> = const { Cell::new(None) };
    static CURRENT: RefCell<Option<Budget>> = const { RefCell::new(None) };
}

/// Does work in which the values of templates are taken from this account.
pub fn on_account<T>(account: Account, work: impl FnOnce() -> T) -> T {
    /// Comes back even after a panic.
    struct Outer(Option<Account>);
    impl Drop for Outer {
        fn drop(&mut self) {
            ACCOUNT.set(self.0.take());
        }
    }
    let _outer = Outer(ACCOUNT.replace(Some(account)));
    work()
}

/// Does work on a text of this many bytes that is on no account yet.
pub(in crate::chat) fn charged_for_text<T>(
    num_bytes: usize,
    work: impl FnOnce() -> crate::Result<T>,
) -> crate::Result<T> {
    /// Released in every case.
    struct Charge(Account, usize);
    impl Drop for Charge {
        fn drop(&mut self) {
            (self.0.give_back)(self.1);
        }
    }
    let num_bytes = num_bytes.saturating_mul(CHARGED_PER_BYTE);
    let account = ACCOUNT.get().filter(|_| num_bytes > UNCHARGED_BYTES);
    let _charge = match account {
        Some(account) if (account.take)(num_bytes) => Some(Charge(account, num_bytes)),
        Some(_) => {
            return Err(crate::Error::invalid_request(format!(
                "the output of the chat template needs {num_bytes} more bytes of memory than there are"
            )));
        }
        None => None,
    };
    work()
}

struct Budget {
    limits: Limits,
    spent: Spent,
    unlooked_work: usize,
    deadline: Deadline,
    account: Option<Account>,
    /// Taken from the account.
    on_account: usize,
    num_kept_loops: usize,
    /// All that were made. They are emptied at the end, since they may hold each other.
    namespaces: Vec<Arc<Namespace>>,
}

/// The budget of a rendering on this thread, until this is dropped.
pub(in crate::chat) struct Rendering<'s>(&'s mut Spent);

impl<'s> Rendering<'s> {
    /// Adds to the spending.
    pub(in crate::chat) fn begin(limits: Limits, spent: &'s mut Spent) -> Self {
        let budget = Budget {
            limits,
            deadline: Deadline::new(limits.time.saturating_sub(spent.time)),
            spent: std::mem::take(spent),
            unlooked_work: 0,
            account: ACCOUNT.get(),
            on_account: 0,
            num_kept_loops: 0,
            namespaces: Vec::new(),
        };
        CURRENT.with(|current| *current.borrow_mut() = Some(budget));
        Self(spent)
    }
}

impl Drop for Rendering<'_> {
    fn drop(&mut self) {
        let Some(mut budget) = CURRENT.with(|current| current.borrow_mut().take()) else { return };
        for namespace in &budget.namespaces {
            namespace.clear();
        }
        if let Some(account) = budget.account {
            (account.give_back)(budget.on_account);
        }
        budget.spent.time += budget.deadline.spent();
        *self.0 = budget.spent;
    }
}

fn with<T>(unlimited: T, ask: impl FnOnce(&mut Budget) -> T) -> T {
    CURRENT.with(|current| current.borrow_mut().as_mut().map_or(unlimited, ask))
}

/// Pays for values of this many bytes, and for the work of making them.
pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    with(Ok(()), |budget| {
        let bytes = bytes.saturating_add(ALLOCATION_BYTES);
        budget.afford(bytes)?;
        budget.spent.value_bytes += bytes;
        budget.take_from_account()?;
        budget.work(bytes)
    })
}

/// Checks that values of this many bytes can be paid for, before a library creates their source.
pub(super) fn afford(bytes: usize) -> Result<(), Error> {
    with(Ok(()), |budget| budget.afford(bytes))
}

/// Charges work without a result, such as a search in this many bytes.
pub(super) fn work(units: usize) -> Result<(), Error> {
    with(Ok(()), |budget| budget.work(units))
}

/// Pays for reading texts from end to end.
pub(super) fn read(values: &[Value]) -> Result<(), Error> {
    work(values.iter().map(|value| value.as_str().map_or(0, str::len)).sum())
}

/// Checks the clock. For rare operations that may have taken long, such as the next iteration of a loop.
pub(super) fn look() -> Result<(), Error> {
    with(Ok(()), |budget| {
        budget.check()?;
        budget.spend(CALL_WORK)?;
        budget.look()
    })
}

/// Charges work that cannot fail; the next charge that can fail reports it.
pub(super) fn note_work(units: usize) {
    // An exceeded limit is remembered.
    let _ = work(units);
}

/// Keeps a namespace until the end of the rendering.
pub(super) fn keep(namespace: &Arc<Namespace>) {
    with((), |budget| budget.namespaces.push(Arc::clone(namespace)));
}

/// Counts the state of a loop that a value holds.
pub(super) fn keep_loop() -> Result<(), Error> {
    with(Ok(()), |budget| {
        budget.num_kept_loops += 1;
        if budget.num_kept_loops <= MAX_KEPT_LOOPS {
            return Ok(());
        }
        Err(budget.end(format!("keeps more than {MAX_KEPT_LOOPS} loops in its values")))
    })
}

impl Budget {
    /// An exceeded limit stays exceeded.
    fn check(&self) -> Result<(), Error> {
        self.spent.over.clone().map_or(Ok(()), |message| Err(exceeded(message)))
    }

    fn end(&mut self, message: String) -> Error {
        self.spent.end(message.clone());
        exceeded(message)
    }

    fn afford(&mut self, bytes: usize) -> Result<(), Error> {
        self.check()?;
        let (limit, wanted) = (self.limits.value_bytes, self.spent.value_bytes.saturating_add(bytes));
        if wanted <= limit {
            return Ok(());
        }
        Err(self
            .end(format!("makes values of {wanted} bytes, more than the {limit} that a rendering may take")))
    }

    fn take_from_account(&mut self) -> Result<(), Error> {
        let charged = self.limits.uncharged_bytes.saturating_add(self.on_account);
        let Some(account) = self.account else { return Ok(()) };
        let missing = self.spent.value_bytes.saturating_sub(charged);
        if missing == 0 {
            return Ok(());
        }
        let step = missing.next_multiple_of(ACCOUNT_STEP);
        if (account.take)(step) {
            self.on_account += step;
            return Ok(());
        }
        Err(self.end(format!("needs {step} more bytes of memory for its values than there are")))
    }

    fn work(&mut self, units: usize) -> Result<(), Error> {
        self.check()?;
        let units = units.saturating_add(CALL_WORK);
        self.spend(units)?;
        self.unlooked_work = self.unlooked_work.saturating_add(units);
        if self.unlooked_work < WORK_BETWEEN_LOOKS { Ok(()) } else { self.look() }
    }

    fn spend(&mut self, units: usize) -> Result<(), Error> {
        self.spent.work = self.spent.work.saturating_add(units);
        let (limit, spent) = (self.limits.work, self.spent.work);
        if spent <= limit {
            return Ok(());
        }
        Err(self.end(format!(
            "does work on {spent} bytes of values, more than the {limit} that a rendering may do"
        )))
    }

    fn look(&mut self) -> Result<(), Error> {
        self.unlooked_work = 0;
        if !self.deadline.is_over() {
            return Ok(());
        }
        Err(self.end(format!(
            "takes longer than the {:?} of a processor's time that a rendering may take",
            self.limits.time
        )))
    }
}

fn exceeded(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Exceeded(message))
}
