//! Sends the requests of a run at their times and waits for the answers.
//!
//! This is an open loop: the next request is sent at its time, whether or not earlier ones have ended. With a
//! limit on concurrency it may then wait for a permit. That wait is measured separately and is not part of
//! any latency. The delay of this program itself is measured too, so that a busy client does not look like a
//! slow server.
//!
//! Everything runs on one thread, so a server on the same machine loses at most one core.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::body::Bytes;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::request::{self, Api, Outcome};
use crate::http::HttpClient;

/// The requests and their times.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) client: HttpClient,
    pub(super) api: Api,
    pub(super) path: String,
    pub(super) bodies: Vec<Bytes>,
    /// The time of each request from the start, ascending.
    pub(super) times: Vec<Duration>,
    /// Limit on concurrent requests.
    pub(super) max_concurrency: Option<usize>,
    /// A request that takes longer has failed.
    pub(super) timeout: Duration,
}

/// The outcome of a run.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// The finished requests, in the order of their times.
    pub(super) outcomes: Vec<Outcome>,
    pub(super) duration: Duration,
    /// The longest delay between a request's time and its handling.
    pub(super) max_scheduling_delay: Duration,
    /// Whether Ctrl-C ended the run. Unfinished requests then have no outcome.
    pub(super) is_interrupted: bool,
}

/// A finished request.
struct Ended {
    index: usize,
    outcome: Outcome,
    scheduling_delay: Duration,
}

impl Load {
    /// Sends all requests. Calls `on_end` when one has ended.
    pub(super) async fn run(self, mut on_end: impl FnMut(&Outcome)) -> Run {
        let load = Arc::new(self);
        let permits = load.max_concurrency.unwrap_or(Semaphore::MAX_PERMITS).min(Semaphore::MAX_PERMITS);
        let permits = Arc::new(Semaphore::new(permits));
        let mut tasks = JoinSet::new();
        let mut ended: Vec<Option<Outcome>> = vec![None; load.bodies.len()];
        let mut run = Run::default();
        let mut num_sent = 0;
        let mut interrupt = std::pin::pin!(interrupted());
        let start = Instant::now();
        loop {
            while load.times.get(num_sent).is_some_and(|due| *due <= start.elapsed()) {
                tasks.spawn(Arc::clone(&load).one(num_sent, start, Arc::clone(&permits)));
                num_sent += 1;
            }
            let next_due = load.times.get(num_sent).map(|due| start + *due);
            if next_due.is_none() && tasks.is_empty() {
                break;
            }
            tokio::select! {
                () = &mut interrupt => {
                    run.is_interrupted = true;
                    break;
                }
                () = tokio::time::sleep_until(next_due.unwrap_or(start).into()), if next_due.is_some() => {}
                Some(joined) = tasks.join_next() => {
                    // A task that panicked has no outcome.
                    let Ok(Ended { index, outcome, scheduling_delay }) = joined else { continue };
                    on_end(&outcome);
                    run.max_scheduling_delay = run.max_scheduling_delay.max(scheduling_delay);
                    ended[index] = Some(outcome);
                }
            }
        }
        run.duration = start.elapsed();
        run.outcomes = ended.into_iter().flatten().collect();
        run
    }

    async fn one(self: Arc<Self>, index: usize, start: Instant, permits: Arc<Semaphore>) -> Ended {
        let begun = Instant::now();
        let scheduling_delay = begun.saturating_duration_since(start + self.times[index]);
        // The semaphore is never closed. Even without a permit, the request would be sent.
        let _permit = permits.acquire().await;
        let queue_time = begun.elapsed();
        let answer = request::send(&self.client, self.api, &self.path, self.bodies[index].clone(), start);
        let sent = start.elapsed();
        let outcome = tokio::time::timeout(self.timeout, answer).await;
        let outcome = outcome.unwrap_or_else(|_| Outcome {
            start: sent,
            error: Some(format!("not finished after {} s", self.timeout.as_secs_f64())),
            ..Outcome::default()
        });
        Ended { index, outcome: Outcome { queue_time, ..outcome }, scheduling_delay }
    }
}

/// Waits for Ctrl-C.
async fn interrupted() {
    if tokio::signal::ctrl_c().await.is_err() {
        // If Ctrl-C cannot be handled, it ends the program.
        std::future::pending::<()>().await;
    }
}
