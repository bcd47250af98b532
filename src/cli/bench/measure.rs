//! The measurements behind `tinyvllm bench`: how fast a loaded model computes prompts and generates.
//!
//! Prompts are random token ids, different in every run, so that no run finds another one's blocks in
//! the prefix cache.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tinyvllm::engine::{Event, Request, RequestStream};
use tinyvllm::llm::Llm;
use tinyvllm::sampling::SamplingParams;
use tinyvllm::{Error, ErrorKind, Result};

/// What one run of a generation measurement found, per window (see [`generation`]).
#[derive(Debug, Clone, Copy)]
pub(super) struct GenerationRun {
    /// Tokens generated in the window, over all sequences.
    pub(super) num_tokens: usize,
    /// Length of the window.
    pub(super) seconds: f64,
    /// Sum over these tokens of the cache positions that computing them reads.
    pub(super) num_cache_positions: usize,
    /// Dispatches in the window.
    pub(super) num_dispatches: u64,
    /// Time of the window that was not spent in kernels, in seconds.
    pub(super) host_seconds: f64,
}

/// Random token ids below `vocab_size`, a new sequence with every call.
#[derive(Debug)]
pub(super) struct RandomPrompts {
    state: u64,
    vocab_size: usize,
}

impl RandomPrompts {
    pub(super) fn new(vocab_size: usize) -> Self {
        Self { state: 0x9e37_79b9_7f4a_7c15, vocab_size: vocab_size.max(1) }
    }

    pub(super) fn next(&mut self, num_tokens: usize) -> Vec<u32> {
        let mut token = || {
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            ((self.state >> 16) % self.vocab_size as u64) as u32
        };
        (0..num_tokens).map(|_| token()).collect()
    }
}

/// Seconds from handing over a prompt of this length until its first token is there.
pub(super) fn prompt(llm: &Llm, prompts: &mut RandomPrompts, num_tokens: usize) -> Result<f64> {
    let request = Request::new(prompts.next(num_tokens), params(1));
    let start = Instant::now();
    let mut stream = llm.engine().submit(request)?;
    let first = stream.find_map(|event| match event {
        Event::Token { .. } => Some(Ok(start.elapsed().as_secs_f64())),
        Event::Finished { error, .. } => Some(Err(failed(error))),
        Event::PromptLogits { .. } => None,
    });
    // The rest is read, so that the engine is idle before the next run begins.
    stream.for_each(drop);
    first.unwrap_or_else(|| Err(failed(None)))
}

/// Generates with `batch_size` sequences that have `context` tokens each in the cache when they start.
///
/// The sequences do not start together, since their prompts are computed one after another. So what
/// counts is the window in which all of them generate: from the moment that the last one has its
/// first token until the first one has all of its own. Each generates at least `num_tokens` in it.
pub(super) fn generation(
    llm: &Llm,
    prompts: &mut RandomPrompts,
    batch_size: usize,
    context: usize,
    num_tokens: usize,
) -> Result<GenerationRun> {
    let max_tokens = num_output_tokens(llm, batch_size, context, num_tokens);
    let clock = Clock {
        llm,
        batch_size,
        num_started: AtomicUsize::new(0),
        begin: OnceLock::new(),
        end: OnceLock::new(),
    };
    let requests: Vec<Request> =
        (0..batch_size).map(|_| Request::new(prompts.next(context), params(max_tokens))).collect();
    let streams =
        requests.into_iter().map(|request| llm.engine().submit(request)).collect::<Result<Vec<_>>>()?;
    let clock_ref = &clock;
    let times = std::thread::scope(|scope| {
        let readers: Vec<_> = streams
            .into_iter()
            .map(|stream| scope.spawn(move || clock_ref.read(stream, max_tokens)))
            .collect();
        readers
            .into_iter()
            .map(|reader| reader.join().unwrap_or_else(|_| Err(failed(None))))
            .collect::<Result<Vec<Vec<Instant>>>>()
    })?;
    let (Some(begin), Some(end)) = (clock.begin.get(), clock.end.get()) else { return Err(failed(None)) };
    let window = Window::of(&times, begin.at, end.at, context);
    let seconds = end.at.saturating_duration_since(begin.at).as_secs_f64();
    let kernel_seconds = end.kernel_time.saturating_sub(begin.kernel_time).as_secs_f64();
    Ok(GenerationRun {
        num_tokens: window.num_tokens,
        seconds,
        num_cache_positions: window.num_cache_positions,
        num_dispatches: end.num_dispatches.saturating_sub(begin.num_dispatches),
        host_seconds: (seconds - kernel_seconds).max(0.0),
    })
}

