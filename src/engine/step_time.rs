//! Measures the time of steps. A device computes asynchronously, so a step whose results are not read, such as a chunk
//! of a prompt, adds to the time of the next one that is waited for.

use std::time::{Duration, Instant};

use super::EngineCore;
use crate::scheduler::SchedulerOutput;

/// The maximum time of the engine between consecutive steps. After a longer gap, the device's progress is unknown.
const LONGEST_BREAK: Duration = Duration::from_millis(50);

/// Steps that the device may still compute.
pub(super) struct QueuedSteps {
    start: Instant,
    /// When the last of them was given to the device.
    last: Instant,
    number: u32,
}

impl EngineCore {
    /// Reports the time of this plan's step, which began at `start` and is executed, to the scheduler.
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

    /// Queued steps give no measurement.
    pub(super) fn forget_queued_steps(&mut self) {
        self.queued = None;
        self.scheduler.forget_queued();
    }
}
