//! ZeroMQ's protocol, ZMTP 3, as far as publishing and replaying sockets without authentication need it: a
//! greeting, frames, and commands.
//!
//! Bytes come in, frames go out. A [`Reader`] has space for the longest accepted frame and never for more:
//! the length in a frame's head is compared with [`MAX_FRAME_BYTES`] first.

/// Longest frame of a peer. Peers send names of sockets, prefixes of topics, and numbers.
pub const MAX_FRAME_BYTES: usize = 4 << 10;
/// Bytes of a greeting.
pub const GREETING_BYTES: usize = 64;
/// Longest head of a frame: flags and length.
pub const MAX_HEAD_BYTES: usize = 9;
/// Longest context of a PING, which is returned.
pub const MAX_PING_BYTES: usize = 16;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// The authentication mechanism NULL, padded to the fixed length of such names.
const MECHANISM: &[u8; 20] = b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
/// The first version with these frames.
const MAJOR_VERSION: u8 = 3;

/// Why a peer's data cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// It is not ZeroMQ.
    #[error("it does not begin with ZeroMQ's greeting")]
    Greeting,
    /// A version before 3.
    #[error("it uses version {0} of ZeroMQ's protocol, and 3 or later is required")]
    Version(u8),
    /// It requires keys or passwords.
    #[error("it requests authentication, and only NULL is supported")]
    Mechanism,
    /// The frame is longer than accepted.
    #[error("it announced a frame of {0} bytes; the limit is {MAX_FRAME_BYTES}")]
    FrameTooLong(u64),
    /// Unknown flags.
    #[error("it sent a frame with the unknown flags {0:#04x}")]
    Flags(u8),
    /// A command whose fields do not fit into it.
    #[error("it sent a command that is not valid")]
    Command,
}

/// A frame of a message, or a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The socket handles it, and not its user.
    pub is_command: bool,
    /// Whether the message continues.
    pub has_more: bool,
    /// The payload.
    pub body: &'a [u8],
}

/// Collects bytes as they come, and returns the greeting and frames that are complete.
#[derive(Debug)]
pub struct Reader {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Default for Reader {
    fn default() -> Self {
        Self { buffer: vec![0; MAX_HEAD_BYTES + MAX_FRAME_BYTES].into(), start: 0, end: 0 }
    }
}

impl Reader {
    /// Space for the next bytes. Empty only while a complete frame has not been taken.
    pub fn space(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.buffer[self.end..]
    }

    /// Records that this many bytes were put into [`Self::space`].
    ///
    /// # Panics
    /// If there was less space.
    pub fn filled(&mut self, num_bytes: usize) {
        assert!(num_bytes <= self.buffer.len() - self.end, "more than there is space for");
        self.end += num_bytes;
    }

    /// Reads the greeting, which comes first. Returns whether it is complete.
    ///
    /// # Errors
    /// As soon as the bytes cannot begin the greeting of a supported peer.
    pub fn greeting(&mut self) -> Result<bool, Broken> {
        let bytes = &self.buffer[self.start..self.end];
        let is_wrong = |index: usize, wanted: u8| bytes.get(index).is_some_and(|found| *found != wanted);
        // Between the two bytes, old versions have a length.
        if is_wrong(0, 0xff) || is_wrong(9, 0x7f) {
            return Err(Broken::Greeting);
        }
        if let Some(version) = bytes.get(10).filter(|version| **version < MAJOR_VERSION) {
            return Err(Broken::Version(*version));
        }
        let Some(greeting) = bytes.get(..GREETING_BYTES) else { return Ok(false) };
        if greeting[12..32] != *MECHANISM {
            return Err(Broken::Mechanism);
        }
        self.start += GREETING_BYTES;
        Ok(true)
    }

