//! The terminal's way with keys: it neither waits for the end of a line nor shows what is typed, until [`Mode`] is dropped.
//! Ctrl-C stays what it is.

/// The terminal as it was, which it is again when this is dropped. What was typed meanwhile stays to be read.
#[derive(Debug)]
pub(super) struct Mode {
    #[cfg(unix)]
    before: nix::sys::termios::Termios,
}

impl Mode {
    /// None if standard input is no terminal, or one that has no such mode.
    pub(super) fn enter() -> Option<Self> {
        #[cfg(unix)]
        {
            use nix::sys::termios::{LocalFlags, SetArg, tcgetattr, tcsetattr};
            let before = tcgetattr(std::io::stdin()).ok()?;
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
        use nix::sys::termios::{SetArg, tcsetattr};
        // A terminal that is gone needs nothing.
        let _ = tcsetattr(std::io::stdin(), SetArg::TCSANOW, &self.before);
    }
}
