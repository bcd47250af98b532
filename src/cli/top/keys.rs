//! Key presses.
//!
//! The terminal neither waits for the end of a line nor echoes, until [`Keys`] is dropped. Ctrl-C works as
//! usual. Without a terminal there are no keys.

use std::io::Read;

use tokio::sync::mpsc;

use crate::keyboard::Mode;

/// The keyboard.
#[derive(Debug)]
pub(super) struct Keys {
    pressed: mpsc::Receiver<u8>,
    _mode: Option<Mode>,
}

impl Keys {
    /// Starts to read the keyboard.
    pub(super) fn listen() -> Self {
        let (sender, pressed) = mpsc::channel(16);
        let mode = Mode::enter();
        if mode.is_some() {
            // The thread ends with the program, because a pending read cannot be cancelled.
            std::thread::spawn(move || read(&sender));
        }
        // Without a sender, the channel is closed at once.
        Self { pressed, _mode: mode }
    }

    /// The next key. Without a keyboard it waits forever.
    pub(super) async fn next(&mut self) -> u8 {
        match self.pressed.recv().await {
            Some(key) => key,
            None => std::future::pending().await,
        }
    }
}

fn read(sender: &mpsc::Sender<u8>) {
    for key in std::io::stdin().lock().bytes() {
        let Ok(key) = key else { return };
        if sender.blocking_send(key).is_err() {
            return;
        }
    }
}
