//! Command buffers and encoders: the queued work, its order, and its completion.
//!
//! Work is added to one command buffer, with at most one encoder open. Each encoder waits for the fence that the
//! previous one updates, so work runs in the order in which it was queued, and a command buffer completes after all
//! earlier ones. Nothing here calls back into the queue while its lock is held.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_metal_kernels::metal::{
    BlitCommandEncoder, Buffer, CommandBuffer, CommandQueue, ComputeCommandEncoder, ComputePipeline, Device,
    Fence, PrevCeOutputs, ResidencySet,
};
use objc2::available;
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_metal::{
    MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandQueue, MTLDevice, MTLDispatchType, MTLGPUFamily,
};

use super::{exhausted, metal_message};
use crate::ops::gpu::device::THREADGROUP_UNIT;
use crate::ops::gpu::device::Ticket;
use crate::{Error, Result};

/// Dispatches after which a command buffer is committed automatically. A decode step has fewer; longer work should not
/// leave the device idle until all of it is encoded.
const MAX_DISPATCHES: usize = 512;

pub(super) struct Queue {
    queue: CommandQueue,
    /// One for all encoders: each waits for its last update and updates it itself.
    fence: Arc<Fence>,
    with_barriers: bool,
    state: Mutex<State>,
}

struct State {
    open: Option<Open>,
    /// Whether any encoder has updated the fence, or will before the next one starts.
    fence_is_used: bool,
    /// Committed and not known to be complete, oldest first, with their numbers.
    in_flight: VecDeque<(u64, CommandBuffer)>,
    /// The number of the last command buffer that was committed; the first one's is 1.
    num_committed: u64,
    /// The device's first error. After it, its memory is unreliable.
    failure: Option<String>,
    residency: Option<ResidencySet>,
    /// Dropped buffers that command buffers up to this number may still use.
    retired: Vec<(u64, Buffer)>,
    /// Bytes uploaded since the last commit that uploads caused.
    num_staged_bytes: usize,
}

/// The command buffer that work is added to.
struct Open {
    commands: Retained<ProtocolObject<dyn MTLCommandBuffer>>,
    compute: Option<Compute>,
    num_dispatches: usize,
}

struct Compute {
    encoder: ComputeCommandEncoder,
    /// The last value of `threadgroup(0)`; 0 if it was never set.
    threadgroup_memory: usize,
}

// SAFETY: any thread may use command buffers and encoders, but one at a time, which the mutex around `State` ensures;
// the other fields are `Send` themselves.
unsafe impl Send for Open {}

impl Queue {
    pub(super) fn new(device: &Device, with_barriers: bool) -> Result<Self> {
        let queue = device
            .new_command_queue()
            .map_err(|error| Error::internal(metal_message("no command queue was made", error)))?;
        // The set keeps memory resident between command buffers, also after a pause. A virtual machine's device does
        // not support such sets.
        let has_sets = available!(macos = 15.0) && device.as_ref().supportsFamily(MTLGPUFamily::Apple6);
        let residency = has_sets.then(|| ResidencySet::new(device));
        if let Some(set) = residency.as_ref().and_then(ResidencySet::raw) {
            queue.addResidencySet(set);
        }
        let state = State {
            open: None,
            fence_is_used: false,
            in_flight: VecDeque::new(),
            num_committed: 0,
            failure: None,
            residency,
            retired: Vec::new(),
            num_staged_bytes: 0,
        };
        Ok(Self { queue, fence: Arc::new(Fence::new(device)), with_barriers, state: Mutex::new(state) })
    }

    /// Encodes one dispatch of a pipeline. If `encode` fails, it must not have encoded the dispatch itself.
    pub(super) fn compute(
        &self,
        pipeline: &ComputePipeline,
        threadgroup_memory: usize,
        encode: impl FnOnce(&ComputeCommandEncoder) -> Result<()>,
    ) -> Result<()> {
        let mut state = self.lock();
        let State { open, fence_is_used, .. } = self.open(&mut state)?;
        let Some(open) = open else { return Err(exhausted("a command buffer")) };
        let compute = match open.compute.take() {
            Some(compute) => open.compute.insert(compute),
            None => open.compute.insert(self.start_compute(&open.commands, fence_is_used)?),
        };
        // Metal rejects a length of 0: after a kernel with threadgroup memory, one without gets the minimum.
        let wanted = match (threadgroup_memory, compute.threadgroup_memory) {
            (0, 0) => 0,
            (wanted, _) => wanted.next_multiple_of(THREADGROUP_UNIT).max(THREADGROUP_UNIT),
        };
        // The pipeline comes first: Metal may compare a length with the static memory of the current one.
        compute.encoder.set_compute_pipeline_state(pipeline);
        if wanted != compute.threadgroup_memory {
            compute.threadgroup_memory = wanted;
            compute.encoder.set_threadgroup_memory_length(0, wanted);
        }
        encode(&compute.encoder)?;
        if self.with_barriers {
            compute.encoder.insert_memory_barrier();
        }
        open.num_dispatches += 1;
        if open.num_dispatches >= MAX_DISPATCHES {
            state.commit();
        }
        Ok(())
    }

