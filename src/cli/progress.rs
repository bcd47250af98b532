//! Progress of downloads, loading and prompts, on standard error if it is a terminal.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use tinyvllm::llm::TextEvent;
use tinyvllm::{hub, llm};

use super::console::Console;
use super::value::human_bytes;

/// The bar of the current stage. Stages do not overlap.
#[derive(Debug)]
pub(crate) struct Progress {
    console: Console,
    is_visible: bool,
    bar: Mutex<ProgressBar>,
    loading: Mutex<Loading>,
}

/// The state of loading. Kernels are compiled during a stage and possibly after it.
#[derive(Debug, Default)]
struct Loading {
    stage: Option<String>,
    /// Compiled kernels and all kernels; `None` when all are compiled.
    kernels: Option<(usize, usize)>,
}

impl Loading {
    /// The text before the bar.
    fn message(&self) -> Option<String> {
        let kernels = self.kernels.map(|(num_done, all)| format!("compiling kernels {num_done}/{all}"));
        match (&self.stage, kernels) {
            (Some(stage), Some(kernels)) => Some(format!("{stage}, {kernels}")),
            (Some(stage), None) => Some(stage.clone()),
            (None, kernels) => kernels,
        }
    }
}

impl Progress {
    pub(crate) fn new(console: Console) -> Self {
        let is_visible = console.draws_progress();
        let (bar, loading) = (Mutex::new(ProgressBar::hidden()), Mutex::default());
        Self { console, is_visible, bar, loading }
    }

    /// Shows a bar of bytes, the first of which were downloaded earlier.
    fn begin(&self, what: &str, total: Option<u64>, resumed_from: u64) {
        let template = match total {
            Some(_) => "{msg} [{bar:30}] {bytes}/{total_bytes} {rate} {left}",
            None => "{msg} {spinner} {bytes} {rate}",
        };
        self.show(what, total, resumed_from, template);
    }

    fn show(&self, what: &str, total: Option<u64>, resumed_from: u64, template: &str) {
        if !self.is_visible {
            return;
        }
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(template) {
            let rate = move |state: &ProgressState| rate(state.pos(), resumed_from, state.elapsed());
            let style = style
                .with_key("rate", move |state: &ProgressState, text: &mut dyn fmt::Write| {
                    // If the rate cannot be drawn, the bar has none.
                    let _ = rate(state).map(|rate| write!(text, "{}/s", human_bytes(rate as u64)));
                })
                .with_key("left", move |state: &ProgressState, text: &mut dyn fmt::Write| {
                    let left = state.len().map(|len| len.saturating_sub(state.pos()) as f64);
                    if let (Some(left), Some(rate)) = (left, rate(state)) {
                        let left = Duration::try_from_secs_f64(left / rate).unwrap_or(Duration::MAX);
                        let _ = write!(text, "{:#}", HumanDuration(left));
                    }
                });
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_position(resumed_from);
        bar.set_message(what.to_owned());
        bar.enable_steady_tick(Duration::from_millis(200));
        self.replace(bar);
    }

    fn replace(&self, bar: ProgressBar) {
        let previous = std::mem::replace(&mut *self.bar(), bar);
        previous.finish_and_clear();
    }

    fn bar(&self) -> std::sync::MutexGuard<'_, ProgressBar> {
        // The bar has no state that a panic could break.
        self.bar.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locked while the bar is updated too, because other threads compile kernels.
    fn loading(&self) -> std::sync::MutexGuard<'_, Loading> {
        self.loading.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // After an error, the bar must not precede the message.
        self.replace(ProgressBar::hidden());
    }
}

impl hub::Progress for Progress {
    fn start(&self, file: &str, total_bytes: Option<u64>, resumed_from: u64) {
        self.begin(file, total_bytes, resumed_from);
        if !self.is_visible {
            let size = total_bytes.map(|bytes| format!(" ({})", human_bytes(bytes))).unwrap_or_default();
            self.console.note(format_args!("downloading {file}{size}"));
        }
    }

    fn advance(&self, bytes: u64) {
        self.bar().inc(bytes);
    }

