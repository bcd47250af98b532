//! Progress bars for downloads and loading: on standard error, and only if that is a terminal.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tinyvllm::{hub, llm};

use super::console::Console;
use super::value::human_bytes;

/// The one bar of a stage; stages never overlap.
#[derive(Debug)]
pub(crate) struct Progress {
    console: Console,
    is_visible: bool,
    bar: Mutex<ProgressBar>,
    loading: Mutex<Loading>,
}

/// What loading a model is about. Kernels are compiled beside a stage, and perhaps for longer than it takes.
#[derive(Debug, Default)]
struct Loading {
    stage: Option<String>,
    /// How many of how many are compiled, until all are.
    kernels: Option<(usize, usize)>,
}

impl Loading {
    /// What to show in front of the bar.
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
        let is_visible = !console.is_quiet() && std::io::stderr().is_terminal();
        let (bar, loading) = (Mutex::new(ProgressBar::hidden()), Mutex::default());
        Self { console, is_visible, bar, loading }
    }

    /// A bar of bytes.
    fn begin(&self, what: &str, total: Option<u64>) {
        let template = match total {
            Some(_) => "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{msg} {spinner} {bytes} {bytes_per_sec}",
        };
        self.show(what, total, template);
    }

    fn show(&self, what: &str, total: Option<u64>, template: &str) {
        if !self.is_visible {
            return;
        }
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what.to_owned());
        bar.enable_steady_tick(Duration::from_millis(200));
        self.replace(bar);
    }

    fn replace(&self, bar: ProgressBar) {
        let previous = std::mem::replace(&mut *self.bar(), bar);
        previous.finish_and_clear();
    }

    fn bar(&self) -> std::sync::MutexGuard<'_, ProgressBar> {
        // A bar is whole after any panic: it has no state of ours.
        self.bar.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held while the bar is changed with it, because kernels are compiled by other threads.
    fn loading(&self) -> std::sync::MutexGuard<'_, Loading> {
        self.loading.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // After an error the bar must not stay in front of the message.
        self.replace(ProgressBar::hidden());
    }
}

impl hub::Progress for Progress {
    fn start(&self, file: &str, total_bytes: Option<u64>, resumed_from: u64) {
        self.begin(file, total_bytes);
        self.bar().set_position(resumed_from);
        self.bar().reset_eta();
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
        self.console.note(format_args!("the server asks for a pause of {seconds} s before more of {file}"));
    }

    fn wait_for_other_process(&self, file: &str) {
        self.console.note(format_args!("waiting for another process that is downloading {file}"));
    }
}

impl llm::LoadProgress for Progress {
    fn begin(&self, stage: &str, total: u64) {
        let mut loading = self.loading();
        loading.stage = Some(stage.to_owned());
        self.begin(&loading.message().unwrap_or_default(), Some(total));
    }

    fn advance(&self, bytes: u64) {
        self.bar().inc(bytes);
    }

    fn end(&self) {
        let mut loading = self.loading();
        loading.stage = None;
        match loading.message() {
            Some(message) => self.show(&message, None, "{msg} {spinner}"),
            None => self.replace(ProgressBar::hidden()),
        }
    }

    fn compiling(&self, num_done: usize, num_kernels: usize) {
        let mut loading = self.loading();
        loading.kernels = (num_done < num_kernels).then_some((num_done, num_kernels));
        match loading.message() {
            Some(message) if self.bar().is_hidden() => self.show(&message, None, "{msg} {spinner}"),
            Some(message) => self.bar().set_message(message),
            None => self.replace(ProgressBar::hidden()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_told_beside_the_stage_and_after_it() {
        let message = |stage: Option<&str>, kernels| {
            Loading { stage: stage.map(str::to_owned), kernels }.message().unwrap_or_default()
        };
        assert_eq!(message(Some("loading"), None), "loading");
        assert_eq!(message(Some("loading"), Some((3, 12))), "loading, compiling kernels 3/12");
        assert_eq!(message(None, Some((11, 12))), "compiling kernels 11/12");
        assert_eq!(message(None, None), "");
    }
}
