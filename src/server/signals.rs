//! What the operating system says: SIGTERM and SIGINT, or Ctrl-C where there are no signals, to stop; SIGHUP to
//! read the keys again.

use std::io;

/// The signals of this process.
pub(super) struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
    #[cfg(unix)]
    hangup: tokio::signal::unix::Signal,
}

/// What is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    Stop,
    ReadKeys,
}

impl Signals {
    /// Takes the signals over from the system, which would end the process.
    pub(super) fn new() -> io::Result<Self> {
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            Ok(Self {
                terminate: signal(SignalKind::terminate())?,
                interrupt: signal(SignalKind::interrupt())?,
                hangup: signal(SignalKind::hangup())?,
            })
        }
        #[cfg(not(unix))]
        Ok(Self {})
    }

    /// Returns at the next signal.
    pub(super) async fn next(&mut self) -> Wish {
        #[cfg(unix)]
        tokio::select! {
            _ = self.terminate.recv() => Wish::Stop,
            _ = self.interrupt.recv() => Wish::Stop,
            _ = self.hangup.recv() => Wish::ReadKeys,
        }
        #[cfg(not(unix))]
        {
            if tokio::signal::ctrl_c().await.is_err() {
                std::future::pending::<()>().await;
            }
            Wish::Stop
        }
    }

    /// Returns at the next signal to stop.
    pub(super) async fn stop(&mut self) {
        while self.next().await != Wish::Stop {}
    }
}
