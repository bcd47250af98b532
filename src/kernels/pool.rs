//! The one thread pool: every kernel that uses several cores runs through it.
//!
//! Workers spin for a short while after a job, because the next kernel of a step follows within microseconds, and then
//! park. No thread waits for a worker that has not begun: if the system runs something else instead, the others do the
//! work. The assignment of tasks to threads does not affect results: tasks write disjoint data, and a kernel's task
//! division does not depend on the number of threads.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a waiting thread looks before it parks.
const SPINS: usize = 20_000;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// A fixed set of worker threads plus the calling thread.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Only one job runs at a time; a second caller waits here.
    caller: Mutex<()>,
    busy_nanoseconds: AtomicU64,
}

/// The bits of [`Shared::state`] that count the workers inside the job.
const INSIDE: u64 = OPEN - 1;
/// The bit of [`Shared::state`] that lets workers into the job.
const OPEN: u64 = 1 << 16;
/// One job in [`Shared::state`].
const EPOCH: u64 = 1 << 17;

struct Shared {
    /// The number of the job, whether workers may still enter it, and how many are inside. One word, so
    /// that a worker enters only while the job that it saw is open.
    state: AtomicU64,
    /// The job. Written while no worker can enter and none is inside.
    job: UnsafeCell<Option<Job>>,
    /// The rest of each thread's range of the tasks.
    ranges: Box<[TaskRange]>,
    panicked: AtomicBool,
    shutdown: AtomicBool,
    parked: Mutex<usize>,
    wake: Condvar,
}

/// Consecutive tasks that no thread has taken yet: the first in the lower half of the word, the end in the upper half.
/// Aligned so that two threads' ranges are never in one cache line.
#[repr(align(128))]
struct TaskRange(AtomicU64);

impl TaskRange {
    fn set(&self, tasks: Range<usize>) {
        self.0.store(tasks.start as u64 | (tasks.end as u64) << 32, Ordering::Relaxed);
    }

    /// Takes the first task: the owner goes upwards.
    fn take_first(&self) -> Option<usize> {
        self.take(|first, end| (first, first + 1, end))
    }

    /// Takes the last task: a helper stays out of the owner's way.
    fn take_last(&self) -> Option<usize> {
        self.take(|first, end| (end - 1, first, end - 1))
    }

