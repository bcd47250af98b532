//! Fetches the missing bytes of a file in several ranges at once, and writes it from front to back.
//!
//! Threads request ranges and keep them in memory; the calling thread writes the file's next bytes as they arrive. So
//! the file on disk never has a gap, its checksum is computed on the way, and a killed process loses only the data
//! ahead of the slowest range: at most [`RANGES_PER_CONNECTION`] ranges for each connection.
//!
//! The number of connections and the length of ranges adapt to the line and the server: ranges take about two seconds,
//! a range without a failure allows one more connection, a failure halves them. The first range goes alone: not every
//! server supports ranges.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::address::Address;
use super::client::{Answer, Client, Failure, RangeBody};
use super::partial::Partial;
use crate::hub::config::HubConfig;
use crate::hub::progress::Progress;
use crate::{Error, ErrorKind, Result};

/// Ranges for each connection that may be in memory. With one, a slow range would stop the others.
const RANGES_PER_CONNECTION: usize = 2;

const FIRST_RANGE: u64 = 1 << 20;
const SHORTEST_RANGE: u64 = 256 << 10;
const SECONDS_FOR_A_RANGE: f64 = 2.0;

/// The number of connections after the first range, which has shown that the server supports ranges.
const FIRST_CONNECTIONS: usize = 4;

/// The Hub counts requests in windows of five minutes, so its pauses are not longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// How a transfer ended that was not refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Complete,
    /// The server calls the content otherwise than at the beginning.
    Changed,
    /// The server sends the whole file for any range.
    WithoutRanges,
}

/// The file, and its source.
pub(super) struct Transfer<'a> {
    pub(super) client: &'a Client<'a>,
    pub(super) config: &'a HubConfig,
    pub(super) commit: &'a str,
    pub(super) file: &'a str,
    /// Size of the file in bytes.
    pub(super) size: u64,
    /// Whether to stop if the host calls the content otherwise in the middle.
    pub(super) watches_etag: bool,
}

impl Transfer<'_> {
    /// Fetches the missing bytes of `partial`.
    ///
    /// # Errors
    /// Refusals, requests that failed more than [`HubConfig::num_retries`] times without a byte, and errors of the
    /// disk. All data before the gap is on disk.
    pub(super) fn run(&self, partial: &mut Partial<'_>, progress: &dyn Progress) -> Result<Outcome> {
        let missing = self.size.saturating_sub(partial.written);
        let first_range = FIRST_RANGE.min(self.config.max_range_bytes.max(1));
        let num_workers = usize::try_from(missing.div_ceil(first_range)).unwrap_or(usize::MAX);
        let crew = Crew {
            transfer: self,
            state: Mutex::new(State {
                queue: VecDeque::new(),
                next: partial.written,
                num_busy: 0,
                limit: 1,
                range_bytes: first_range,
                pause: None,
                unreported_pause: None,
                storage: None,
                etag: None,
                end: None,
            }),
            news: Condvar::new(),
            freed: Condvar::new(),
        };
        thread::scope(|scope| {
            let _stop = StopAtEnd(&crew);
            for number in 0..num_workers.min(self.config.max_connections.max(1)) {
                let spawned = thread::Builder::new().spawn_scoped(scope, || crew.work());
                match spawned {
                    Err(source) if number == 0 => {
                        return Err(Error::io("cannot start a thread for the download", source));
                    }
                    Err(_) => break,
                    Ok(_) => {}
                }
            }
            crew.write(partial, progress)
        })
    }
}

/// The threads of one transfer and their shared state.
struct Crew<'a> {
    transfer: &'a Transfer<'a>,
    state: Mutex<State>,
    /// Notifies the writer: bytes, a pause or the end.
    news: Condvar,
    /// Notifies the others: there is a range to fetch, or the end.
    freed: Condvar,
}

struct State {
    /// Ranges that are not on disk as a whole, in the order of the file, without gaps.
    queue: VecDeque<Slot>,
    /// The first byte that is in no range yet.
    next: u64,
    num_busy: usize,
    /// How many may be busy.
    limit: usize,
    range_bytes: u64,
    /// No request is sent before then.
    pause: Option<Instant>,
    unreported_pause: Option<Duration>,
    /// Where the file was found last.
    storage: Option<Address>,
    /// Each host's name of the content, known after its first range.
    etag: Option<Option<(String, String)>>,
    end: Option<End>,
}

struct Slot {
    range: Range<u64>,
    /// Received data that is not on disk.
    received: Vec<u8>,
}

/// Why no more is fetched.
enum End {
    Stopped,
    With(Outcome),
    Refused(Error),
    /// The last of several answers that broke off.
    Broken(Error),
}

/// Why a range did not come as a whole.
enum Trouble {
    Refused(Failure),
    Broken(Error),
    /// The transfer has ended.
    Ended,
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Self {
        Self::Refused(failure)
    }
}

