//! Launches of sampling, and its metadata.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable, bytes_of, cast_slice, cast_slice_mut};

use super::backend::{Flags, GpuBackend, Work};
use super::cost::Cost;
use super::kernel::Kernel;
use super::{Binding, GpuBuffer, Placement, Ticket};
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::sample::{Sample, SampleParams, SampledTokens};

/// Threads of a row, if the device allows them: 32 for each of the kernel's segments of a vocabulary.
const NUM_THREADS: usize = 1024;

/// Passes of the kernel over a row of logits: for the most likely token, before and after changes to single logits, for
/// the weights of all tokens, and for the draw.
const PASSES: usize = 6;

/// Passes to find a threshold: one for each bit of a weight below 1 and of a token.
const PASSES_OF_A_FILTER: usize = 48;

/// Ranges of rows begin where the offset of their parameters is a multiple of 256 bytes.
const ROW_UNIT: usize = 32;

/// `SampleArgs` of the kernel.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SampleArgs {
    vocab_size: u32,
    num_rows: u32,
    step: u32,
}

/// `SampleRow` of the kernel.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SampleRow {
    inverse_temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    seed_low: u32,
    seed_high: u32,
    stream: u32,
    num_output_tokens: u32,
    min_tokens: u32,
    history_start: u32,
    history_len: u32,
    bias_start: u32,
    bias_len: u32,
    ban_start: u32,
    ban_len: u32,
}

/// `Seen` of the kernel.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Seen {
    token_id: u32,
    count: u32,
}

/// `Bias` of the kernel.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Bias {
    token_id: u32,
    bias: f32,
}

/// A buffer that grows with its contents.
#[derive(Debug)]
struct Growing(Arc<GpuBuffer>);

impl Growing {
    fn new(gpu: &GpuBackend, len: usize) -> Result<Self> {
        gpu.device().allocate(len, Placement::Shared).map(|buffer| Self(Arc::new(buffer)))
    }

    /// Reserves space for `len` bytes. Previous contents are lost.
    fn reserve(&mut self, gpu: &GpuBackend, len: usize) -> Result<()> {
        if len > self.0.len() {
            *self = Self::new(gpu, len.next_power_of_two())?;
        }
        Ok(())
    }

    fn write(&mut self, gpu: &GpuBackend, bytes: &[u8]) -> Result<()> {
        self.reserve(gpu, bytes.len())?;
        gpu.device().write(&self.0, 0, bytes)
    }
}

/// The sampler of a GPU.
#[derive(Debug)]
pub(crate) struct GpuSampler {
    rows: Growing,
    history: Growing,
    biases: Growing,
    banned: Growing,
    sampled: Growing,
    num_rows: usize,
    /// The maximum over all rows.
    num_passes: usize,
    tickets: Vec<Ticket>,
}

impl Sample for Arc<GpuBackend> {
    fn sampler(&self) -> Result<Option<GpuSampler>> {
        GpuSampler::new(self).map(Some)
    }

    fn begin<'a>(
        &self,
        sampler: &mut GpuSampler,
        params: impl Iterator<Item = SampleParams<'a>>,
        num_steps: usize,
    ) -> Result<()> {
        sampler.begin(self, params, num_steps)
    }

    fn launch(&self, sampler: &mut GpuSampler, logits: &Buffer) -> Result<()> {
        sampler.launch(self, logits.held().on(self)?.values()?, logits.width())
    }

    fn on_device(&self, sampler: &GpuSampler, step: usize) -> Result<SampledTokens> {
        Ok(SampledTokens::new(Arc::clone(&sampler.sampled.0), step * sampler.num_rows * 4))
    }

    fn tokens(&self, sampler: &GpuSampler, step: usize, tokens: &mut Vec<u32>) -> Result<()> {
        sampler.tokens(self, step, tokens)
    }
}

impl GpuSampler {
    fn new(gpu: &GpuBackend) -> Result<Self> {
        let small = || Growing::new(gpu, 4096);
        Ok(Self {
            rows: small()?,
            history: small()?,
            biases: small()?,
            banned: small()?,
            sampled: small()?,
            num_rows: 0,
            num_passes: PASSES,
            tickets: Vec::new(),
        })
    }