    fn take(&self, split: impl Fn(u64, u64) -> (u64, u64, u64)) -> Option<usize> {
        let mut tasks = self.0.load(Ordering::Relaxed);
        loop {
            let (first, end) = (tasks & u64::from(u32::MAX), tasks >> 32);
            if first >= end {
                return None;
            }
            let (taken, first, end) = split(first, end);
            match self.0.compare_exchange_weak(tasks, first | end << 32, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => return Some(taken as usize),
                Err(now) => tasks = now,
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Job {
    task: *const Task<'static>,
}

// SAFETY: `job` is written only by the caller while the job is closed and no worker is inside, and read
// only by workers that entered, which the release store that opens it precedes.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer in `job` refers to a closure that is `Sync`.
unsafe impl Send for Shared {}

impl std::fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ThreadPool").field("num_threads", &self.num_threads()).finish()
    }
}

impl ThreadPool {
    /// A pool of `num_threads` threads, the caller counted in; at least 1.
    ///
    /// A thread that cannot be started is left out: the pool is then smaller.
    #[must_use]
    pub fn new(num_threads: usize) -> Self {
        Self::start(num_threads, &[])
    }

    /// The same, with each started thread pinned to a processor of its own among those that this process may use. The
    /// caller is not pinned: the system will run it on the remaining processor. Has no effect on systems other than
    /// Linux.
    #[must_use]
    pub fn pinned(num_threads: usize) -> Self {
        Self::start(num_threads, &affinity::allowed())
    }

    /// Worker `index` goes to processor `index` of the list, where there is one.
    fn start(num_threads: usize, processors: &[usize]) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            ranges: (0..num_threads.clamp(1, INSIDE as usize))
                .map(|_| TaskRange(AtomicU64::new(0)))
                .collect(),
            panicked: AtomicBool::new(false),
            shutdown: AtomicBool::new(false),
            parked: Mutex::new(0),
            wake: Condvar::new(),
        });
        let workers = (1..num_threads.min(INSIDE as usize))
            .filter_map(|index| {
                let shared = Arc::clone(&shared);
                let processor = processors.get(index).copied();
                std::thread::Builder::new()
                    .name(format!("tinyvllm-cpu-{index}"))
                    .spawn(move || {
                        processor.into_iter().for_each(affinity::pin);
                        shared.work(index);
                    })
                    .ok()
            })
            .collect();
        Self { shared, workers, caller: Mutex::new(()), busy_nanoseconds: AtomicU64::new(0) }
    }

    /// The number of threads that this process may use: the affinity mask and the cgroup quota are
    /// respected.
    #[must_use]
    pub fn default_num_threads() -> usize {
        std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
    }

    /// Threads that work on a job, the caller counted in.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Time spent inside [`ThreadPool::run`] since the start: the rest of a step is the host's own
    /// work.
    #[must_use]
    pub fn busy_time(&self) -> Duration {
        Duration::from_nanos(self.busy_nanoseconds.load(Ordering::Relaxed))
    }

    /// Calls `task(0)`, …, `task(num_tasks - 1)`, each once, on any thread in any order; returns when
    /// all are done. Must not be called from inside a task.
    ///
    /// # Panics
    /// If a task panics, after all threads have left the job.
    pub fn run(&self, num_tasks: usize, task: impl Fn(usize) + Sync) {
        let start = Instant::now();
        self.run_job(num_tasks, task);
        let nanoseconds = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.busy_nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    fn run_job(&self, num_tasks: usize, task: impl Fn(usize) + Sync) {
        if self.workers.is_empty() || num_tasks <= 1 {
            (0..num_tasks).for_each(task);
            return;
        }
        let _only_caller = self.caller.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let task: &Task<'_> = &task;
        // SAFETY: only the lifetime is changed. `run` does not return before the job is closed and every
        // worker has left it, so the closure outlives its use.
        let task: &Task<'static> = unsafe { std::mem::transmute::<&Task<'_>, &Task<'static>>(task) };
        let job = Job { task };
        let ranges = &self.shared.ranges;
        for (index, range) in ranges.iter().enumerate() {
            let start = |index: usize| num_tasks * index / ranges.len();
            range.set(start(index)..start(index + 1));
        }
        // SAFETY: the job is closed and no worker is inside; both hold since the end of the last `run`.
        unsafe { *self.shared.job.get() = Some(job) };
        let last_epoch = self.shared.state.load(Ordering::Relaxed) / EPOCH;
        self.shared.state.store((last_epoch + 1) * EPOCH + OPEN, Ordering::Release);
        self.shared.wake_parked();
        self.shared.run_tasks(job, 0);
        let mut inside = self.shared.state.fetch_and(!OPEN, Ordering::AcqRel) & INSIDE;
        let mut spins = 0_usize;
        while inside > 0 {
            spins += 1;
            // Where there are more threads than cores, a worker needs this core to finish.
            if spins > SPINS {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
            inside = self.shared.state.load(Ordering::Acquire) & INSIDE;
        }
        assert!(!self.shared.panicked.swap(false, Ordering::Relaxed), "a task of the thread pool panicked");
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, Ordering::Release);
        self.shared.state.fetch_add(EPOCH, Ordering::Release);
        self.shared.wake_parked();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks, so joining cannot fail.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self, index: usize) {
        let mut epoch = 0;
        loop {
            epoch = self.wait_for_job(epoch);
            if self.shutdown.load(Ordering::Acquire) {
                return;
            }
            if self.enter(epoch) {
                // SAFETY: this worker is inside, so `job` is not written, and entering acquired the store
                // that opened it.
                if let Some(job) = unsafe { *self.job.get() } {
                    self.run_tasks(job, index);
                }
                self.state.fetch_sub(1, Ordering::Release);
            }
        }
    }

    /// Enters the job with this number, unless it is closed already.
    fn enter(&self, epoch: u64) -> bool {
        let entered = |state: u64| (state / EPOCH == epoch && state & OPEN != 0).then_some(state + 1);
        self.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, entered).is_ok()
    }

    /// Returns the number of the newest job once it differs from `seen`.
    fn wait_for_job(&self, seen: u64) -> u64 {
        for _ in 0..SPINS {
            let epoch = self.state.load(Ordering::Acquire) / EPOCH;
            if epoch != seen {
                return epoch;
            }
            std::hint::spin_loop();
        }
        let mut parked = self.parked.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *parked += 1;
        loop {
            let epoch = self.state.load(Ordering::Acquire) / EPOCH;
            if epoch != seen {
                *parked -= 1;
                return epoch;
            }
            parked = self.wake.wait(parked).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }

    /// Wakes workers that parked before the state changed; a worker that parks later sees the change itself.
    fn wake_parked(&self) {
        let parked = self.parked.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *parked > 0 {
            self.wake.notify_all();
        }
    }

    /// Does the tasks of range `index`, then the rest of the others'.
    fn run_tasks(&self, job: Job, index: usize) {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // SAFETY: the closure lives until `ThreadPool::run` returns, which waits for this thread.
            let task = unsafe { &*job.task };
            let (before, own_and_after) = self.ranges.split_at(index);
            if let [own, after @ ..] = own_and_after {
                while let Some(index) = own.take_first() {
                    task(index);
                }
                for other in after.iter().chain(before) {
                    while let Some(index) = other.take_last() {
                        task(index);
                    }
                }
            }
        }));
        if result.is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
    }
}

