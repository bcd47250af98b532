//! Signals of the operating system: SIGTERM and SIGINT (Ctrl-C where there are no signals) stop the server,
//! SIGHUP reloads the keys.

use std::io;

/// The signals of this process.
pub(super) struct Signals {
    stop: system::Stop,
    hangup: system::Hangup,
}

/// The requested action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    Stop,
    ReadKeys,
}

impl Signals {
    /// Installs handlers, so that signals do not end the process.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { stop: system::Stop::new()?, hangup: system::Hangup::new()? })
    }

    /// Returns at the next signal.
    pub(super) async fn next(&mut self) -> Wish {
        tokio::select! {
            () = self.stop.recv() => Wish::Stop,
            () = self.hangup.recv() => Wish::ReadKeys,
        }
    }

    /// Returns at the next signal to stop. One to reload the keys waits for [`Self::next`].
    pub(super) async fn stop(&mut self) {
        self.stop.recv().await;
    }
}

#[cfg(unix)]
mod system {
    use std::io;

    use tokio::signal::unix::{Signal, SignalKind, signal};

    pub(super) struct Stop {
        terminate: Signal,
        interrupt: Signal,
    }

    impl Stop {
        pub(super) fn new() -> io::Result<Self> {
            Ok(Self {
                terminate: signal(SignalKind::terminate())?,
                interrupt: signal(SignalKind::interrupt())?,
            })
        }

        pub(super) async fn recv(&mut self) {
            tokio::select! {
                _ = self.terminate.recv() => {}
                _ = self.interrupt.recv() => {}
            }
        }
    }

    pub(super) struct Hangup(Signal);

    impl Hangup {
        pub(super) fn new() -> io::Result<Self> {
            signal(SignalKind::hangup()).map(Self)
        }

        pub(super) async fn recv(&mut self) {
            self.0.recv().await;
        }
    }
}

#[cfg(not(unix))]
mod system {
    use std::io;

    pub(super) struct Stop;

    impl Stop {
        pub(super) fn new() -> io::Result<Self> {
            Ok(Self)
        }

        pub(super) async fn recv(&mut self) {
            if tokio::signal::ctrl_c().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// There is no such signal here: keys are read at the start only.
    pub(super) struct Hangup;

    impl Hangup {
        pub(super) fn new() -> io::Result<Self> {
            Ok(Self)
        }

        pub(super) async fn recv(&mut self) {
            std::future::pending::<()>().await;
        }
    }
}
