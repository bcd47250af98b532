//! The one thread pool: every kernel that uses several cores runs through it.
//!
//! Workers spin for a short while after a job, because the next kernel of a step follows within
//! microseconds, and then park. Which thread takes which task has no influence on any result: tasks
//! write disjoint data, and a kernel's task division does not depend on the number of threads.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a waiting thread looks before it parks: some tens of microseconds.
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

struct Shared {
    /// Rises by one with each job; workers wait for a change.
    epoch: AtomicUsize,
    /// The job; valid while `remaining_workers` > 0 or the caller is inside `run`.
    job: UnsafeCell<Option<Job>>,
    next_task: AtomicUsize,
    /// Workers that have not yet finished the current job.
    remaining_workers: AtomicUsize,
    panicked: AtomicBool,
    shutdown: AtomicBool,
    parked: Mutex<usize>,
    wake: Condvar,
}

#[derive(Clone, Copy)]
struct Job {
    task: *const Task<'static>,
    num_tasks: usize,
}

// SAFETY: `job` is written only by the caller while no worker is in a job (`remaining_workers` is 0),
// and the release store of `epoch` publishes it.
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
    /// A thread that cannot be started is left out: the pool is then smaller, not broken.
    #[must_use]
    pub fn new(num_threads: usize) -> Self {
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            next_task: AtomicUsize::new(0),
            remaining_workers: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            shutdown: AtomicBool::new(false),
            parked: Mutex::new(0),
            wake: Condvar::new(),
        });
        let workers = (1..num_threads)
            .filter_map(|index| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("tinyvllm-cpu-{index}"))
                    .spawn(move || shared.work())
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

    /// Time spent inside [`ThreadPool::run`] since the start: what is left of a step is the host's own
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
        // SAFETY: only the lifetime is changed. `run` does not return before every worker has left the
        // job, so the closure outlives its use.
        let task: &Task<'static> = unsafe { std::mem::transmute::<&Task<'_>, &Task<'static>>(task) };
        let job = Job { task, num_tasks };
        self.shared.next_task.store(0, Ordering::Relaxed);
        self.shared.remaining_workers.store(self.workers.len(), Ordering::Relaxed);
        // SAFETY: no worker reads `job` until `epoch` changes, and all have left the job before.
        unsafe { *self.shared.job.get() = Some(job) };
        self.shared.epoch.fetch_add(1, Ordering::Release);
        {
            let parked = self.shared.parked.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if *parked > 0 {
                self.shared.wake.notify_all();
            }
        }
        self.shared.run_tasks(job);
        let mut spins = 0_usize;
        while self.shared.remaining_workers.load(Ordering::Acquire) > 0 {
            spins += 1;
            // Where there are more threads than cores, a worker needs this core to finish.
            if spins > SPINS {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        assert!(!self.shared.panicked.swap(false, Ordering::Relaxed), "a task of the thread pool panicked");
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, Ordering::Release);
        self.shared.epoch.fetch_add(1, Ordering::Release);
        {
            let _parked = self.shared.parked.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks, so joining cannot fail.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        let mut seen = 0;
        loop {
            seen = self.wait_for_job(seen);
            if self.shutdown.load(Ordering::Acquire) {
                return;
            }
            // SAFETY: the acquire load of `epoch` saw the store that came after `job` was written.
            if let Some(job) = unsafe { *self.job.get() } {
                self.run_tasks(job);
            }
            self.remaining_workers.fetch_sub(1, Ordering::Release);
        }
    }

    /// Returns the new epoch once it differs from `seen`.
    fn wait_for_job(&self, seen: usize) -> usize {
        for _ in 0..SPINS {
            let epoch = self.epoch.load(Ordering::Acquire);
            if epoch != seen {
                return epoch;
            }
            std::hint::spin_loop();
        }
        let mut parked = self.parked.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *parked += 1;
        loop {
            let epoch = self.epoch.load(Ordering::Acquire);
            if epoch != seen {
                *parked -= 1;
                return epoch;
            }
            parked = self.wake.wait(parked).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }

    fn run_tasks(&self, job: Job) {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // SAFETY: the closure lives until `ThreadPool::run` returns, which waits for this thread.
            let task = unsafe { &*job.task };
            loop {
                let index = self.next_task.fetch_add(1, Ordering::Relaxed);
                if index >= job.num_tasks {
                    return;
                }
                task(index);
            }
        }));
        if result.is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
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
}