    /// Returns the next frame, if it is complete.
    ///
    /// # Errors
    /// As soon as its head is invalid or its length too large. Nothing can be read after that.
    pub fn frame(&mut self) -> Result<Option<Frame<'_>>, Broken> {
        let bytes = &self.buffer[self.start..self.end];
        let Some((&flags, rest)) = bytes.split_first() else { return Ok(None) };
        let is_command = flags & COMMAND != 0;
        if flags & !(MORE | LONG | COMMAND) != 0 || (is_command && flags & MORE != 0) {
            return Err(Broken::Flags(flags));
        }
        let length = match flags & LONG != 0 {
            true => rest.first_chunk().map(|length| (u64::from_be_bytes(*length), MAX_HEAD_BYTES)),
            false => rest.first().map(|length| (u64::from(*length), 2)),
        };
        let Some((length, head)) = length else { return Ok(None) };
        let body = usize::try_from(length).ok().filter(|length| *length <= MAX_FRAME_BYTES);
        let body = body.ok_or(Broken::FrameTooLong(length))?;
        if bytes.len() < head + body {
            return Ok(None);
        }
        let start = self.start + head;
        self.start = start + body;
        let body = &self.buffer[start..self.start];
        Ok(Some(Frame { is_command, has_more: flags & MORE != 0, body }))
    }

    /// The memory of the reader, in bytes. It never changes.
    pub fn num_bytes(&self) -> usize {
        size_of::<Self>() + self.buffer.len()
    }
}

/// The commands of sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command<'a> {
    /// The handshake, with the type of the socket.
    Ready {
        /// For example `SUB`.
        socket_type: &'a [u8],
    },
    /// Subscribes to messages with this prefix.
    Subscribe(&'a [u8]),
    /// Cancels that subscription.
    Cancel(&'a [u8]),
    /// A heartbeat; the peer expects this context back.
    Ping(&'a [u8]),
    /// Any other command.
    Other,
}

impl<'a> Command<'a> {
    /// Parses the body of a command frame.
    ///
    /// # Errors
    /// If it has no name, or invalid fields.
    pub fn read(body: &'a [u8]) -> Result<Self, Broken> {
        let (name, rest) = split(body).ok_or(Broken::Command)?;
        Ok(match name {
            b"READY" => Self::Ready { socket_type: socket_type(rest)? },
            b"SUBSCRIBE" => Self::Subscribe(rest),
            b"CANCEL" => Self::Cancel(rest),
            // A time to live comes before the context.
            b"PING" => match rest.split_at_checked(2) {
                Some((_, text)) if text.len() <= MAX_PING_BYTES => Self::Ping(text),
                _ => return Err(Broken::Command),
            },
            _ => Self::Other,
        })
    }
}

/// Splits off a field with a length of one byte. Returns it with the rest.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first()?;
    rest.split_at_checked(usize::from(*length))
}

/// The socket type in the metadata of READY.
fn socket_type(mut properties: &[u8]) -> Result<&[u8], Broken> {
    let mut found = None;
    while !properties.is_empty() {
        let (name, rest) = split(properties).ok_or(Broken::Command)?;
        let (length, rest) = rest.split_first_chunk().ok_or(Broken::Command)?;
        let length = usize::try_from(u32::from_be_bytes(*length)).map_err(|_| Broken::Command)?;
        let (value, rest) = rest.split_at_checked(length).ok_or(Broken::Command)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            found = Some(value);
        }
        properties = rest;
    }
    found.ok_or(Broken::Command)
}

/// The greeting of this side.
pub fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = MAJOR_VERSION;
    greeting[12..32].copy_from_slice(MECHANISM);
    greeting
}

/// Appends the command that declares the type of this socket.
pub fn put_ready(out: &mut Vec<u8>, socket_type: &str) {
    const NAMES: &[u8] = b"\x05READY\x0bSocket-Type\0\0\0";
    // Names of types are short.
    let length = socket_type.len() as u8;
    out.extend([COMMAND, NAMES.len() as u8 + 1 + length]);
    out.extend_from_slice(NAMES);
    out.push(length);
    out.extend_from_slice(socket_type.as_bytes());
}

