//! The memory that everything takes which is sent: one account for all requests together (`--max-request-memory`).
//!
//! Bytes are charged before they are taken, and stay charged until the answer is complete or given up, because what
//! was read lives on in the request. What would go beyond the account is refused, so that small messages cannot become
//! more memory than there is.
//!
//! Work on a thread that takes its time is done within [`charging`]. What it reads there charges the account of its
//! request, wherever in it memory is taken.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use super::error::ApiError;
use crate::llm::return_free_memory;

/// The least account that makes sense: a few requests of the usual size.
pub(super) const MIN_BYTES: usize = 1 << 20;
/// The least account by default. Under it, ordinary requests would be refused.
const MIN_DEFAULT_BYTES: u64 = 64 << 20;
/// The share of free memory that is the account by default.
const DEFAULT_SHARE: u64 = 8;
/// Requests of up to so many bytes get the last of the account, which large ones leave to them.
const SMALL_BYTES: usize = 256 << 10;
/// The part of the account that is left to small requests.
const SMALL_SHARE: usize = 8;
/// After a request that took so much, free memory goes back to the system, because the allocator would keep it.
const LARGE_BYTES: usize = 8 << 20;
/// Time until then.
const RETURN_TIME: Duration = Duration::from_secs(1);
/// Bytes that are taken for a byte of text while a template or a tokenizer works on it.
const WORK_FACTOR: usize = 16;
/// A request's own reader takes so much at a time from the account, which all threads share.
const STEP_BYTES: usize = 16 << 10;

/// What requests may take together if nothing is said, where so many bytes are free.
pub(super) fn default_bytes(free_bytes: u64) -> usize {
    usize::try_from((free_bytes / DEFAULT_SHARE).max(MIN_DEFAULT_BYTES)).unwrap_or(usize::MAX)
}

/// Bytes that an allocation of this size takes, with what the allocator needs for itself.
pub(super) const fn allocated(num_bytes: usize) -> usize {
    match num_bytes {
        0 => 0,
        1..=24 => 32,
        _ => num_bytes.saturating_add(23) & !15,
    }
}

/// The memory of all requests.
#[derive(Debug)]
pub(super) struct RequestMemory {
    limit: usize,
    used: AtomicUsize,
    /// Free memory is going to be given back to the system.
    is_return_due: AtomicBool,
}

impl RequestMemory {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, used: AtomicUsize::new(0), is_return_due: AtomicBool::new(false) }
    }

    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes that requests take now.
    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Gives what is free then back to the system, a moment later and once for many requests.
    fn return_later(self: &Arc<Self>) {
        // Without a runtime there is no server.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if self.is_return_due.swap(true, Ordering::Relaxed) {
            return;
        }
        let account = Arc::clone(self);
        runtime.spawn(async move {
            tokio::time::sleep(RETURN_TIME).await;
            account.is_return_due.store(false, Ordering::Relaxed);
            tokio::task::spawn_blocking(return_free_memory);
        });
    }

    /// Takes bytes for a request that has `own` already.
    ///
    /// # Errors
    /// 429 if they are not there now, 413 if they never are.
    fn take(&self, own: usize, num_bytes: usize) -> Result<(), ApiError> {
        let wanted = own.saturating_add(num_bytes);
        let most = match wanted {
            0..=SMALL_BYTES => self.limit,
            _ => self.limit - self.limit / SMALL_SHARE,
        };
        if wanted > most {
            return Err(ApiError::request_too_large(most, self.limit));
        }
        let take = |used: usize| used.checked_add(num_bytes).filter(|sum| *sum <= most);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => Ok(()),
            Err(used) => Err(ApiError::busy(format!(
                "requests take {used} bytes of memory, and this one needs {num_bytes} more; all together may take \
                 {most} (--max-request-memory); send it again"
            ))),
        }
    }
}

/// A request's part of the account, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Charge {
    account: Arc<RequestMemory>,
    num_bytes: usize,
    /// The most that it was.
    peak: usize,
}

impl Charge {
    pub(super) fn new(account: &Arc<RequestMemory>) -> Self {
        Self { account: Arc::clone(account), num_bytes: 0, peak: 0 }
    }

    pub(super) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Takes more.
    ///
    /// # Errors
    /// 429 if there is not so much now, 413 if there never is.
    pub(super) fn add(&mut self, num_bytes: usize) -> Result<(), ApiError> {
        self.account.take(self.num_bytes, num_bytes)?;
        self.num_bytes += num_bytes;
        self.peak = self.peak.max(self.num_bytes);
        Ok(())
    }

    /// Gives some of it back.
    pub(super) fn give_back(&mut self, num_bytes: usize) {
        let num_bytes = num_bytes.min(self.num_bytes);
        self.num_bytes -= num_bytes;
        self.account.used.fetch_sub(num_bytes, Ordering::Relaxed);
    }

    /// Takes over what another part of the same request has.
    pub(super) fn absorb(&mut self, mut other: Self) {
        self.num_bytes += std::mem::take(&mut other.num_bytes);
        self.peak = self.peak.max(self.num_bytes).max(std::mem::take(&mut other.peak));
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.give_back(self.num_bytes);
        if self.peak >= LARGE_BYTES {
            self.account.return_later();
        }
    }
}

/// The charge of the work on this thread.
struct Running {
    charge: Charge,
    /// Bytes that are charged and not taken yet.
    ahead: usize,
    /// Why something was refused, where the error of a library came between.
    refusal: Option<ApiError>,
}

thread_local! {
    static RUNNING: RefCell<Option<Running>> = const { RefCell::new(None) };
}