/// Which processors threads run on.
#[cfg(target_os = "linux")]
mod affinity {
    use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
    use nix::unistd::Pid;

    /// The processors that this thread may use.
    pub(super) fn allowed() -> Vec<usize> {
        let this_thread = Pid::from_raw(0);
        let Ok(set) = sched_getaffinity(this_thread) else { return Vec::new() };
        (0..CpuSet::count()).filter(|processor| set.is_set(*processor).unwrap_or(false)).collect()
    }

    /// Keeps this thread on a processor. If the system refuses, the thread runs where it likes.
    pub(super) fn pin(processor: usize) {
        let mut set = CpuSet::new();
        if set.set(processor).is_ok() {
            let _ = sched_setaffinity(Pid::from_raw(0), &set);
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod affinity {
    pub(super) fn allowed() -> Vec<usize> {
        Vec::new()
    }

    pub(super) fn pin(_: usize) {}
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn every_task_runs_once() {
        for num_threads in [1, 2, 5] {
            let pool = ThreadPool::new(num_threads);
            for num_tasks in [0, 1, 2, 3, 100, 1_000] {
                let counts: Vec<AtomicUsize> = (0..num_tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(num_tasks, |index| {
                    counts[index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    /// Workers that come late must neither enter the next job with the tasks of the last one nor hold
    /// it up. There are more threads than cores, so that many do come late.
    #[test]
    fn jobs_in_quick_succession_keep_apart() {
        let pool = ThreadPool::new(8);
        for job in 0..3_000_usize {
            let num_tasks = 2 + job % 7;
            let results: Vec<AtomicUsize> = (0..num_tasks).map(|_| AtomicUsize::new(0)).collect();
            pool.run(num_tasks, |index| {
                results[index].fetch_add(job + index + 1, Ordering::Relaxed);
            });
            for (index, result) in results.iter().enumerate() {
                assert_eq!(result.load(Ordering::Relaxed), job + index + 1, "job {job}, task {index}");
            }
        }
    }

    #[test]
    fn works_after_parking() {
        let pool = ThreadPool::new(3);
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            let sum = AtomicUsize::new(0);
            pool.run(10, |index| {
                sum.fetch_add(index, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 45);
        }
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_pool_survives() {
        let pool = ThreadPool::new(2);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(8, |index| assert!(index != 3, "task three"));
        }));
        assert!(caught.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(4, |index| {
            sum.fetch_add(index, Ordering::Relaxed);
        });
        assert_eq!(sum.load(Ordering::Relaxed), 6);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn pinned_threads_stay_on_their_processors() {
        let before = affinity::allowed();
        let pool = ThreadPool::pinned(before.len().min(4));
        let seen = Mutex::new(std::collections::HashMap::new());
        // Long tasks, so that every thread takes some.
        pool.run(64, |_| {
            std::thread::sleep(Duration::from_millis(2));
            seen.lock().unwrap().insert(std::thread::current().id(), affinity::allowed());
        });
        let mut seen = seen.into_inner().unwrap();
        assert_eq!(seen.remove(&std::thread::current().id()).as_ref(), Some(&before), "the caller is free");
        for processors in seen.values() {
            assert!(processors.len() == 1 && before[1..].contains(&processors[0]), "{processors:?}");
        }
        assert_eq!(seen.values().collect::<std::collections::HashSet<_>>().len(), seen.len());
    }
}