    /// Encodes copies as a pass of their own.
    pub(super) fn blit(&self, encode: impl FnOnce(&mut BlitCommandEncoder)) -> Result<()> {
        let mut state = self.lock();
        let State { open, fence_is_used, .. } = self.open(&mut state)?;
        let Some(open) = open else { return Err(exhausted("a command buffer")) };
        open.end_compute();
        let raw = open.commands.blitCommandEncoder().ok_or_else(|| exhausted("a command encoder"))?;
        // candle's map of writers is for its own queue. Here every pass waits for the earlier ones.
        let mut blit = BlitCommandEncoder::new(raw, Arc::clone(&self.fence), PrevCeOutputs::default());
        if std::mem::replace(fence_is_used, true) {
            blit.wait_for_fence(&self.fence);
        }
        encode(&mut blit);
        blit.end_encoding();
        Ok(())
    }

    /// Commits encoded work. If there is none, returns the ticket of the last commit.
    pub(super) fn commit(&self) -> Result<Ticket> {
        let mut state = self.lock();
        state.ensure_sound()?;
        state.commit();
        Ok(Ticket(state.num_committed))
    }

    /// Waits for all command buffers up to the ticket's.
    pub(super) fn wait(&self, ticket: Ticket) -> Result<()> {
        let last = {
            let state = self.lock();
            let mut waited_for = state.in_flight.iter().filter(|(number, _)| *number <= ticket.0);
            waited_for.next_back().map(|(_, commands)| commands.clone())
        };
        // Without the lock, so that other threads can queue work meanwhile.
        if let Some(commands) = last {
            commands.wait_until_completed();
        }
        let mut state = self.lock();
        state.reap();
        state.ensure_sound()
    }

    /// Counts `len` bytes of copies in shared memory that are queued for upload. Each `limit` bytes are committed, and
    /// the previous ones are waited for.
    pub(super) fn limit_staged(&self, len: usize, limit: usize) -> Result<()> {
        let before = {
            let mut state = self.lock();
            state.num_staged_bytes = state.num_staged_bytes.saturating_add(len);
            if state.num_staged_bytes < limit {
                return Ok(());
            }
            state.num_staged_bytes = 0;
            let before = state.num_committed;
            state.commit();
            before
        };
        self.wait(Ticket(before))
    }

    /// Keeps a buffer resident until it is retired.
    pub(super) fn make_resident(&self, buffer: &Buffer) {
        if let Some(set) = &self.lock().residency {
            set.insert(buffer);
        }
    }

    /// Releases a buffer when no queued work can use it any more.
    pub(super) fn retire(&self, buffer: Buffer) {
        let mut state = self.lock();
        let last_use = state.num_committed + u64::from(state.open.is_some());
        state.retired.push((last_use, buffer));
        state.reap();
    }

    /// The state with a command buffer in `open`.
    fn open<'a>(&self, state: &'a mut State) -> Result<&'a mut State> {
        state.ensure_sound()?;
        if state.open.is_none() {
            // This waits if the queue has 64 incomplete command buffers; all of those are committed.
            let commands = self.queue.commandBuffer().ok_or_else(|| exhausted("a command buffer"))?;
            state.open = Some(Open { commands, compute: None, num_dispatches: 0 });
        }
        Ok(state)
    }

    /// An encoder whose dispatches run concurrently except for candle's barriers.
    fn start_compute(
        &self,
        commands: &Retained<ProtocolObject<dyn MTLCommandBuffer>>,
        fence_is_used: &mut bool,
    ) -> Result<Compute> {
        let raw = commands
            .computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent)
            .ok_or_else(|| exhausted("a command encoder"))?;
        let encoder = ComputeCommandEncoder::new(raw, commands.clone(), Arc::clone(&self.fence));
        if std::mem::replace(fence_is_used, true) {
            encoder.wait_for_fence(&self.fence);
        }
        Ok(Compute { encoder, threadgroup_memory: 0 })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Metal aborts the process if an encoder is freed before it was ended. Its work is not run.
        if let Some(open) = &mut state.open {
            open.end_compute();
        }
        if let Some((_, last)) = state.in_flight.back() {
            last.wait_until_completed();
        }
    }
}

impl State {
    fn ensure_sound(&self) -> Result<()> {
        match &self.failure {
            None => Ok(()),
            Some(failure) => Err(Error::internal(format!("the device failed: {failure}"))
                .with_hint("start again; if it fails again, use --device cpu")),
        }
    }

    fn commit(&mut self) {
        self.reap();
        if let Some(mut open) = self.open.take() {
            open.end_compute();
            open.commands.commit();
            self.num_committed += 1;
            self.in_flight.push_back((self.num_committed, CommandBuffer::new(open.commands)));
        }
    }

    /// Drops completed command buffers.
    fn reap(&mut self) {
        while let Some((_, commands)) = self.in_flight.front() {
            match commands.status() {
                MTLCommandBufferStatus::Completed => {}
                MTLCommandBufferStatus::Error => {
                    let message =
                        commands.as_ref().error().map(|error| error.localizedDescription().to_string());
                    self.failure.get_or_insert(message.unwrap_or_else(|| "it does not say why".to_owned()));
                }
                _ => break,
            }
            self.in_flight.pop_front();
        }
        let num_done = self.in_flight.front().map_or(self.num_committed, |(number, _)| number - 1);
        let residency = &self.residency;
        self.retired.retain(|(last_use, buffer)| {
            let in_use = *last_use > num_done;
            if let (false, Some(set)) = (in_use, residency) {
                set.remove(buffer);
            }
            in_use
        });
    }
}

impl Open {
    fn end_compute(&mut self) {
        if let Some(compute) = self.compute.take() {
            compute.encoder.end_encoding();
        }
    }
}
