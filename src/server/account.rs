//! The memory of everything that clients send: one account for all requests together
//! (`--max-request-memory`).
//!
//! Bytes are charged before they are allocated. They stay charged until the answer is complete or aborted,
//! because the request keeps what was read. A charge beyond the limit is refused, so that small messages
//! cannot take more memory than there is.
//!
//! All requests of one key, or of one client without a key, may take at most three quarters of what those of
//! others leave. So no client can take all of it, and several together cannot either.
//!
//! Work on a blocking thread runs within [`charging`]. Whatever it reads is charged to its request, at the
//! place where the memory is allocated.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::error::ApiError;
use tinyvllm::engine::ClientId;
use tinyvllm_kernels::return_free_memory;

/// The smallest useful account: a few requests of the usual size.
pub(super) const MIN_BYTES: usize = 1 << 20;
/// The smallest account by default. With less, ordinary requests would be refused.
const MIN_DEFAULT_BYTES: u64 = 64 << 20;
/// The default account is free memory divided by this.
const DEFAULT_FRACTION: u64 = 8;
/// Requests of up to this many bytes may use the last part of the account, which is reserved for them.
const SMALL_BYTES: usize = 256 << 10;
/// The account divided by this is reserved for small requests.
const SMALL_DIVISOR: usize = 8;
/// What other clients leave, divided by this, is out of reach for a client.
const OTHERS_DIVISOR: usize = 4;
/// After a request of this size, free memory is returned to the system. The allocator would keep it.
const LARGE_BYTES: usize = 8 << 20;
/// Delay before that.
const RETURN_TIME: Duration = Duration::from_secs(1);
/// Bytes of memory for each byte of text while a template or a tokenizer works on it.
const WORK_FACTOR: usize = 16;
/// A request takes this much at a time from the account, which all threads share.
const STEP_BYTES: usize = 16 << 10;

/// The default limit of all requests, with this many free bytes.
pub(super) fn default_bytes(free_bytes: u64) -> usize {
    usize::try_from((free_bytes / DEFAULT_FRACTION).max(MIN_DEFAULT_BYTES)).unwrap_or(usize::MAX)
}

/// Bytes that an allocation of this size takes, with the allocator's overhead.
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
    used: Mutex<Used>,
    /// Whether free memory will soon be returned to the system.
    is_return_due: AtomicBool,
}

/// Bytes that requests take.
#[derive(Debug, Default)]
struct Used {
    total: usize,
    /// Bytes of each key or client that has any.
    groups: HashMap<ClientId, usize>,
}

impl Used {
    fn of(&self, group: Option<ClientId>) -> usize {
        group.and_then(|group| self.groups.get(&group)).copied().unwrap_or(0)
    }

    fn add(&mut self, group: Option<ClientId>, num_bytes: usize) {
        self.total += num_bytes;
        if let Some(group) = group
            && num_bytes > 0
        {
            *self.groups.entry(group).or_default() += num_bytes;
        }
    }

    fn remove(&mut self, group: Option<ClientId>, num_bytes: usize) {
        self.total -= num_bytes;
        if let Some(group) = group
            && let Some(own) = self.groups.get_mut(&group)
        {
            *own -= num_bytes;
            if *own == 0 {
                self.groups.remove(&group);
            }
        }
    }
}