    fn finish(&self) {
        self.replace(ProgressBar::hidden());
    }

    fn pause(&self, file: &str, duration: Duration) {
        let seconds = duration.as_secs_f32().ceil();
        self.console
            .note(format_args!("the server requests a pause of {seconds} s before the rest of {file}"));
    }

    fn wait_for_other_process(&self, file: &str) {
        self.console.note(format_args!("waiting for another process that is downloading {file}"));
    }
}

impl llm::LoadProgress for Progress {
    fn begin(&self, stage: &str, total: u64) {
        let mut loading = self.loading();
        loading.stage = Some(stage.to_owned());
        self.begin(&loading.message().unwrap_or_default(), Some(total), 0);
    }

    fn advance(&self, bytes: u64) {
        self.bar().inc(bytes);
    }

    fn end(&self) {
        let mut loading = self.loading();
        loading.stage = None;
        match loading.message() {
            Some(message) => self.show(&message, None, 0, "{msg} {spinner}"),
            None => self.replace(ProgressBar::hidden()),
        }
    }

    fn compiling(&self, num_done: usize, num_kernels: usize) {
        let mut loading = self.loading();
        loading.kernels = (num_done < num_kernels).then_some((num_done, num_kernels));
        match loading.message() {
            Some(message) if self.bar().is_hidden() => self.show(&message, None, 0, "{msg} {spinner}"),
            Some(message) => self.bar().set_message(message),
            None => self.replace(ProgressBar::hidden()),
        }
    }
}

/// Bytes per second, without those of an earlier run; `None` before the first byte.
fn rate(num_bytes: u64, resumed_from: u64, elapsed: Duration) -> Option<f64> {
    let rate = num_bytes.saturating_sub(resumed_from) as f64 / elapsed.as_secs_f64();
    (rate > 0.0 && rate.is_finite()).then_some(rate)
}

/// Shows the progress of the prompt on a terminal until the first text. Passes all other events on.
pub(crate) fn telling_prompt(
    console: Console,
    events: impl Iterator<Item = TextEvent>,
) -> impl Iterator<Item = TextEvent> {
    let is_visible = console.draws_progress();
    let mut bar: Option<ProgressBar> = None;
    events.inspect(move |event| match event {
        TextEvent::PromptProgress { progress } if is_visible => {
            let [read, all] = [progress.num_processed_tokens, progress.num_prompt_tokens];
            // A short prompt takes no visible time, so its progress would only flicker.
            if read < all {
                let bar = bar.get_or_insert_with(prompt_bar);
                bar.set_message(format!("reading the prompt {} / {}", grouped(read), grouped(all)));
            }
        }
        _ => {
            if let Some(bar) = bar.take() {
                bar.finish_and_clear();
            }
        }
    })
}

fn prompt_bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{msg}") {
        bar.set_style(style);
    }
    bar
}

/// A number with commas as thousands separators.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|group| std::str::from_utf8(group).unwrap_or_default())
        .collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_came_in_this_run_is_fast() {
        let check = |num_bytes, resumed_from, seconds, expected| {
            assert_eq!(rate(num_bytes, resumed_from, Duration::from_secs(seconds)), expected);
        };
        check(1_000, 0, 10, Some(100.0));
        check(1_000_100, 1_000_000, 10, Some(10.0));
        check(1_000_000, 1_000_000, 10, None);
        check(5, 10, 1, None);
        check(5, 0, 0, None);
    }

    #[test]
    fn thousands_are_grouped() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }

    #[test]
    fn kernels_are_reported_during_the_stage_and_after_it() {
        let message = |stage: Option<&str>, kernels| {
            Loading { stage: stage.map(str::to_owned), kernels }.message().unwrap_or_default()
        };
        assert_eq!(message(Some("loading"), None), "loading");
        assert_eq!(message(Some("loading"), Some((3, 12))), "loading, compiling kernels 3/12");
        assert_eq!(message(None, Some((11, 12))), "compiling kernels 11/12");
        assert_eq!(message(None, None), "");
    }
}
