//! What one rendering may cost: bytes of values, work inside filters, operators and methods, and time.
//!
//! Steps of the template itself are counted by the template engine. What a single step may take, such as a string
//! times a million, is charged here by whoever does it, before it is done. One budget belongs to one rendering, or to
//! several that are tries of the same; it is found through the thread, since values that are compared or written have
//! no other way to it.
//!
//! Invariant: what is over stays over. Whoever cannot fail, such as a loop that asks for its next item, ends then, and
//! whoever can fails.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

use minijinja::{Error, ErrorKind, Value};

use super::value::Namespace;
use crate::deadline::Deadline;

/// Units of work between two looks at the clock.
const WORK_BETWEEN_LOOKS: usize = 1 << 16;
/// What a call is of work by itself.
const CALL_WORK: usize = 16;
/// What an allocation takes beside its contents.
const ALLOCATION_BYTES: usize = 32;
/// Bytes that values may take for each byte of a conversation: a rendering makes the same text several times, since it
/// trims, splits and joins it.
const VALUES_PER_BYTE: usize = 32;
/// What they may take in any case. The longest of known templates need a hundredth of it, and several renderings at once
/// find room in a gigabyte.
const MIN_VALUE_BYTES: usize = 64 << 20;
/// What is on nobody's account ([`on_account`]): less than what stands around a request in any case.
const UNCHARGED_BYTES: usize = 256 << 10;
/// What is on the account already for each byte of a conversation, by whoever has it.
const CHARGED_PER_BYTE: usize = 16;
/// What is taken from the account at a time.
const ACCOUNT_STEP: usize = 1 << 20;
/// States of loops that values may hold. Each may hold the one before, and they are let go one inside of the other.
const MAX_KEPT_LOOPS: usize = 100;

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
    /// Time of the processor, so that a busy machine refuses nothing that an idle one takes.
    pub(in crate::chat) time: Duration,
}

impl Limits {
    /// For whatever a conversation of `input_bytes` needs.
    pub(in crate::chat) fn for_input(input_bytes: usize) -> Self {
        let per_byte = |factor: usize, least: usize| input_bytes.saturating_mul(factor).saturating_add(least);
        let micros = u64::try_from(input_bytes).unwrap_or(u64::MAX);
        Self {
            steps: 20_000_000,
            value_bytes: per_byte(VALUES_PER_BYTE, MIN_VALUE_BYTES),
            uncharged_bytes: per_byte(CHARGED_PER_BYTE, UNCHARGED_BYTES),
            work: per_byte(256, 1 << 30),
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

/// What several renderings have cost together.
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

/// Says that a limit was reached, as the source of a template error.
#[derive(Debug)]
struct Exceeded(String);

impl std::fmt::Display for Exceeded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Exceeded {}

/// An account that memory comes from: the server has one for all requests together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Account {
    /// Takes bytes, if there are so many.
    pub(crate) take: fn(usize) -> bool,
    pub(crate) give_back: fn(usize),
}

thread_local! {
    static ACCOUNT: Cell<Option<Account>> = const { Cell::new(None) };
    static CURRENT: RefCell<Option<Budget>> = const { RefCell::new(None) };
}

/// Does work in which the values of templates are taken from this account.
#[cfg(feature = "server")]
pub(crate) fn on_account<T>(account: Account, work: impl FnOnce() -> T) -> T {
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

/// Does work on a text of so many bytes that is on no account yet.
pub(in crate::chat) fn charged_for_text<T>(
    num_bytes: usize,
    work: impl FnOnce() -> crate::Result<T>,
) -> crate::Result<T> {
    /// What comes back in any case.
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
                "what the chat template writes needs {num_bytes} more bytes of memory than there are"
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
    /// Adds to what was spent.
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

/// Pays for values of so many bytes, and for the work of making them.
pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    with(Ok(()), |budget| {
        let bytes = bytes.saturating_add(ALLOCATION_BYTES);
        budget.afford(bytes)?;
        budget.spent.value_bytes += bytes;
        budget.take_from_account()?;
        budget.work(bytes)
    })
}

/// Makes sure that values of so many bytes can be paid for, before a library makes what they come from.
pub(super) fn afford(bytes: usize) -> Result<(), Error> {
    with(Ok(()), |budget| budget.afford(bytes))
}

/// Pays for work that leaves nothing behind, such as a search in so many bytes.
pub(super) fn work(units: usize) -> Result<(), Error> {
    with(Ok(()), |budget| budget.work(units))
}

/// Pays for reading texts from end to end.
pub(super) fn read(values: &[Value]) -> Result<(), Error> {
    work(values.iter().map(|value| value.as_str().map_or(0, str::len)).sum())
}

/// Looks at the clock. For what happens seldom and may have taken long, such as the next turn of a loop.
pub(super) fn look() -> Result<(), Error> {
    with(Ok(()), |budget| {
        budget.check()?;
        budget.spend(CALL_WORK)?;
        budget.look()
    })
}

/// Pays for work of whoever cannot fail; the next one who can does.
pub(super) fn note_work(units: usize) {
    // What is over is remembered.
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
    /// What is over stays over.
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
