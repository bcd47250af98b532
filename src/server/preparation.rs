//! The queue before the engine. A few threads unpack and parse bodies, render and tokenize prompts and
//! compile grammars, for the clients in turn.
//!
//! One key, or one client without a key, has at most half of the processors at a time. So a step and another
//! client's short request always find a free one. The next turn goes to the waiting client with the fewest
//! running tasks, then to the one that has used the least time. Both are divided by the client's weight.
//! Clients of one key share its turns.

use std::collections::{HashMap, VecDeque};
use std::num::NonZero;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::available_parallelism;
use std::time::Instant;

use tokio::sync::oneshot;

use super::clients::Client;
use super::error::ApiError;
use tinyvllm::engine::ClientId;

/// The least limit of running tasks: more than one client may have.
const MIN_TASKS: usize = 4;

/// Schedules the work before the engine.
#[derive(Debug)]
pub(super) struct Preparation(Arc<Mutex<Queue>>);

#[derive(Debug)]
struct Queue {
    max_tasks: usize,
    max_tasks_of_group: usize,
    num_tasks: usize,
    clients: HashMap<ClientId, Line>,
    /// The time that the next client in turn has used, in seconds divided by its weight.
    clock: f64,
}

/// A client's waiting tasks, and the time it has used.
#[derive(Debug)]
struct Line {
    group: ClientId,
    weight: f64,
    waiting: VecDeque<oneshot::Sender<RunningTask>>,
    num_tasks: usize,
    time: f64,
}

impl Line {
    fn is_active(&self) -> bool {
        self.num_tasks > 0 || !self.waiting.is_empty()
    }
}

/// A running task. When it is dropped, another one may start.
#[derive(Debug)]
struct RunningTask {
    queue: Arc<Mutex<Queue>>,
    client: ClientId,
    start: Instant,
}

impl Preparation {
    pub(super) fn new() -> Self {
        let num_processors = available_parallelism().map_or(1, NonZero::get);
        Self::with_limits((2 * num_processors).max(MIN_TASKS), (num_processors / 2).max(1))
    }

    fn with_limits(max_tasks: usize, max_tasks_of_group: usize) -> Self {
        let queue =
            Queue { max_tasks, max_tasks_of_group, num_tasks: 0, clients: HashMap::new(), clock: 0.0 };
        Self(Arc::new(Mutex::new(queue)))
    }

    /// Does this work in the client's turn, on a blocking thread.
    ///
    /// # Errors
    /// 500 if it panics.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        client: &Client,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let failed = || ApiError::internal("the request could not be prepared");
        let turn = self.turn(client).await.ok_or_else(failed)?;
        let task = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            work()
        });
        task.await.map_err(|_| failed())
    }

    /// Waits for the client's turn.
    async fn turn(&self, client: &Client) -> Option<RunningTask> {
        let turn = lock(&self.0).push(client);
        start_tasks(&self.0);
        turn.await.ok()
    }
}

impl Queue {
    /// Adds a waiting task of the client.
    fn push(&mut self, client: &Client) -> oneshot::Receiver<RunningTask> {
        let (sender, turn) = oneshot::channel();
        let clock = self.clock;
        let line = self.clients.entry(client.id).or_insert_with(|| Line {
            group: client.group,
            weight: 1.0,
            waiting: VecDeque::new(),
            num_tasks: 0,
            time: clock,
        });
        if !line.is_active() {
            line.time = line.time.max(clock);
        }
        line.weight = f64::from(client.weight.get());
        line.waiting.push_back(sender);
        turn
    }

    /// The client whose turn is next, if a waiting task may start.
    fn next(&self) -> Option<ClientId> {
        if self.num_tasks >= self.max_tasks {
            return None;
        }
        let mut num_tasks: HashMap<ClientId, usize> = HashMap::new();
        self.clients.values().for_each(|line| *num_tasks.entry(line.group).or_default() += line.num_tasks);
        let of_group = |line: &Line| num_tasks[&line.group];
        let key = |line: &Line| (of_group(line) as f64 / line.weight, line.num_tasks as f64, line.time);
        let waiting = self
            .clients
            .iter()
            .filter(|(_, line)| !line.waiting.is_empty() && of_group(line) < self.max_tasks_of_group);
        let first = waiting.min_by(|(_, a), (_, b)| {
            let ((a, b, c), (d, e, f)) = (key(a), key(b));
            a.total_cmp(&d).then(b.total_cmp(&e)).then(c.total_cmp(&f))
        });
        first.map(|(client, _)| *client)
    }

