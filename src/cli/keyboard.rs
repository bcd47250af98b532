//! The terminal's modes, and the one that it had before, which comes back however the program ends.
//!
//! Besides this file only the line editor changes the mode.

#[cfg(unix)]
use std::fs::File;
#[cfg(unix)]
use std::io::{Read, Write};
#[cfg(unix)]
use std::os::fd::AsFd;
#[cfg(unix)]
use std::sync::{Mutex, PoisonError};

#[cfg(unix)]
use nix::poll::{PollFd, PollFlags, poll};
#[cfg(unix)]
use nix::sys::signal::{SigSet, Signal, raise};
#[cfg(unix)]
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};

/// The mode before the first change. Signals need it while nothing else runs.
#[cfg(unix)]
static FORMER: Mutex<Option<Termios>> = Mutex::new(None);

/// Input that comes faster than this was pasted, or sent by a program.
#[cfg(unix)]
const TYPING_MILLIS: u16 = 20;

/// The unbuffered mode: the terminal neither waits for the end of a line nor echoes, until this is dropped. Ctrl-C
/// works as usual. Pending input is kept.
#[derive(Debug)]
pub(super) struct Mode {
    #[cfg(unix)]
    before: Termios,
}

impl Mode {
    /// `None` if standard input is not a terminal, or does not support this mode.
    pub(super) fn enter() -> Option<Self> {
        #[cfg(unix)]
        {
            let before = tcgetattr(std::io::stdin()).ok()?;
            FORMER.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| before.clone());
            let mut mode = before.clone();
            mode.local_flags.remove(LocalFlags::ICANON | LocalFlags::ECHO);
            tcsetattr(std::io::stdin(), SetArg::TCSANOW, &mode).ok()?;
            Some(Self { before })
        }
        #[cfg(not(unix))]
        None
    }
}

#[cfg(unix)]
impl Drop for Mode {
    fn drop(&mut self) {
        // This fails only if the terminal is gone.
        let _ = tcsetattr(std::io::stdin(), SetArg::TCSANOW, &self.before);
    }
}

/// Gives the terminal back as it was, for ends of the program that drop nothing. Without a change there is nothing to
/// do.
pub(super) fn restore() {
    #[cfg(unix)]
    {
        let former = FORMER.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(former) = &*former else { return };
        // These fail only if the terminal is gone.
        let _ = tcsetattr(std::io::stdin(), SetArg::TCSANOW, former);
        // The line editor asks the terminal to put marks around pasted text.
        if let Ok(terminal) = std::io::stdin().as_fd().try_clone_to_owned() {
            let _ = File::from(terminal).write_all(b"\x1b[?2004l");
        }
    }
}

/// From now on a signal that ends the program gives the terminal back first. Call this before other threads start,
/// because they inherit which signals are left to the one that waits here. Without a terminal it does nothing.
pub(super) fn restore_on_signals() {
    #[cfg(unix)]
    {
        let Some(mode) = Mode::enter() else { return };
        drop(mode);
        let signals: SigSet = [Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGTERM].into_iter().collect();
        // If they cannot be blocked, they end the program as they always do.
        if signals.thread_block().is_err() {
            return;
        }
        std::thread::spawn(move || {
            let signal = signals.wait();
            restore();
            // Now they end the program, with the exit status that says so.
            let _ = signals.thread_unblock().and_then(|()| raise(signal?));
        });
    }
}

/// Drops the input that is there already, up to a pause that only a person makes.
pub(super) fn drop_input() {
    #[cfg(unix)]
    {
        let Some(_mode) = Mode::enter() else { return };
        let Ok(terminal) = std::io::stdin().as_fd().try_clone_to_owned() else { return };
        let mut terminal = File::from(terminal);
        let mut buffer = [0; 1_024];
        while matches!(poll(&mut [PollFd::new(terminal.as_fd(), PollFlags::POLLIN)], TYPING_MILLIS), Ok(1..))
        {
            if !matches!(terminal.read(&mut buffer), Ok(1..)) {
                return;
            }
        }
    }
}
