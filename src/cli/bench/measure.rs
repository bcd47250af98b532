//! The measurements of `tinyvllm bench`: how fast a loaded model computes prompts and generates.
//!
//! Prompts are random token ids, different in every run, so that no run finds another one's blocks in the
//! prefix cache. Times are the engine's own ([`SequenceStats`]). The time at which a reader sees a token
//! would depend on the system's scheduler, because other threads use every core.

use std::thread;
use std::time::{Duration, Instant};

use tinyvllm::engine::{Event, Request, RequestStream, SequenceStats};
use tinyvllm::llm::Llm;
use tinyvllm::sampling::SamplingParams;
use tinyvllm::{Error, ErrorKind, Result};

/// One run of a generation measurement, over the time in which all sequences generate.
#[derive(Debug, Clone, Copy)]
pub(super) struct GenerationRun {
    /// Generated tokens of all sequences.
    pub(super) num_tokens: usize,
    /// Duration of the run.
    pub(super) seconds: f64,
    /// Number of cache positions that these tokens read, summed over tokens.
    pub(super) num_cache_positions: usize,
    /// Dispatches per token.
    pub(super) dispatches_per_token: f64,
    /// Time outside of kernels per token.
    pub(super) host_seconds_per_token: f64,
}

/// Generates random token ids below `vocab_size`, a new sequence with every call.
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

/// Prompts that are computed together.
#[derive(Debug, Clone, Copy)]
pub(super) struct PromptShape {
    pub(super) num_prompts: usize,
    /// Tokens of each.
    pub(super) num_tokens: usize,
    /// Tokens before those, which are already cached.
    pub(super) depth: usize,
}

/// Prompt tokens per second, from the submission of the first prompt to the first token of the last one.
pub(super) fn prompts(llm: &Llm, random: &mut RandomPrompts, shape: PromptShape) -> Result<f64> {
    let PromptShape { num_prompts, num_tokens, depth } = shape;
    let mut requests = Vec::with_capacity(num_prompts);
    for _ in 0..num_prompts {
        let mut tokens = random.next(depth);
        if depth > 0 {
            finish(llm.engine().submit(Request::new(tokens.clone(), params(1)))?)?;
        }
        tokens.extend(random.next(num_tokens));
        requests.push(Request::new(tokens, params(1)));
    }
    let start = Instant::now();
    let (mut num_computed, mut end) = (0, Duration::ZERO);
    for (accepted, stream) in submit_together(llm, requests)? {
        let arrival = accepted.saturating_duration_since(start);
        let stats = finish(stream)?;
        // Only whole blocks are shared: the rest of the last one is computed again.
        num_computed += depth + num_tokens - stats.num_cached_tokens;
        end = end.max(arrival + stats.queue_time + stats.prefill_time);
    }
    Ok(num_computed as f64 / end.as_secs_f64())
}

/// Generates with `batch_size` sequences that each have `context` tokens in the cache when they start.
///
/// The sequences do not start together, since a step computes only some of their prompts. The last one that
/// arrives starts last. It generates `num_tokens` after its first, while the others have no limit but the
/// context. So between its first and its last token, each step generates one token for each sequence.
pub(super) fn generation(
    llm: &Llm,
    prompts: &mut RandomPrompts,
    batch_size: usize,
    context: usize,
    num_tokens: usize,
) -> Result<GenerationRun> {
    // The first sequence of a tiny model can reach the end of its context before this thread has submitted
    // the rest.
    for _ in 1..NUM_ATTEMPTS {
        if let Some(run) = attempt(llm, prompts, batch_size, context, num_tokens)? {
            return Ok(run);
        }
    }
    attempt(llm, prompts, batch_size, context, num_tokens)?.ok_or_else(|| failed(None))
}

/// Attempts of a measurement. It is repeated if a sequence ended before the last one did.
const NUM_ATTEMPTS: usize = 20;

/// `None` if a sequence ended before the last one.
fn attempt(
    llm: &Llm,
    prompts: &mut RandomPrompts,
    batch_size: usize,
    context: usize,
    num_tokens: usize,
) -> Result<Option<GenerationRun>> {
    let config = llm.engine().config();
    let capacity =
        (config.num_blocks / batch_size).saturating_mul(config.block_size).min(config.max_model_len);
    let max_tokens = capacity.saturating_sub(context).max(num_tokens + 1);
    let mut request = |max_tokens| Request::new(prompts.next(context), params(max_tokens));
    let others: Vec<Request> = (1..batch_size).map(|_| request(max_tokens)).collect();
    let last = request(num_tokens + 1);

    let before = Counters::when_idle(llm)?;
    let mut others = submit_together(llm, others)?;
    let stats = finish(llm.engine().submit(last)?)?;
    for (_, stream) in &mut others {
        while let Some(event) = stream.try_next() {
            match event {
                Event::Finished { error: None, .. } => return Ok(None),
                Event::Finished { error, .. } => return Err(failed(error)),
                Event::Token { .. }
                | Event::Hidden { .. }
                | Event::PromptLogits { .. }
                | Event::PromptLogprobs { .. }
                | Event::PromptProgress { .. } => {}
            }
        }
    }
    // Aborts the others.
    drop(others);
    let after = Counters::when_idle(llm)?;

    let num_steps = after.num_steps.saturating_sub(before.num_steps).max(1) as f64;
    let num_dispatches = after.num_dispatches.saturating_sub(before.num_dispatches) as f64;
    let kernel_time = after.kernel_time.saturating_sub(before.kernel_time);
    let host_time = after.at.saturating_duration_since(before.at).saturating_sub(kernel_time);
    let per_token = |total: f64| total / num_steps / batch_size as f64;
    Ok(Some(GenerationRun {
        num_tokens: batch_size * num_tokens,
        seconds: stats.decode_time.as_secs_f64(),
        num_cache_positions: batch_size * (1..=num_tokens).map(|index| context + index).sum::<usize>(),
        dispatches_per_token: per_token(num_dispatches),
        host_seconds_per_token: per_token(host_time.as_secs_f64()),
    }))
}