    /// Starts the next task whose receiver still waits.
    fn begin(&mut self) -> Option<(ClientId, oneshot::Sender<RunningTask>)> {
        loop {
            let client = self.next()?;
            let line = self.clients.get_mut(&client)?;
            let sender = line.waiting.pop_front()?;
            if !sender.is_closed() {
                line.num_tasks += 1;
                self.num_tasks += 1;
                self.clock = self.clock.max(line.time);
                return Some((client, sender));
            }
        }
    }

    /// Records that a task of this client has ended after this many seconds.
    fn end(&mut self, client: ClientId, seconds: f64) {
        self.num_tasks -= 1;
        let group = self.clients.get(&client).map(|line| line.group);
        let of_group = self.clients.values().filter(|line| Some(line.group) == group && line.is_active());
        let num_names = of_group.count().max(1);
        if let Some(line) = self.clients.get_mut(&client) {
            line.num_tasks -= 1;
            line.time += seconds * num_names as f64 / line.weight;
        }
        let clock = self.clock;
        self.clients.retain(|_, line| line.is_active() || line.time > clock);
        if self.num_tasks == 0 && self.clients.values().all(|line| line.waiting.is_empty()) {
            // When nothing is left to do, used time is forgotten.
            self.clients.clear();
        }
    }
}

/// Starts as many tasks as the limits allow.
fn start_tasks(queue: &Arc<Mutex<Queue>>) {
    loop {
        let Some((client, sender)) = lock(queue).begin() else { return };
        let turn = RunningTask { queue: Arc::clone(queue), client, start: Instant::now() };
        // If its receiver is gone, the turn ends here.
        drop(sender.send(turn));
    }
}

impl Drop for RunningTask {
    fn drop(&mut self) {
        lock(&self.queue).end(self.client, self.start.elapsed().as_secs_f64());
        start_tasks(&self.queue);
    }
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::http::HeaderMap;

    use super::super::clients::Clients;
    use super::super::keys::FoundKey;
    use super::*;
    use tinyvllm::engine::Weight;

    /// A client with this key and name.
    fn client(clients: &Clients, number: usize, name: &'static str) -> Client {
        let mut headers = HeaderMap::new();
        headers.insert("x-client-id", name.parse().unwrap());
        let key = FoundKey { number, weight: Weight::default() };
        clients.identify(&headers, Some(key), [127, 0, 0, 1].into())
    }

    #[tokio::test]
    async fn many_tasks_of_one_client_leave_a_thread_to_others() {
        let preparation = Preparation::with_limits(3, 1);
        let clients = Clients::new(true);
        let [hog, light, third] = [1, 2, 3].map(|number| client(&clients, number, ""));
        let first = preparation.turn(&hog).await.unwrap();
        let mut waiting: Vec<_> = (0..100).map(|_| Box::pin(preparation.turn(&hog))).collect();
        for turn in &mut waiting {
            let is_there = tokio::time::timeout(Duration::ZERO, turn).await.is_ok();
            assert!(!is_there, "one key has one task");
        }
        let second = preparation.turn(&light).await.unwrap();
        // A task whose receiver is gone is skipped, and nobody else is charged for it.
        drop(waiting.remove(0));
        drop(first);
        let again = waiting.remove(0).await.unwrap();
        let other = preparation.turn(&third).await.unwrap();
        // All threads are busy now. The client with the fewest running tasks is next, however long others
        // have waited.
        let mut late = Box::pin(preparation.turn(&third));
        assert!(tokio::time::timeout(Duration::ZERO, &mut late).await.is_err());
        drop(other);
        let late = late.await.unwrap();
        drop((again, second, late, waiting));
        let queue = lock(&preparation.0);
        assert_eq!((queue.num_tasks, queue.clients.len()), (0, 0));
    }

    #[test]
    fn time_is_shared_by_key_and_within_it_by_name() {
        let preparation = Preparation::with_limits(1, 1);
        let known = Clients::new(true);
        let clients = [(1, "a"), (1, "b"), (1, "c"), (2, "")].map(|(key, name)| client(&known, key, name));
        let mut queue = lock(&preparation.0);
        let mut receivers = Vec::new();
        for client in &clients {
            for _ in 0..200 {
                receivers.push(queue.push(client));
            }
        }
        let mut num_turns = HashMap::new();
        for _ in 0..300 {
            let (client, _) = queue.begin().unwrap();
            assert!(queue.begin().is_none(), "one thread");
            queue.end(client, 1.0);
            *num_turns.entry(client).or_insert(0_i32) += 1;
        }
        for (client, wanted) in clients.iter().zip([50, 50, 50, 150]) {
            assert!(num_turns[&client.id].abs_diff(wanted) <= 3, "{num_turns:?}");
        }
    }
}
