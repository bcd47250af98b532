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
}

impl Progress {
    pub(crate) fn new(console: Console) -> Self {
        let is_visible = !console.is_quiet() && std::io::stderr().is_terminal();
        Self { console, is_visible, bar: Mutex::new(ProgressBar::hidden()) }
    }

    fn begin(&self, what: &str, total: Option<u64>) {
        if !self.is_visible {
            return;
        }
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr());
        let template = match total {
            Some(_) => "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{msg} {spinner} {bytes} {bytes_per_sec}",
        };
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

    fn wait_for_other_process(&self, file: &str) {
        self.console.note(format_args!("waiting for another process that is downloading {file}"));
    }
}

impl llm::LoadProgress for Progress {
    fn begin(&self, stage: &str, total: u64) {
        self.begin(stage, Some(total));
    }

    fn advance(&self, bytes: u64) {
        self.bar().inc(bytes);
    }

    fn end(&self) {
        self.replace(ProgressBar::hidden());
    }
}