/// Checks that a generation measurement fits into the context window and the cache, so that no
/// sequence is preempted while it is measured.
///
/// # Errors
/// [`ErrorKind::Capacity`] or [`ErrorKind::ContextLength`], with the numbers.
pub(super) fn check_generation(
    llm: &Llm,
    batch_size: usize,
    context: usize,
    num_tokens: usize,
) -> Result<()> {
    let config = llm.engine().config();
    if batch_size > config.max_num_seqs {
        return Err(Error::invalid_request(format!(
            "a batch of {batch_size} is more than --max-num-seqs, which is {}",
            config.max_num_seqs
        )));
    }
    let len = context.saturating_add(num_output_tokens(llm, batch_size, context, num_tokens));
    if len > config.max_model_len {
        return Err(Error::new(
            ErrorKind::ContextLength,
            format!(
                "generating {num_tokens} tokens at context {context} with batch {batch_size} takes sequences of \
                 {len} tokens, but the context window is {} tokens",
                config.max_model_len
            ),
        )
        .with_hint("lower --context-len, --output-len or --batch-size, or raise --max-model-len"));
    }
    let num_blocks = len.div_ceil(config.block_size).saturating_mul(batch_size);
    if num_blocks > config.num_blocks {
        return Err(Error::new(
            ErrorKind::Capacity,
            format!(
                "{batch_size} sequences of {len} tokens take {num_blocks} blocks of the KV cache, but it has {}",
                config.num_blocks
            ),
        )
        .with_hint("lower --batch-size or --context-len, or raise --kv-cache-memory-bytes"));
    }
    Ok(())
}

/// Tokens that each sequence generates: the wanted ones, and one for each step that computes prompts of
/// the others before all have started.
fn num_output_tokens(llm: &Llm, batch_size: usize, context: usize, num_tokens: usize) -> usize {
    let budget = llm.engine().config().max_num_batched_tokens.saturating_sub(batch_size).max(1);
    let num_prompt_steps = batch_size.saturating_mul(context).div_ceil(budget);
    // Requests arrive one by one, so each may also wait for a step that began without it.
    let num_arrival_steps = if batch_size == 1 { 0 } else { batch_size };
    num_tokens.saturating_add(1).saturating_add(num_prompt_steps).saturating_add(num_arrival_steps)
}

fn params(max_tokens: usize) -> SamplingParams {
    SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::greedy() }
}

fn failed(error: Option<String>) -> Error {
    Error::internal(match error {
        Some(error) => format!("a measured request failed: {error}"),
        None => "a measured request ended too early".to_owned(),
    })
}

/// Notes when tokens arrive, and what the counters are at both ends of the window.
struct Clock<'a> {
    llm: &'a Llm,
    batch_size: usize,
    num_started: AtomicUsize,
    begin: OnceLock<Snapshot>,
    end: OnceLock<Snapshot>,
}

struct Snapshot {
    at: Instant,
    num_dispatches: u64,
    kernel_time: Duration,
}

impl Clock<'_> {
    fn read(&self, stream: RequestStream, max_tokens: usize) -> Result<Vec<Instant>> {
        let mut times = Vec::with_capacity(max_tokens);
        for event in stream {
            match event {
                Event::Token { .. } => {
                    times.push(Instant::now());
                    if times.len() == 1
                        && self.num_started.fetch_add(1, Ordering::Relaxed) + 1 == self.batch_size
                    {
                        self.begin.get_or_init(|| self.snapshot());
                    }
                    if times.len() == max_tokens {
                        self.end.get_or_init(|| self.snapshot());
                    }
                }
                Event::Finished { error: Some(error), .. } => return Err(failed(Some(error))),
                Event::Finished { .. } | Event::PromptLogits { .. } => {}
            }
        }
        Ok(times)
    }

    fn snapshot(&self) -> Snapshot {
        let context = self.llm.context();
        Snapshot {
            at: Instant::now(),
            num_dispatches: context.num_dispatches(),
            kernel_time: context.kernel_time(),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Window {
    num_tokens: usize,
    num_cache_positions: usize,
}

impl Window {
    /// Tokens that arrived after `begin` and until `end`.
    fn of(times: &[Vec<Instant>], begin: Instant, end: Instant, context: usize) -> Self {
        let mut window = Self { num_tokens: 0, num_cache_positions: 0 };
        for times in times {
            for (index, _) in times.iter().enumerate().filter(|(_, at)| **at > begin && **at <= end) {
                window.num_tokens += 1;
                // Output `index` was computed from the prompt and the outputs before it.
                window.num_cache_positions += context + index;
            }
        }
        window
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_counts_what_arrives_while_all_generate() {
        let start = Instant::now();
        let at = |milliseconds: u64| start + Duration::from_millis(milliseconds);
        let times = [vec![at(1), at(4), at(6), at(8)], vec![at(3), at(5), at(7), at(9)]];
        let window = Window::of(&times, at(3), at(8), 10);
        assert_eq!(window, Window { num_tokens: 5, num_cache_positions: 11 + 12 + 13 + 11 + 12 });
    }

    #[test]
    fn prompts_differ_and_stay_in_the_vocabulary() {
        let mut prompts = RandomPrompts::new(50);
        let (first, second) = (prompts.next(64), prompts.next(64));
        assert_ne!(first, second);
        assert!(first.iter().chain(&second).all(|token| *token < 50));
    }
}
