//! The protocol with one peer, without its socket: bytes come in, bytes go out, and the memory is limited.
//!
//! A peer has no queue. Its output is copied from the kept batches, one buffer at a time, after the previous
//! buffer was sent. So a peer that reads nothing costs one buffer, and one that is too slow misses batches.

use super::kept::KeptBatches;
use super::zmtp::{self, Broken, Command, Frame, MAX_PING_BYTES, Reader};

/// The size of the output buffer of each peer.
pub(super) const OUT_BYTES: usize = 16 << 10;
/// Most frames of a peer's message. A request has two: an empty one and a number.
const MAX_FRAMES: usize = 8;
/// The batch number that ends a replay: -1.
const END: [u8; 8] = [0xff; 8];

/// The socket to which a peer connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Sends each batch to its subscribers.
    Publisher,
    /// Replays batches.
    Repeater,
}

impl Role {
    fn socket_type(self) -> &'static str {
        match self {
            Self::Publisher => "PUB",
            Self::Repeater => "ROUTER",
        }
    }

    /// Whether it talks to sockets of this type.
    fn fits(self, socket_type: &[u8]) -> bool {
        match self {
            Self::Publisher => [&b"SUB"[..], b"XSUB"].contains(&socket_type),
            Self::Repeater => [&b"DEALER"[..], b"REQ", b"ROUTER"].contains(&socket_type),
        }
    }
}

/// Why a session cannot continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Fault {
    #[error("{0}")]
    Broken(#[from] Broken),
    #[error("its socket type does not match this one")]
    SocketType,
    #[error("it sent a message of more than {MAX_FRAMES} frames")]
    TooManyFrames,
    #[error("it reads so slowly that the rest of its message was discarded")]
    TooSlow,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Greeting,
    Ready,
    Open,
}

/// The batches to send: from one index on.
#[derive(Debug, Clone, Copy)]
struct Sending {
    /// The index of the next batch, or of the one that is partly sent.
    index: u64,
    /// How much of its payload is sent, if it is partly sent.
    sent: Option<usize>,
    /// The end of the range; `None` for a subscriber, which gets all.
    end: Option<u64>,
}

/// A request that is not complete: its frames so far.
#[derive(Debug, Clone, Copy, Default)]
struct Request {
    num_frames: usize,
    is_wrong: bool,
    start: Option<u64>,
}

/// A session with one peer. The reader has its input, and the state makes its output.
#[derive(Debug)]
pub(super) struct Session<'a> {
    reader: Reader,
    state: State<'a>,
}

#[derive(Debug)]
struct State<'a> {
    role: Role,
    topic: &'a [u8],
    kept: &'a KeptBatches,
    stage: Stage,
    /// For each length, whether the prefix of the topic with this length is subscribed. No other prefix can
    /// match.
    subscriptions: Box<[bool]>,
    is_between_parts: bool,
    request: Request,
    sending: Option<Sending>,
    pong: Option<Pong>,
    out: Vec<u8>,
    num_written: usize,
    num_missed: u64,
}

/// A reply that is sent after the current message.
#[derive(Debug, Clone, Copy)]
struct Pong {
    text: [u8; MAX_PING_BYTES],
    length: usize,
}

impl<'a> Session<'a> {
    pub(super) fn new(role: Role, topic: &'a [u8], kept: &'a KeptBatches) -> Self {
        let state = State {
            role,
            topic,
            kept,
            stage: Stage::Greeting,
            subscriptions: vec![false; topic.len() + 1].into(),
            is_between_parts: false,
            request: Request::default(),
            sending: None,
            pong: None,
            // The other side may wait for our greeting before it continues its own.
            out: zmtp::greeting().to_vec(),
            num_written: 0,
            num_missed: 0,
        };
        Self { reader: Reader::default(), state }
    }

    /// Whether the handshake is complete.
    pub(super) fn is_open(&self) -> bool {
        self.state.stage == Stage::Open
    }

    /// Whether it receives batches, new or replayed.
    pub(super) fn wants_batches(&self) -> bool {
        self.state.sending.is_some()
    }

    /// Batches that the peer missed because it was too slow, since the last call.
    pub(super) fn take_missed(&mut self) -> u64 {
        std::mem::take(&mut self.state.num_missed)
    }

