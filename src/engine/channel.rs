//! The channel of a request's events from the engine's thread to its reader: a thread that waits, or a task.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::{Event, EventSink};

/// Both ends of a new channel. The request's token limit bounds its contents.
pub(super) fn channel() -> (EventSender, EventReceiver) {
    let shared = Arc::new(Shared::default());
    (EventSender(Arc::clone(&shared)), EventReceiver(shared))
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Event>,
    waker: Option<Waker>,
    /// The channel is closed.
    is_ended: bool,
    /// The reader is gone.
    is_closed: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the readable events, and wakes the reader.
    fn change(&self, change: impl FnOnce(&mut State)) {
        let waker = {
            let mut state = self.state();
            change(&mut state);
            state.waker.take()
        };
        self.changed.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The engine's end.
#[derive(Debug)]
pub(super) struct EventSender(Arc<Shared>);

impl EventSink for EventSender {
    fn send(&mut self, event: Event) -> bool {
        let mut is_read = false;
        self.0.change(|state| {
            is_read = !state.is_closed;
            if is_read {
                state.events.push_back(event);
            }
        });
        is_read
    }

    /// The other end belongs to a [`super::RequestStream`], which closes the channel when it is dropped.
    fn is_closed(&self) -> bool {
        false
    }
}

impl Drop for EventSender {
    fn drop(&mut self) {
        self.0.change(|state| state.is_ended = true);
    }
}

/// The reader's end.
#[derive(Debug)]
pub(super) struct EventReceiver(Arc<Shared>);

impl EventReceiver {
    /// Waits for the next event; none after the last one.
    pub(super) fn recv(&self) -> Option<Event> {
        let mut state = self.0.state();
        loop {
            if let Some(event) = state.events.pop_front() {
                return Some(event);
            }
            if state.is_ended {
                return None;
            }
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The next event if there is one; an inner none after the last one.
    pub(super) fn try_recv(&self) -> Poll<Option<Event>> {
        let mut state = self.0.state();
        match state.events.pop_front() {
            None if !state.is_ended => Poll::Pending,
            event => Poll::Ready(event),
        }
    }

    /// The same, and wakes the task when there is more.
    pub(super) fn poll_recv(&self, context: &Context<'_>) -> Poll<Option<Event>> {
        let mut state = self.0.state();
        match state.events.pop_front() {
            None if !state.is_ended => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
            event => Poll::Ready(event),
        }
    }
}

impl Drop for EventReceiver {
    fn drop(&mut self) {
        self.0.state().is_closed = true;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    fn event(token_id: u32) -> Event {
        Event::Token { index: 0, token_id, logprobs: None, is_end: false }
    }

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_thread_waits_for_events_and_for_the_end() {
        let (mut sender, receiver) = channel();
        let reader = std::thread::spawn(move || std::iter::from_fn(|| receiver.recv()).collect::<Vec<_>>());
        for token_id in 0..100 {
            assert!(sender.send(event(token_id)));
        }
        drop(sender);
        assert_eq!(reader.join().unwrap(), (0..100).map(event).collect::<Vec<_>>());
    }

    #[test]
    fn a_task_is_woken_once_for_each_wait() {
        let (mut sender, receiver) = channel();
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let context = Context::from_waker(&waker);
        assert_eq!(receiver.poll_recv(&context), Poll::Pending);
        assert!(sender.send(event(1)) && sender.send(event(2)));
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert_eq!(receiver.poll_recv(&context), Poll::Ready(Some(event(1))));
        assert_eq!(receiver.try_recv(), Poll::Ready(Some(event(2))));
        assert_eq!((receiver.try_recv(), receiver.poll_recv(&context)), (Poll::Pending, Poll::Pending));
        drop(sender);
        assert_eq!(count.0.load(Ordering::SeqCst), 2);
        assert_eq!((receiver.try_recv(), receiver.recv()), (Poll::Ready(None), None));
    }

    #[test]
    fn nothing_is_kept_for_one_that_is_gone() {
        let (mut sender, receiver) = channel();
        drop(receiver);
        assert!(!sender.send(event(1)));
        assert!(sender.0.state().events.is_empty());
    }
}