impl RequestMemory {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, used: Mutex::default(), is_return_due: AtomicBool::new(false) }
    }

    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes that are charged now.
    pub(super) fn used(&self) -> usize {
        self.lock().total
    }

    fn lock(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns free memory to the system after a delay, once for many requests.
    fn return_later(self: &Arc<Self>) {
        // Without a runtime no server is running.
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

    /// Charges a request of this group, which has `own` bytes already.
    ///
    /// # Errors
    /// 429 if there is too little now, 413 if the request can never have that much.
    fn take(&self, group: Option<ClientId>, own: usize, num_bytes: usize) -> Result<(), ApiError> {
        let wanted = own.saturating_add(num_bytes);
        let most = match wanted {
            0..=SMALL_BYTES => self.limit,
            _ => self.limit - self.limit / SMALL_DIVISOR,
        };
        let within = |bytes: usize| group.map_or(most, |_| most.min(bytes - bytes / OTHERS_DIVISOR));
        if wanted > within(self.limit) {
            return Err(ApiError::request_too_large(within(self.limit), self.limit));
        }
        let mut used = self.lock();
        let (all, of_group) = (used.total, used.of(group));
        let most_of_group = within(self.limit.saturating_sub(all - of_group));
        if of_group.saturating_add(num_bytes) > most_of_group {
            return Err(ApiError::busy(format!(
                "this client's requests use {of_group} bytes of memory, and this one needs {num_bytes} more; the \
                 limit is {most_of_group} for one client next to the others, and {} for all \
                 (--max-request-memory); send it again",
                self.limit
            )));
        }
        if all.saturating_add(num_bytes) > most {
            return Err(ApiError::busy(format!(
                "requests use {all} bytes of memory, and this one needs {num_bytes} more; the limit is {most} \
                 (--max-request-memory); send it again"
            )));
        }
        used.add(group, num_bytes);
        Ok(())
    }
}

/// A request's charge to the account, released on drop.
#[derive(Debug)]
pub(super) struct Charge {
    account: Arc<RequestMemory>,
    /// The client of the request, if there is one.
    group: Option<ClientId>,
    num_bytes: usize,
    /// The largest value so far.
    peak: usize,
}

impl Charge {
    pub(super) fn new(account: &Arc<RequestMemory>) -> Self {
        Self { account: Arc::clone(account), group: None, num_bytes: 0, peak: 0 }
    }

    /// A charge for a request of this key, or of this client without a key.
    pub(super) fn of(account: &Arc<RequestMemory>, group: ClientId) -> Self {
        Self { account: Arc::clone(account), group: Some(group), num_bytes: 0, peak: 0 }
    }

    pub(super) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Charges more.
    ///
    /// # Errors
    /// 429 if there is too little now, 413 if the request can never have that much.
    pub(super) fn add(&mut self, num_bytes: usize) -> Result<(), ApiError> {
        self.account.take(self.group, self.num_bytes, num_bytes)?;
        self.num_bytes += num_bytes;
        self.peak = self.peak.max(self.num_bytes);
        Ok(())
    }

    /// Releases some of it.
    pub(super) fn give_back(&mut self, num_bytes: usize) {
        let num_bytes = num_bytes.min(self.num_bytes);
        self.num_bytes -= num_bytes;
        self.account.lock().remove(self.group, num_bytes);
    }

    /// Merges another charge of the same request.
    pub(super) fn absorb(&mut self, mut other: Self) {
        let num_bytes = std::mem::take(&mut other.num_bytes);
        {
            let mut used = self.account.lock();
            used.remove(other.group, num_bytes);
            used.add(self.group, num_bytes);
        }
        self.num_bytes += num_bytes;
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
    /// Bytes that are charged and not yet used.
    ahead: usize,
    /// Why something was refused. The error may be lost in a library in between.
    refusal: Option<ApiError>,
}

thread_local! {
    static RUNNING: RefCell<Option<Running>> = const { RefCell::new(None) };
}

/// Does work whose memory counts on this charge. Returns the charge with the result.
pub(super) fn charging<T>(charge: Charge, work: impl FnOnce() -> T) -> (T, Charge) {
    /// The charge before this one, restored even after a panic.
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

/// Charges the work on this thread. Outside of [`charging`], such as at the start of the server, nothing is
/// charged.
///
/// # Errors
/// 429 if there is too little now, 413 if the request can never have that much.
pub(super) fn charge(num_bytes: usize) -> Result<(), ApiError> {
    RUNNING.with_borrow_mut(|running| {
        let Some(running) = running else { return Ok(()) };
        if num_bytes > running.ahead {
            let missing = num_bytes - running.ahead;
            let step = missing.next_multiple_of(STEP_BYTES);
            // The rest of the account may be less than a step.
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

/// Releases bytes of the work on this thread.
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

/// Works on a text of this many bytes. While the work runs, a multiple of its size is charged: for copies for
/// a template and its output, chunks, and token ids.
///
/// # Errors
/// 429 if there is too little now, 413 if the request can never have that much; errors of the work.
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

/// Why memory was refused since the last call, if it was.
pub(super) fn refusal() -> Option<ApiError> {
    RUNNING.with_borrow_mut(|running| running.as_mut()?.refusal.take())
}

/// Bytes that the work on this thread has used.
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
        // It would fit alone, but an eighth is reserved for small ones.
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
    fn a_quarter_stays_free_for_other_clients() {
        let account = Arc::new(RequestMemory::new(8 << 20));
        let charge = |number| Charge::of(&account, ClientId(number));
        let mut hog: Vec<Charge> = (0..100).map(|_| charge(1)).collect();
        let refused: Vec<ApiError> = hog.iter_mut().filter_map(|one| one.add(200 << 10).err()).collect();
        assert!(refused.len() >= 100 - 31 && account.used() <= 6 << 20);
        assert!(refused.iter().all(|error| error.status() == 429), "{refused:?}");
        assert!(text(&refused[0]).contains("this client's requests use"), "{}", text(&refused[0]));
        let mut light = charge(2);
        light.add(1 << 20).unwrap();
        assert_eq!(charge(3).add((6 << 20) + 1).unwrap_err().status(), 413);
        // A merged charge counts for its new owner.
        let mut other = charge(2);
        other.absorb(hog.remove(0));
        drop(hog);
        assert_eq!(account.used(), (1 << 20) + (200 << 10));
        let of_second = account.lock().of(Some(ClientId(2)));
        assert_eq!(of_second, account.used());
        drop((light, other));
        assert_eq!(account.used(), 0);
        assert!(account.lock().groups.is_empty());
    }

    /// Also small requests, for which the last part is reserved.
    #[test]
    fn several_clients_together_leave_memory_for_another() {
        let account = Arc::new(RequestMemory::new(64 << 20));
        let mut held = Vec::new();
        for number in 0..4 {
            for size in [8 << 20, SMALL_BYTES, 4 << 10] {
                loop {
                    let mut charge = Charge::of(&account, ClientId(number));
                    if charge.add(size).is_err() {
                        break;
                    }
                    held.push(charge);
                }
            }
        }
        Charge::of(&account, ClientId(9)).add(128 << 10).unwrap();
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
        // No account.
        charge(usize::MAX).unwrap();
    }

    #[test]
    fn work_on_a_text_is_charged_while_it_lasts() {
        let account = Arc::new(RequestMemory::new(8 << 20));
        let ((), rest) = charging(Charge::new(&account), || {
            let used = on_text(100_000, || Ok(account.used())).unwrap();
            assert!(used >= 100_000 * WORK_FACTOR && taken() == 0);
            let error = on_text(1 << 20, || -> Result<(), ApiError> { panic!("no capacity") }).unwrap_err();
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