    /// Space for input. It is empty during a replay, because a peer has one replay at a time.
    pub(super) fn space(&mut self) -> &mut [u8] {
        match self.state.is_repeating() {
            true => &mut [],
            false => self.reader.space(),
        }
    }

    /// Records that this many bytes were put into [`Self::space`].
    pub(super) fn filled(&mut self, num_bytes: usize) {
        self.reader.filled(num_bytes);
    }

    /// Output that is ready to be written.
    pub(super) fn output(&self) -> &[u8] {
        &self.state.out[self.state.num_written..]
    }

    /// Records that this many bytes of it were written.
    pub(super) fn written(&mut self, num_bytes: usize) {
        let state = &mut self.state;
        state.num_written += num_bytes;
        if state.num_written >= state.out.len() {
            state.out.clear();
            state.num_written = 0;
        }
    }

    /// Parses the input, and prepares the next output.
    ///
    /// # Errors
    /// If the peer has to be closed.
    pub(super) fn work(&mut self) -> Result<(), Fault> {
        loop {
            self.take()?;
            let was_repeating = self.state.is_repeating();
            self.state.fill()?;
            // The next request may already be in the buffer.
            if !was_repeating || self.state.is_repeating() {
                return Ok(());
            }
        }
    }

    fn take(&mut self) -> Result<(), Fault> {
        let Self { reader, state } = self;
        if state.stage == Stage::Greeting {
            if !reader.greeting()? {
                return Ok(());
            }
            zmtp::put_ready(&mut state.out, state.role.socket_type());
            state.stage = Stage::Ready;
        }
        while !state.is_repeating() {
            let Some(frame) = reader.frame()? else { break };
            state.take(frame)?;
        }
        Ok(())
    }

    /// The memory of the session, in bytes.
    #[cfg(test)]
    fn num_bytes(&self) -> usize {
        let State { out, subscriptions, .. } = &self.state;
        size_of::<State<'_>>() + self.reader.num_bytes() + out.capacity() + subscriptions.len()
    }
}

