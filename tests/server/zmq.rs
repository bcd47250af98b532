//! A ZeroMQ socket of one connection: what libzmq would send, byte by byte, and what comes back.

use std::io::{Read, Write};
use std::net::TcpStream;

use super::client::TIMEOUT;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What libzmq 4.3.5 begins with.
pub(crate) fn greeting() -> Vec<u8> {
    let mut greeting = vec![0; 64];
    greeting[..12].copy_from_slice(&[0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1]);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// What a socket of this type says next.
pub(crate) fn ready(socket_type: &str) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    body.push(socket_type.len() as u8);
    body.extend(socket_type.as_bytes());
    if socket_type != "SUB" {
        body.extend(b"\x08Identity\0\0\0\0");
    }
    [&[COMMAND, body.len() as u8][..], &body].concat()
}

/// A request for everything from this number on.
pub(crate) fn request(start: u64) -> Vec<u8> {
    [&[MORE, 0, 0, 8][..], &start.to_be_bytes()].concat()
}

pub(crate) fn connect(endpoint: &str) -> TcpStream {
    let stream = TcpStream::connect(endpoint.trim_start_matches("tcp://")).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

/// A connection that has said hello, and has read nothing.
pub(crate) fn raw_peer(endpoint: &str, socket_type: &str) -> TcpStream {
    let mut stream = connect(endpoint);
    stream.write_all(&[greeting(), ready(socket_type)].concat()).unwrap();
    stream
}

/// A socket that sends and receives messages.
pub(crate) struct Peer(TcpStream);

impl Peer {
    pub(crate) fn connect(endpoint: &str, socket_type: &str) -> Self {
        let mut peer = Self(raw_peer(endpoint, socket_type));
        let mut theirs = [0; 64];
        peer.0.read_exact(&mut theirs).unwrap();
        assert_eq!((theirs[0], theirs[9], theirs[10], &theirs[12..17]), (0xff, 0x7f, 3, &b"NULL\0"[..]));
        let (flags, command) = peer.frame().unwrap();
        assert!(flags == COMMAND && command.starts_with(b"\x05READY"), "{command:?}");
        peer
    }

    pub(crate) fn send(&mut self, parts: &[&[u8]]) {
        for (index, part) in parts.iter().enumerate() {
            let more = if index + 1 < parts.len() { MORE } else { 0 };
            self.0.write_all(&[&[more, part.len() as u8], *part].concat()).unwrap();
        }
    }

    /// Wants what begins like this.
    pub(crate) fn subscribe(&mut self, topic: &str) {
        self.send(&[&[&[1], topic.as_bytes()].concat()]);
    }

    /// The parts of the next message, or nothing if the other side has closed.
    pub(crate) fn try_receive(&mut self) -> Option<Vec<Vec<u8>>> {
        let mut parts = Vec::new();
        loop {
            let (flags, part) = self.frame()?;
            assert_eq!(flags & COMMAND, 0, "{part:?}");
            parts.push(part);
            if flags & MORE == 0 {
                return Some(parts);
            }
        }
    }

    #[track_caller]
    pub(crate) fn receive(&mut self) -> Vec<Vec<u8>> {
        self.try_receive().expect("the server has closed the connection")
    }

    /// The socket below.
    pub(crate) fn stream(&self) -> &TcpStream {
        &self.0
    }

    fn frame(&mut self) -> Option<(u8, Vec<u8>)> {
        let flags = self.bytes::<1>()?[0];
        let length = match flags & LONG {
            0 => u64::from(self.bytes::<1>()?[0]),
            _ => u64::from_be_bytes(self.bytes()?),
        };
        let mut body = vec![0; usize::try_from(length).unwrap()];
        self.0.read_exact(&mut body).ok()?;
        Some((flags & !LONG, body))
    }

    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).ok()?;
        Some(bytes)
    }
}