    /// Waits for earlier sampling and uploads the parameters of the rows to be sampled in `num_steps` steps.
    fn begin<'a>(
        &mut self,
        gpu: &GpuBackend,
        params: impl Iterator<Item = SampleParams<'a>>,
        num_steps: usize,
    ) -> Result<()> {
        // After a multi-step whose rows have all ended, its last pass may still read this metadata.
        if let Some(&ticket) = self.tickets.last() {
            gpu.wait(ticket)?;
        }
        let (mut rows, mut history, mut biases, mut banned) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        self.num_passes = PASSES;
        for params in params {
            let num_filters = usize::from(params.top_k > 0) + usize::from(params.top_p < 1.0);
            self.num_passes = self.num_passes.max(PASSES + num_filters * PASSES_OF_A_FILTER);
            let starts = [history.len(), biases.len(), banned.len()];
            add_history(&params, &mut history);
            biases.extend(params.logit_bias.iter().map(|(&token_id, &bias)| Bias { token_id, bias }));
            banned.extend_from_slice(params.banned);
            rows.push(SampleRow {
                inverse_temperature: params.inverse_temperature,
                top_k: u32::try_from(params.top_k).unwrap_or(u32::MAX),
                top_p: params.top_p,
                min_p: params.min_p,
                repetition_penalty: params.repetition_penalty,
                presence_penalty: params.presence_penalty,
                frequency_penalty: params.frequency_penalty,
                seed_low: params.seed as u32,
                seed_high: (params.seed >> 32) as u32,
                stream: params.stream,
                num_output_tokens: params.output_token_ids.len() as u32,
                min_tokens: u32::try_from(params.min_tokens).unwrap_or(u32::MAX),
                history_start: starts[0] as u32,
                history_len: (history.len() - starts[0]) as u32,
                bias_start: starts[1] as u32,
                bias_len: (biases.len() - starts[1]) as u32,
                ban_start: starts[2] as u32,
                ban_len: (banned.len() - starts[2]) as u32,
            });
        }
        self.rows.write(gpu, cast_slice(&rows))?;
        self.history.write(gpu, cast_slice(&history))?;
        self.biases.write(gpu, cast_slice(&biases))?;
        self.banned.write(gpu, cast_slice(&banned))?;
        self.sampled.reserve(gpu, num_steps * rows.len() * 4)?;
        self.num_rows = rows.len();
        self.tickets.clear();
        Ok(())
    }

    /// Queues the sampling of one token for each row from `[num_rows, vocab_size]` logits, which it changes, and lets
    /// the device start.
    fn launch(&mut self, gpu: &GpuBackend, logits: &GpuBuffer, vocab_size: usize) -> Result<()> {
        let args = SampleArgs {
            vocab_size: vocab_size as u32,
            num_rows: self.num_rows as u32,
            step: self.tickets.len() as u32,
        };
        let cost_of_one = Cost::bytes(4 * vocab_size * self.num_passes);
        let len = gpu.dispatch_budget().num_within(cost_of_one, ROW_UNIT);
        for first in (0..self.num_rows).step_by(len) {
            let len = len.min(self.num_rows - first);
            let buffers = [
                Binding::read(&self.rows.0).at(first * size_of::<SampleRow>()),
                Binding::read(&self.history.0),
                Binding::read(&self.biases.0),
                Binding::read(&self.banned.0),
                Binding::read_write(logits).at(4 * first * vocab_size),
                Binding::read_write(&self.sampled.0).at(4 * first),
            ];
            gpu.launch(
                Kernel::Sample,
                Flags::default(),
                Work {
                    args: bytes_of(&args),
                    buffers: &buffers,
                    threadgroup_memory: 0,
                    grid: [len, 1, 1],
                    num_threads: NUM_THREADS.min(vocab_size.next_multiple_of(32)),
                    cost: (0..len).map(|_| cost_of_one).sum(),
                },
            )?;
        }
        self.tickets.push(gpu.commit()?);
        Ok(())
    }

    /// Waits for a step and reads its tokens; `u32::MAX` means NaN logits.
    fn tokens(&self, gpu: &GpuBackend, step: usize, tokens: &mut Vec<u32>) -> Result<()> {
        gpu.wait(self.tickets[step])?;
        tokens.clear();
        tokens.resize(self.num_rows, 0);
        gpu.read_finished(&self.sampled.0, step * self.num_rows * 4, cast_slice_mut(tokens))
    }
}

/// The tokens that penalties apply to, each once.
fn add_history(params: &SampleParams<'_>, history: &mut Vec<Seen>) {
    let start = history.len();
    if params.repetition_penalty != 1.0 {
        history.extend(params.prompt_token_ids.iter().map(|&token_id| Seen { token_id, count: 0 }));
    }
    if params.has_penalties() {
        history.extend(params.output_token_ids.iter().map(|&token_id| Seen { token_id, count: 1 }));
    }
    history[start..].sort_unstable_by_key(|seen| seen.token_id);
    let mut end = start;
    for index in start..history.len() {
        let seen = history[index];
        if end > start && history[end - 1].token_id == seen.token_id {
            history[end - 1].count += seen.count;
        } else {
            history[end] = seen;
            end += 1;
        }
    }
    history.truncate(end);
}
