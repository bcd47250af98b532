//! Keys, as they are pressed.
//!
//! The terminal neither waits for the end of a line nor shows what is typed, until [`Keys`] is dropped. Ctrl-C stays
//! what it is. Where there is no terminal to read from there are no keys.

use tokio::sync::mpsc;

/// The keyboard.
#[derive(Debug)]
pub(super) struct Keys {
    pressed: mpsc::Receiver<u8>,
    #[cfg(unix)]
    _mode: Option<unix::Mode>,
}

impl Keys {
    /// Reads the keyboard from now on.
    pub(super) fn listen() -> Self {
        let (sender, pressed) = mpsc::channel(16);
        #[cfg(unix)]
        let mode = unix::Mode::enter();
        #[cfg(unix)]
        if mode.is_some() {
            // It ends with the program: nothing can take back a read.
            std::thread::spawn(move || unix::read(&sender));
            return Self { pressed, _mode: mode };
        }
        // Without a sender the channel is closed at once.
        drop(sender);
        Self {
            pressed,
            #[cfg(unix)]
            _mode: None,
        }
    }

    /// The next key; never, if there is no keyboard.
    pub(super) async fn next(&mut self) -> u8 {
        match self.pressed.recv().await {
            Some(key) => key,
            None => std::future::pending().await,
        }
    }
}

#[cfg(unix)]
mod unix {
    use std::io::Read;

    use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
    use tokio::sync::mpsc;

    /// The terminal as it was, which it is again when this is dropped.
    #[derive(Debug)]
    pub(super) struct Mode {
        before: Termios,
    }

    impl Mode {
        /// None if standard input is no terminal.
        pub(super) fn enter() -> Option<Self> {
            let before = tcgetattr(std::io::stdin()).ok()?;
            let mut mode = before.clone();
            mode.local_flags.remove(LocalFlags::ICANON | LocalFlags::ECHO);
            tcsetattr(std::io::stdin(), SetArg::TCSANOW, &mode).ok()?;
            Some(Self { before })
        }
    }

    impl Drop for Mode {
        fn drop(&mut self) {
            // A terminal that is gone needs nothing.
            let _ = tcsetattr(std::io::stdin(), SetArg::TCSANOW, &self.before);
        }
    }

    pub(super) fn read(sender: &mpsc::Sender<u8>) {
        for key in std::io::stdin().lock().bytes() {
            let Ok(key) = key else { return };
            if sender.blocking_send(key).is_err() {
                return;
            }
        }
    }
}
