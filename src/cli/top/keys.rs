//! Keys, as they are pressed.
//!
//! The terminal neither waits for the end of a line nor shows what is typed, until [`Keys`] is dropped. Ctrl-C stays
//! what it is. Where there is no terminal to read from there are no keys.

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
    /// Reads the keyboard from now on.
    pub(super) fn listen() -> Self {
        let (sender, pressed) = mpsc::channel(16);
        let mode = Mode::enter();
        if mode.is_some() {
            // It ends with the program: nothing can take back a read.
            std::thread::spawn(move || read(&sender));
        }
        // Without a sender the channel is closed at once.
        Self { pressed, _mode: mode }
    }

    /// The next key; never, if there is no keyboard.
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
