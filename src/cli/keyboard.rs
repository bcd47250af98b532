//! The terminal's unbuffered mode: it neither waits for the end of a line nor echoes, until [`Mode`] is
//! dropped. Ctrl-C works as usual.

/// The former settings of the terminal, restored on drop. Pending input is kept.
#[derive(Debug)]
pub(super) struct Mode {
    #[cfg(unix)]
    before: nix::sys::termios::Termios,
}

impl Mode {
    /// `None` if standard input is not a terminal, or does not support this mode.
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
        // This fails only if the terminal is gone.
        let _ = tcsetattr(std::io::stdin(), SetArg::TCSANOW, &self.before);
    }
}