impl State<'_> {
    fn is_repeating(&self) -> bool {
        self.role == Role::Repeater && self.sending.is_some()
    }

    fn take(&mut self, frame: Frame<'_>) -> Result<(), Fault> {
        match (self.stage, frame.is_command) {
            (Stage::Open, false) => return self.take_frame(frame),
            (Stage::Open, true) => self.take_command(Command::read(frame.body)?),
            (_, true) => match Command::read(frame.body)? {
                Command::Ready { socket_type } if self.role.fits(socket_type) => self.stage = Stage::Open,
                Command::Ready { .. } => return Err(Fault::SocketType),
                _ => return Err(Broken::Command.into()),
            },
            (_, false) => return Err(Broken::Command.into()),
        }
        Ok(())
    }

    fn take_command(&mut self, command: Command<'_>) {
        match command {
            Command::Subscribe(wanted) => self.subscribe(wanted, true),
            Command::Cancel(wanted) => self.subscribe(wanted, false),
            // If there are several, only the last one is answered.
            Command::Ping(text) => {
                let mut pong = Pong { text: [0; MAX_PING_BYTES], length: text.len() };
                pong.text[..text.len()].copy_from_slice(text);
                self.pong = Some(pong);
            }
            Command::Ready { .. } | Command::Other => {}
        }
    }

    fn take_frame(&mut self, frame: Frame<'_>) -> Result<(), Fault> {
        let is_alone = !std::mem::replace(&mut self.is_between_parts, frame.has_more) && !frame.has_more;
        match (self.role, frame.body) {
            // Versions before 3.1, and the library that routers in Rust use, send these as messages.
            (Role::Publisher, [1, wanted @ ..]) if is_alone => self.subscribe(wanted, true),
            (Role::Publisher, [0, wanted @ ..]) if is_alone => self.subscribe(wanted, false),
            // A publishing socket ignores other messages.
            (Role::Publisher, _) => {}
            (Role::Repeater, part) => {
                let request = &mut self.request;
                match request.num_frames {
                    0 => request.is_wrong |= !part.is_empty(),
                    1 => request.start = part.try_into().ok().map(u64::from_be_bytes),
                    MAX_FRAMES => return Err(Fault::TooManyFrames),
                    _ => request.is_wrong = true,
                }
                request.num_frames += 1;
                if !frame.has_more {
                    let request = std::mem::take(request);
                    self.repeat_from(request.start.filter(|_| !request.is_wrong));
                }
            }
        }
        Ok(())
    }

    /// An invalid request gets no reply.
    fn repeat_from(&mut self, number: Option<u64>) {
        let indices = number.map(|number| self.kept.replay(number));
        self.sending = indices.map(|(index, end)| Sending { index, sent: None, end: Some(end) });
    }

    fn subscribe(&mut self, wanted: &[u8], is_wanted: bool) {
        if !self.topic.starts_with(wanted) {
            return;
        }
        self.subscriptions[wanted.len()] = is_wanted;
        match self.sending {
            None if self.is_subscribed() => {
                self.sending = Some(Sending { index: self.kept.end(), sent: None, end: None });
            }
            // A batch that is partly sent is completed.
            Some(Sending { sent: None, .. }) if !self.is_subscribed() => self.sending = None,
            _ => {}
        }
    }

    fn is_subscribed(&self) -> bool {
        self.subscriptions.contains(&true)
    }

    /// Refills the buffer if all of it was written.
    fn fill(&mut self) -> Result<(), Fault> {
        if !self.out.is_empty() || self.stage != Stage::Open {
            return Ok(());
        }
        loop {
            if !self.fill_payload()? {
                return Ok(());
            }
            if let Some(pong) = self.pong.take() {
                zmtp::put_pong(&mut self.out, &pong.text[..pong.length]);
            }
            if self.out.len() + self.head_bytes() > OUT_BYTES || !self.begin_batch() {
                return Ok(());
            }
        }
    }

    /// Continues a batch that is partly sent. Returns whether none is left.
    fn fill_payload(&mut self) -> Result<bool, Fault> {
        let Some(Sending { index, sent: Some(sent), end }) = self.sending else { return Ok(true) };
        let Some(batch) = self.kept.from(index).filter(|batch| batch.index == index) else {
            if self.role == Role::Publisher {
                self.num_missed += self.kept.end() - index;
            }
            return Err(Fault::TooSlow);
        };
        let rest = &batch.payload[sent..];
        let num_bytes = rest.len().min(OUT_BYTES - self.out.len());
        self.out.extend_from_slice(&rest[..num_bytes]);
        let is_over = num_bytes == rest.len();
        self.sending = Some(match is_over {
            true => Sending { index: index + 1, sent: None, end },
            false => Sending { index, sent: Some(sent + num_bytes), end },
        });
        Ok(is_over)
    }

    /// Starts the next batch, or ends a replay. Returns whether there is a batch.
    fn begin_batch(&mut self) -> bool {
        let Some(Sending { index, end, .. }) = self.sending else { return false };
        if self.role == Role::Publisher && !self.is_subscribed() {
            self.sending = None;
            return false;
        }
        self.out.reserve_exact(OUT_BYTES - self.out.len());
        let batch = self.kept.from(index).filter(|batch| end.is_none_or(|end| batch.index < end));
        let Some(batch) = batch else {
            if end.is_some() {
                self.put_head(b"", END, 0);
                self.sending = None;
            }
            return false;
        };
        if self.role == Role::Publisher {
            self.num_missed += batch.index - index;
        }
        self.put_head(self.topic, batch.number.to_be_bytes(), batch.payload.len());
        self.sending = Some(Sending { index: batch.index, sent: Some(0), end });
        true
    }

    /// Writes a message up to its payload, which has `payload` bytes.
    fn put_head(&mut self, topic: &[u8], number: [u8; 8], payload: usize) {
        if self.role == Role::Repeater {
            zmtp::put_frame(&mut self.out, true, b"");
        }
        zmtp::put_frame(&mut self.out, true, topic);
        zmtp::put_frame(&mut self.out, true, &number);
        zmtp::put_head(&mut self.out, false, payload);
    }

    /// The largest size of such a head.
    fn head_bytes(&self) -> usize {
        4 * zmtp::MAX_HEAD_BYTES + self.topic.len() + size_of::<u64>()
    }
}

#[cfg(test)]
mod tests;