/// Appends the reply to a PING.
pub fn put_pong(out: &mut Vec<u8>, text: &[u8]) {
    const NAME: &[u8] = b"\x04PONG";
    let text = &text[..text.len().min(MAX_PING_BYTES)];
    out.extend([COMMAND, (NAME.len() + text.len()) as u8]);
    out.extend_from_slice(NAME);
    out.extend_from_slice(text);
}

/// Appends a frame of a message.
pub fn put_frame(out: &mut Vec<u8>, has_more: bool, body: &[u8]) {
    put_head(out, has_more, body.len());
    out.extend_from_slice(body);
}

/// Appends the head of a frame of this length.
pub fn put_head(out: &mut Vec<u8>, has_more: bool, length: usize) {
    let more = if has_more { MORE } else { 0 };
    match u8::try_from(length) {
        Ok(length) => out.extend([more, length]),
        Err(_) => {
            out.push(more | LONG);
            out.extend((length as u64).to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What libzmq 4.3.5 sends for a SUB socket with the topic `kv@`.
    const LIBZMQ_GREETING: &[u8] =
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    const LIBZMQ_READY: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB";

    fn reader(bytes: &[u8]) -> Reader {
        let mut reader = Reader::default();
        reader.space()[..bytes.len()].copy_from_slice(bytes);
        reader.filled(bytes.len());
        reader
    }

    #[test]
    fn libzmq_is_understood_byte_by_byte() {
        let bytes = [LIBZMQ_GREETING, LIBZMQ_READY, b"\0\x04\x01kv@"].concat();
        let (mut reader, mut is_greeted, mut frames) = (Reader::default(), false, Vec::new());
        for byte in bytes {
            reader.space()[0] = byte;
            reader.filled(1);
            if !is_greeted {
                is_greeted = reader.greeting().unwrap();
            } else if let Some(frame) = reader.frame().unwrap() {
                frames.push((frame.is_command, frame.has_more, frame.body.to_vec()));
            }
        }
        let [(true, false, ready), (false, false, subscription)] = &frames[..] else { panic!("{frames:?}") };
        assert_eq!(Command::read(ready), Ok(Command::Ready { socket_type: b"SUB" }));
        assert_eq!(subscription, b"\x01kv@");
    }

    #[test]
    fn incompatible_peers_are_detected_by_their_first_bytes() {
        let check = |bytes: &[u8], expected| assert_eq!(reader(bytes).greeting(), expected, "{bytes:?}");
        check(b"", Ok(false));
        check(b"\xff", Ok(false));
        check(b"GET / HTTP/1.1", Err(Broken::Greeting));
        check(b"\xff\0\0\0\0\0\0\0\x01\x7e", Err(Broken::Greeting));
        check(b"\xff\0\0\0\0\0\0\0\x01\x7f", Ok(false));
        check(b"\xff\0\0\0\0\0\0\0\x01\x7f\x01", Err(Broken::Version(1)));
        check(&greeting()[..63], Ok(false));
        check(&greeting(), Ok(true));
        let mut curve = greeting();
        curve[12..17].copy_from_slice(b"CURVE");
        check(&curve, Err(Broken::Mechanism));
    }

    #[test]
    fn lengths_are_checked_before_anything_has_come() {
        let check = |bytes: &[u8], expected: Result<Option<usize>, Broken>| {
            let mut reader = reader(bytes);
            let found = reader.frame().map(|frame| frame.map(|frame| frame.body.len()));
            assert_eq!(found, expected, "{:?}", &bytes[..bytes.len().min(20)]);
            assert!(reader.num_bytes() < 2 * MAX_FRAME_BYTES);
        };
        let long = |length: u64, num_bytes: usize| {
            [&[COMMAND | LONG][..], &length.to_be_bytes(), &vec![0; num_bytes]].concat()
        };
        check(&long(1 << 40, 0), Err(Broken::FrameTooLong(1 << 40)));
        check(&long(u64::MAX, 0), Err(Broken::FrameTooLong(u64::MAX)));
        check(&long(4097, 0), Err(Broken::FrameTooLong(4097)));
        check(&long(4096, 4095), Ok(None));
        check(&long(4096, 4096), Ok(Some(4096)));
        check(&long(4096, 0)[..8], Ok(None));
        check(b"\x00\x02a", Ok(None));
        check(b"\x00\x02ab", Ok(Some(2)));
        check(b"\x08", Err(Broken::Flags(8)));
        check(b"\x05\x00", Err(Broken::Flags(5)));
    }

    #[test]
    fn commands_are_read_to_their_end() {
        let check = |body: &[u8], expected| assert_eq!(Command::read(body), expected, "{body:?}");
        let ready = |rest: &[u8]| [b"\x05READY", rest].concat();
        let dealer = ready(b"\x08Identity\0\0\0\0\x0bsocket-type\0\0\0\x06DEALER");
        check(&dealer, Ok(Command::Ready { socket_type: b"DEALER" }));
        check(b"\x09SUBSCRIBEkv", Ok(Command::Subscribe(b"kv")));
        check(b"\x06CANCEL", Ok(Command::Cancel(b"")));
        check(b"\x04PING\0\x0ahello", Ok(Command::Ping(b"hello")));
        check(b"\x04PONG", Ok(Command::Other));
        for body in
            [&b""[..], b"\x07READY", &ready(b""), b"\x04PING\0", &[b"\x04PING\0\0", &[0; 17][..]].concat()]
        {
            check(body, Err(Broken::Command));
        }
        for end in 7..dealer.len() {
            check(&dealer[..end], Err(Broken::Command));
        }
        check(&ready(b"\x0bSocket-Type\xff\xff\xff\xffSUB"), Err(Broken::Command));
    }

    #[test]
    fn what_is_written_can_be_read() {
        let mut out = Vec::new();
        put_ready(&mut out, "PUB");
        put_pong(&mut out, b"hello");
        put_frame(&mut out, true, b"topic");
        put_frame(&mut out, false, &[7; 256]);
        let mut reader = reader(&out);
        let mut frame = || {
            let frame = reader.frame().unwrap().unwrap();
            (frame.is_command, frame.has_more, frame.body.to_vec())
        };
        let (is_command, _, ready) = frame();
        assert_eq!((is_command, Command::read(&ready)), (true, Ok(Command::Ready { socket_type: b"PUB" })));
        assert_eq!(frame(), (true, false, b"\x04PONGhello".to_vec()));
        assert_eq!(frame(), (false, true, b"topic".to_vec()));
        assert_eq!(frame(), (false, false, vec![7; 256]));
    }

    proptest! {
        /// Frames do not depend on how the bytes are split into chunks, and there is always space until a
        /// frame is complete.
        #[test]
        fn chunks_do_not_matter(
            frames in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..600)), 0..20),
            chunks in prop::collection::vec(1_usize..700, 1..20),
        ) {
            let mut bytes = Vec::new();
            frames.iter().for_each(|(has_more, body)| put_frame(&mut bytes, *has_more, body));
            let (mut reader, mut found) = (Reader::default(), Vec::new());
            let mut left = &bytes[..];
            for chunk in chunks.iter().cycle() {
                while let Some(frame) = reader.frame().unwrap() {
                    found.push((frame.has_more, frame.body.to_vec()));
                }
                if left.is_empty() {
                    break;
                }
                let space = reader.space();
                let num_bytes = left.len().min(*chunk).min(space.len());
                assert!(num_bytes > 0);
                space[..num_bytes].copy_from_slice(&left[..num_bytes]);
                reader.filled(num_bytes);
                left = &left[num_bytes..];
            }
            prop_assert_eq!(found, frames);
        }
    }
}