impl Crew<'_> {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, end: End) {
        self.state().end.get_or_insert(end);
        self.news.notify_all();
        self.freed.notify_all();
    }

    /// Writes received data until the file is complete or no more will come.
    fn write(&self, partial: &mut Partial<'_>, progress: &dyn Progress) -> Result<Outcome> {
        loop {
            let mut state = self.state();
            let bytes = loop {
                if let Some(pause) = state.unreported_pause.take() {
                    drop(state);
                    progress.pause(partial.name, pause);
                    state = self.state();
                }
                let bytes = state.take_next();
                if !bytes.is_empty() {
                    break bytes;
                }
                if state.queue.is_empty() && state.next >= self.transfer.size {
                    return Ok(Outcome::Complete);
                }
                match state.end.take() {
                    None => {}
                    Some(End::With(outcome)) => return Ok(outcome),
                    Some(End::Refused(error)) => return Err(error),
                    Some(End::Broken(error)) => {
                        return Err(partial.broken_off(error.message()).with_source(error));
                    }
                    Some(End::Stopped) => return Err(Error::internal("a thread of the download failed")),
                }
                state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            drop(state);
            self.freed.notify_all();
            partial.write(&bytes)?;
            progress.advance(bytes.len() as u64);
        }
    }

    /// Fetches one range after the other.
    fn work(&self) {
        let _stop = StopIfPanicking(self);
        while let Some(range) = self.take_range() {
            let started = Instant::now();
            let went_well = self.fetch(&range);
            let mut state = self.state();
            state.num_busy -= 1;
            if went_well {
                let config = self.transfer.config;
                state.limit = (state.limit + 1).min(config.max_connections.max(1));
                let bytes_per_second =
                    (range.end - range.start) as f64 / started.elapsed().as_secs_f64().max(1e-6);
                let longest = config.max_range_bytes.max(1);
                state.range_bytes = ((bytes_per_second * SECONDS_FOR_A_RANGE) as u64)
                    .clamp(SHORTEST_RANGE.min(longest), longest);
            }
            drop(state);
            self.freed.notify_all();
        }
    }

    /// The next range of the file, once there is space for it.
    fn take_range(&self) -> Option<Range<u64>> {
        let most_ranges = RANGES_PER_CONNECTION * self.transfer.config.max_connections.max(1);
        let mut state = self.state();
        loop {
            if state.end.is_some() || state.next >= self.transfer.size {
                return None;
            }
            let pause = state.pause.map(|until| until.saturating_duration_since(Instant::now()));
            let pause = pause.filter(|pause| !pause.is_zero());
            if pause.is_none() && state.num_busy < state.limit && state.queue.len() < most_ranges {
                let range = state.next..self.transfer.size.min(state.next + state.range_bytes);
                state.next = range.end;
                state.num_busy += 1;
                state.queue.push_back(Slot { range: range.clone(), received: Vec::new() });
                return Some(range);
            }
            state = match pause {
                Some(pause) => {
                    self.freed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.freed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Fetches `range`; true if all of it came without a failure.
    fn fetch(&self, range: &Range<u64>) -> bool {
        let mut rest = range.clone();
        let mut num_failures = 0;
        let mut went_well = true;
        while !rest.is_empty() {
            let start = rest.start;
            let trouble = match self.request(&mut rest) {
                Ok(()) => continue,
                Err(Trouble::Ended) => return false,
                Err(trouble) => trouble,
            };
            went_well = false;
            // The way works as long as there are more bytes than before.
            num_failures = if rest.start > start { 1 } else { num_failures + 1 };
            if !self.wait_after(trouble, num_failures) {
                return false;
            }
        }
        went_well
    }

    /// Waits before the next attempt; false if there is none, because the transfer has ended.
    fn wait_after(&self, trouble: Trouble, num_failures: u32) -> bool {
        let Transfer { client, config, .. } = self.transfer;
        let is_last = num_failures > config.num_retries;
        let (error, retry_after, end): (_, _, fn(Error) -> End) = match trouble {
            Trouble::Refused(Failure { error, retry_after }) => (error, retry_after, End::Refused),
            Trouble::Broken(error) => (error, None, End::Broken),
            Trouble::Ended => return false,
        };
        let is_limited = error.kind() == ErrorKind::RateLimited;
        let is_for_now = is_limited || error.kind() == ErrorKind::Unavailable;
        if is_last || !is_for_now || retry_after.is_some_and(|pause| pause > LONGEST_PAUSE) {
            self.end(end(error));
            return false;
        }
        let pause = client.delay(num_failures).max(retry_after.unwrap_or_default());
        let until = Instant::now() + pause;
        let mut state = self.state();
        state.limit = (state.limit / 2).max(1);
        if is_limited {
            // A pause for one connection applies to all, and the user should see the reason.
            state.pause = state.pause.max(Some(until));
            state.unreported_pause = state.unreported_pause.max(Some(pause));
            self.news.notify_all();
        }
        while state.end.is_none() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            state = self.freed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        false
    }

    /// One request for `rest`, which then begins after the received bytes.
    fn request(&self, rest: &mut Range<u64>) -> Result<(), Trouble> {
        let Transfer { client, commit, file, size, .. } = *self.transfer;
        let storage = self.state().storage.clone();
        let (answer, address) = client.range(commit, file, rest, storage.as_ref())?;
        let total = match &answer {
            Answer::RangeBody(part) => part.total,
            Answer::Beyond(total) => Some(total.unwrap_or(rest.start)),
            // A host that has sent a range before may recover.
            Answer::Whole if self.state().etag.is_some() => {
                return Err(Trouble::Broken(client.broken(&address, &"the whole file instead of a range")));
            }
            Answer::Whole => None,
        };
        if let Some(total) = total.filter(|&total| total != size) {
            return Err(Trouble::Refused(wrong_size(file, size, total).into()));
        }
        match answer {
            Answer::RangeBody(part) if self.is_welcome(&part, &address) => self.read(part, rest),
            Answer::RangeBody(_) => {
                self.end(End::With(Outcome::Changed));
                Err(Trouble::Ended)
            }
            Answer::Whole => {
                self.end(End::With(Outcome::WithoutRanges));
                Err(Trouble::Ended)
            }
            Answer::Beyond(_) => Err(Trouble::Broken(client.broken(&address, &"no such range of the file"))),
        }
    }

    /// Records a response's metadata; false if it has another content.
    fn is_welcome(&self, part: &RangeBody, address: &Address) -> bool {
        let mut state = self.state();
        state.storage = Some(address.clone());
        let Some(known) = &state.etag else {
            state.etag = Some(part.etag.clone());
            state.limit = FIRST_CONNECTIONS.min(self.transfer.config.max_connections.max(1));
            drop(state);
            self.freed.notify_all();
            return true;
        };
        match (known, &part.etag) {
            (Some((host, etag)), Some((other_host, other))) if self.transfer.watches_etag => {
                host != other_host || etag == other
            }
            _ => true,
        }
    }

    fn read(&self, mut part: RangeBody, rest: &mut Range<u64>) -> Result<(), Trouble> {
        let mut buffer = vec![0; 128 << 10];
        let mut missing = part.num_bytes;
        while missing > 0 {
            let wanted = usize::try_from(missing).map_or(buffer.len(), |missing| missing.min(buffer.len()));
            let num_bytes = match part.reader.read(&mut buffer[..wanted]) {
                Ok(0) => return Err(Trouble::Broken(broken("the connection was closed".to_owned()))),
                Ok(num_bytes) => num_bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Trouble::Broken(self.unreadable(error))),
            };
            if !self.give(rest.start, &buffer[..num_bytes]) {
                return Err(Trouble::Ended);
            }
            rest.start += num_bytes as u64;
            missing -= num_bytes as u64;
        }
        // Only at its end does an answer return its connection. Its last bytes do not matter.
        let _ = part.reader.read(&mut buffer[..1]);
        Ok(())
    }

    fn unreadable(&self, error: io::Error) -> Error {
        match ureq::Error::from(error) {
            ureq::Error::Timeout(_) => broken(format!("no data for {:?}", self.transfer.config.read_timeout)),
            error => broken(error.to_string()).with_source(error),
        }
    }

    /// Gives the writer the bytes from `at` on; false if it needs no more.
    fn give(&self, at: u64, bytes: &[u8]) -> bool {
        let mut state = self.state();
        if state.end.is_some() {
            return false;
        }
        if let Some(slot) = state.queue.iter_mut().find(|slot| slot.range.contains(&at)) {
            slot.received.extend_from_slice(bytes);
        }
        drop(state);
        self.news.notify_one();
        true
    }
}

impl State {
    /// The file's next bytes, as far as they have arrived.
    fn take_next(&mut self) -> Vec<u8> {
        let Some(first) = self.queue.front_mut() else { return Vec::new() };
        let bytes = std::mem::take(&mut first.received);
        first.range.start += bytes.len() as u64;
        if first.range.is_empty() {
            self.queue.pop_front();
        }
        bytes
    }
}

/// Ends the transfer when the writer leaves, however it does, so that the threads end too.
struct StopAtEnd<'a>(&'a Crew<'a>);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.end(End::Stopped);
    }
}

/// Ends the transfer when a thread fails, or the writer would wait for it for ever.
struct StopIfPanicking<'a>(&'a Crew<'a>);

impl Drop for StopIfPanicking<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.end(End::Stopped);
        }
    }
}

fn broken(why: String) -> Error {
    Error::new(ErrorKind::Unavailable, why)
}

/// The server's file is not as long as the one that was announced.
pub(super) fn wrong_size(file: &str, size: u64, offered: u64) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!("`{file}` should have {size} bytes, but the server offers {offered}"),
    )
    .with_hint("try again later, or check HF_ENDPOINT")
}
