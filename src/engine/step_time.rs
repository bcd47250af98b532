//! What steps take. A device computes behind the engine's back, so a step whose results nobody reads, such as a chunk of a
//! prompt, shows in the time of the next one that is waited for.

use std::time::{Duration, Instant};

use super::EngineCore;
use crate::scheduler::SchedulerOutput;

/// Between steps that are computed one behind the other, the engine takes no longer than that. After a longer time nobody knows
/// what a device has done meanwhile.
const LONGEST_BREAK: Duration = Duration::from_millis(50);

/// Steps that the device may still compute.
pub(super) struct QueuedSteps {
    start: Instant,
    /// When the last of them was given to the device.
    last: Instant,
    number: u32,
}

impl EngineCore {
    /// Tells the scheduler what the step of this plan took, which began at `start` and is executed.
    pub(super) fn note_step_time(&mut self, plan: &SchedulerOutput, start: Instant) {
        if self.queued.as_ref().is_some_and(|queued| start.duration_since(queued.last) > LONGEST_BREAK) {
            self.forget_queued_steps();
        }
        let (start, number) =
            self.queued.take().map_or((start, 1), |queued| (queued.start, queued.number + 1));
        if self.runner.is_computing() {
            self.queued = Some(QueuedSteps { start, last: Instant::now(), number });
            self.scheduler.note_queued(plan);
        } else {
            let time = start.elapsed();
            self.step_time = time / number;
            self.scheduler.learn(plan, time.as_secs_f64());
        }
    }

    /// What was queued says nothing.
    pub(super) fn forget_queued_steps(&mut self) {
        self.queued = None;
        self.scheduler.forget_queued();
    }
}