/// Submits requests at the same time, as the clients of a server do: the engine takes all that arrived
/// between two steps. Waiting for each to be accepted would add a step for each, and a token to every running
/// sequence. Returns each with the time at which it was accepted.
fn submit_together(llm: &Llm, requests: Vec<Request>) -> Result<Vec<(Instant, RequestStream)>> {
    let submit = |request| llm.engine().submit(request).map(|stream| (Instant::now(), stream));
    thread::scope(|scope| {
        let start = |request| {
            let thread = thread::Builder::new().spawn_scoped(scope, move || submit(request));
            thread.map_err(|source| Error::io("cannot start a thread for each request", source))
        };
        let threads: Vec<_> = requests.into_iter().map(start).collect::<Result<_>>()?;
        let accepted = threads.into_iter().map(|thread| thread.join().map_err(|_| failed(None))?);
        accepted.collect()
    })
}

/// Checks that prompts fit into the context.
///
/// # Errors
/// [`ErrorKind::ContextLength`], with the numbers.
pub(super) fn check_prompts(llm: &Llm, shape: PromptShape) -> Result<()> {
    let PromptShape { num_tokens, depth, .. } = shape;
    let max_model_len = llm.engine().config().max_model_len;
    let len = num_tokens.saturating_add(depth);
    if len < max_model_len {
        return Ok(());
    }
    let message = format!(
        "a prompt of {num_tokens} tokens at depth {depth} and the token after it need {} tokens, but the context \
         window is {max_model_len} tokens",
        len.saturating_add(1)
    );
    Err(Error::new(ErrorKind::ContextLength, message)
        .with_hint("lower --prompt-lens or --prompt-depths, or raise --max-model-len"))
}

/// Checks that a generation measurement fits into the context and the cache, so that no sequence is preempted
/// during it.
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
                "generating {num_tokens} tokens at context {context} with batch {batch_size} needs sequences of \
                 {len} tokens, but the context window is {} tokens",
                config.max_model_len
            ),
        )
        .with_hint("lower --context-lens, --output-len or --batch-sizes, or raise --max-model-len"));
    }
    let num_blocks = len.div_ceil(config.block_size).saturating_mul(batch_size);
    if num_blocks > config.num_blocks {
        return Err(Error::new(
            ErrorKind::Capacity,
            format!(
                "{batch_size} sequences of {len} tokens need {num_blocks} blocks of the KV cache, but it has {}",
                config.num_blocks
            ),
        )
        .with_hint("lower --batch-size or --context-len, or raise --kv-cache-memory-bytes"));
    }
    Ok(())
}

/// Tokens that a sequence needs space for: the measured ones, and one for each step before all sequences have
/// started.
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

pub(super) fn failed(error: Option<String>) -> Error {
    Error::internal(match error {
        Some(error) => format!("a measured request failed: {error}"),
        None => "a measured request ended too early".to_owned(),
    })
}

/// Reads a request of one sequence to its end.
fn finish(stream: RequestStream) -> Result<SequenceStats> {
    for event in stream {
        if let Event::Finished { error, stats, .. } = event {
            return match error {
                None => Ok(stats),
                error => Err(failed(error)),
            };
        }
    }
    Err(failed(None))
}

/// Counters since the start.
#[derive(Debug)]
struct Counters {
    at: Instant,
    num_steps: u64,
    num_dispatches: u64,
    kernel_time: Duration,
}

impl Counters {
    /// Waits until the engine is idle, and reads the counters.
    fn when_idle(llm: &Llm) -> Result<Self> {
        // The engine answers between two steps, so this loop does not spin.
        let mut stats = llm.engine().stats()?;
        while stats.num_running + stats.num_waiting > 0 {
            stats = llm.engine().stats()?;
        }
        let context = llm.context();
        Ok(Self {
            at: Instant::now(),
            num_steps: stats.num_steps,
            num_dispatches: context.num_dispatches(),
            kernel_time: context.kernel_time(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_differ_and_stay_in_the_vocabulary() {
        let mut prompts = RandomPrompts::new(50);
        let (first, second) = (prompts.next(64), prompts.next(64));
        assert_ne!(first, second);
        assert!(first.iter().chain(&second).all(|token| *token < 50));
    }
}