/// Does work whose memory goes on this charge, and returns it.
pub(super) fn charging<T>(charge: Charge, work: impl FnOnce() -> T) -> (T, Charge) {
    /// What was charged before, which comes back even after a panic.
    struct Outer(Option<Running>);
    impl Drop for Outer {
        fn drop(&mut self) {
            RUNNING.set(self.0.take());
        }
    }
    let account = Arc::clone(&charge.account);
    let outer = Outer(RUNNING.replace(Some(Running { charge, ahead: 0, refusal: None })));
    let result = work();
    let mut running = RUNNING.take();
    drop(outer);
    if let Some(running) = &mut running {
        running.charge.give_back(running.ahead);
    }
    (result, running.map_or_else(|| Charge::new(&account), |running| running.charge))
}

/// Takes so many bytes for the work on this thread. Work that is on nobody's account, as at the start of the server,
/// takes what it wants.
///
/// # Errors
/// 429 if there is not so much now, 413 if there never is.
pub(super) fn charge(num_bytes: usize) -> Result<(), ApiError> {
    RUNNING.with_borrow_mut(|running| {
        let Some(running) = running else { return Ok(()) };
        if num_bytes > running.ahead {
            let missing = num_bytes - running.ahead;
            let step = missing.next_multiple_of(STEP_BYTES);
            // The last of the account may be less than a step.
            let taken = match running.charge.add(step) {
                Ok(()) => Ok(step),
                Err(_) => running.charge.add(missing).map(|()| missing),
            };
            running.ahead += taken.inspect_err(|error| running.refusal = Some(error.clone()))?;
        }
        running.ahead -= num_bytes;
        Ok(())
    })
}

/// Gives bytes back that the work on this thread took.
pub(super) fn give_back(num_bytes: usize) {
    RUNNING.with_borrow_mut(|running| {
        let Some(running) = running else { return };
        running.ahead += num_bytes;
        if running.ahead > 2 * STEP_BYTES {
            running.charge.give_back(running.ahead - STEP_BYTES);
            running.ahead = STEP_BYTES;
        }
    });
}

/// Works on a text of so many bytes, which takes some of its size while it lasts: copies for a template and of what it
/// writes, pieces, token ids.
///
/// # Errors
/// 429 if there is not so much now, 413 if there never is; those of the work.
pub(super) fn on_text<T>(
    num_bytes: usize,
    work: impl FnOnce() -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let num_bytes = num_bytes.saturating_mul(WORK_FACTOR);
    charge(num_bytes)?;
    let result = work();
    give_back(num_bytes);
    result
}

/// Why memory was refused since this was asked for the last time, if it was.
pub(super) fn refusal() -> Option<ApiError> {
    RUNNING.with_borrow_mut(|running| running.as_mut()?.refusal.take())
}

/// Bytes that the work on this thread has taken.
pub(super) fn taken() -> usize {
    RUNNING
        .with_borrow(|running| running.as_ref().map_or(0, |running| running.charge.num_bytes - running.ahead))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(error: &ApiError) -> String {
        error.body()["error"]["message"].as_str().unwrap().to_owned()
    }

    #[test]
    fn what_is_taken_comes_back() {
        let account = Arc::new(RequestMemory::new(8 << 20));
        let (mut first, mut second) = (Charge::new(&account), Charge::new(&account));
        first.add(5 << 20).unwrap();
        // It would fit alone, and an eighth is for small ones.
        let error = second.add(3 << 20).unwrap_err();
        assert_eq!(error.status(), 429);
        assert!(
            text(&error).contains("--max-request-memory") && text(&error).contains("5242880"),
            "{error:?}"
        );
        second.add(2 << 20).unwrap();
        let mut small = Charge::new(&account);
        small.add(SMALL_BYTES).unwrap();
        assert_eq!(small.add(1).unwrap_err().status(), 429);
        let error = first.add(3 << 20).unwrap_err();
        assert_eq!(error.status(), 413);
        assert!(text(&error).contains("--max-request-memory"), "{error:?}");
        assert_eq!(account.used(), (7 << 20) + SMALL_BYTES);
        first.absorb(second);
        drop((first, small));
        assert_eq!(account.used(), 0);
    }

    #[test]
    fn work_is_charged_and_a_panic_leaves_nothing() {
        let account = Arc::new(RequestMemory::new(8 << 20));
        let (result, rest) = charging(Charge::new(&account), || {
            charge(100).unwrap();
            charge(1 << 20).unwrap();
            assert_eq!(taken(), (1 << 20) + 100);
            give_back(1 << 20);
            assert!(account.used() <= 100 + 2 * STEP_BYTES);
            charge(9 << 20)
        });
        assert_eq!((result.unwrap_err().status().as_u16(), account.used()), (413, 100));
        drop(rest);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            charging(Charge::new(&account), || {
                charge(100).unwrap();
                panic!("on purpose");
            })
        }));
        assert!(panicked.is_err() && account.used() == 0 && taken() == 0);
        // Nobody's account.
        charge(usize::MAX).unwrap();
    }

    #[test]
    fn work_on_a_text_is_charged_while_it_lasts() {
        let account = Arc::new(RequestMemory::new(8 << 20));
        let ((), rest) = charging(Charge::new(&account), || {
            let used = on_text(100_000, || Ok(account.used())).unwrap();
            assert!(used >= 100_000 * WORK_FACTOR && taken() == 0);
            let error =
                on_text(1 << 20, || -> Result<(), ApiError> { panic!("there is no room") }).unwrap_err();
            assert_eq!(error.status(), 413);
        });
        drop(rest);
        assert_eq!(account.used(), 0);
    }

    #[test]
    fn allocations_are_at_least_what_is_asked_for() {
        assert_eq!([0, 1, 24, 25, 40, 41].map(allocated), [0, 32, 32, 48, 48, 64]);
        assert_eq!((default_bytes(8_000_000_000), default_bytes(9)), (1_000_000_000, 64 << 20));
    }
}
