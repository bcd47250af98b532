use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::kv_events::kept::MAX_KEPT_BYTES;

const TOPIC: &[u8] = b"kv@demo";
/// Memory limit of a session, whatever its peer does.
const MAX_BYTES: usize = 24 << 10;

/// The handshake of a peer.
fn hello(socket_type: &str) -> Vec<u8> {
    let mut bytes = zmtp::greeting().to_vec();
    zmtp::put_ready(&mut bytes, socket_type);
    bytes
}

fn request(number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    zmtp::put_frame(&mut bytes, true, b"");
    zmtp::put_frame(&mut bytes, false, &number.to_be_bytes());
    bytes
}

fn subscription(body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    zmtp::put_frame(&mut bytes, false, body);
    bytes
}

/// Sends as many bytes as there is space for.
fn send(session: &mut Session<'_>, bytes: &[u8]) -> usize {
    let space = session.space();
    let num_bytes = bytes.len().min(space.len());
    space[..num_bytes].copy_from_slice(&bytes[..num_bytes]);
    session.filled(num_bytes);
    num_bytes
}

/// Sends all bytes, and reads until nothing more comes.
fn exchange(session: &mut Session<'_>, mut bytes: &[u8]) -> Result<Vec<u8>, Fault> {
    let mut received = Vec::new();
    loop {
        let num_sent = send(session, bytes);
        bytes = &bytes[num_sent..];
        session.work()?;
        received.extend_from_slice(session.output());
        let num_received = session.output().len();
        session.written(num_received);
        assert!(session.num_bytes() <= MAX_BYTES, "{}", session.num_bytes());
        if num_sent + num_received == 0 {
            assert!(bytes.is_empty());
            return Ok(received);
        }
    }
}

/// A session after the handshake.
fn open<'a>(role: Role, socket_type: &str, kept: &'a KeptBatches) -> Session<'a> {
    let mut session = Session::new(role, TOPIC, kept);
    let mut wanted = zmtp::greeting().to_vec();
    zmtp::put_ready(&mut wanted, role.socket_type());
    assert_eq!(exchange(&mut session, &hello(socket_type)).unwrap(), wanted);
    assert!(session.is_open());
    session
}

/// Parses messages; each is a list of frames.
fn messages(mut bytes: &[u8]) -> Vec<Vec<Vec<u8>>> {
    let (mut messages, mut message) = (Vec::new(), Vec::new());
    while let [flags, rest @ ..] = bytes {
        let (length, rest) = match flags & 2 {
            0 => (usize::from(rest[0]), &rest[1..]),
            _ => (u64::from_be_bytes(rest[..8].try_into().unwrap()) as usize, &rest[8..]),
        };
        assert_eq!(flags & 4, 0);
        message.push(rest[..length].to_vec());
        bytes = &rest[length..];
        if flags & 1 == 0 {
            messages.push(std::mem::take(&mut message));
        }
    }
    assert!(message.is_empty());
    messages
}

fn numbers(bytes: &[u8]) -> Vec<u64> {
    let number = |message: &Vec<Vec<u8>>| {
        let number = &message[message.len() - 2];
        u64::from_be_bytes(number[..].try_into().unwrap())
    };
    messages(bytes).iter().map(number).collect()
}

fn push(kept: &KeptBatches, numbers: std::ops::Range<u64>, num_bytes: usize) {
    numbers.for_each(|number| kept.push(number, Bytes::from(vec![number as u8; num_bytes])));
}

#[test]
fn a_replay_is_what_is_kept_and_an_end() {
    let kept = KeptBatches::new(10, 10);
    push(&kept, 0..3, 5);
    push(&kept, 3..4, 3 * OUT_BYTES);
    for socket_type in ["DEALER", "REQ", "ROUTER"] {
        let mut session = open(Role::Repeater, socket_type, &kept);
        let answer = messages(&exchange(&mut session, &request(2)).unwrap());
        let batch = |number: u64, num_bytes| {
            vec![vec![], TOPIC.to_vec(), number.to_be_bytes().to_vec(), vec![number as u8; num_bytes]]
        };
        let end = vec![vec![], vec![], END.to_vec(), vec![]];
        assert_eq!(answer, [batch(2, 5), batch(3, 3 * OUT_BYTES), end.clone()]);
        assert_eq!(messages(&exchange(&mut session, &request(4)).unwrap()), [end]);
    }
}

#[test]
fn replays_are_answered_one_after_another() {
    let kept = KeptBatches::new(10, 10);
    push(&kept, 0..10, 5_000);
    let mut session = open(Role::Repeater, "DEALER", &kept);
    send(&mut session, &request(7).repeat(3));
    session.work().unwrap();
    // The first request is not finished, so no more input is read.
    assert!(session.space().is_empty());
    let rest = exchange(&mut session, b"").unwrap();
    assert_eq!(numbers(&rest), [7, 8, 9, u64::MAX].repeat(3));
    assert!(!session.space().is_empty());
}

#[test]
fn a_replay_ends_with_what_there_was_when_it_began() {
    let kept = KeptBatches::new(10, 10);
    push(&kept, 0..10, OUT_BYTES);
    let mut session = open(Role::Repeater, "DEALER", &kept);
    send(&mut session, &request(0));
    session.work().unwrap();
    let first = session.output().to_vec();
    session.written(first.len());
    push(&kept, 10..12, 1);
    // The first two batches were dropped, and one of them was partly sent.
    assert_eq!(exchange(&mut session, b""), Err(Fault::TooSlow));
    let mut session = open(Role::Repeater, "DEALER", &kept);
    send(&mut session, &request(8));
    session.work().unwrap();
    push(&kept, 12..14, 1);
    assert_eq!(numbers(&exchange(&mut session, b"").unwrap()), [8, 9, 10, 11, u64::MAX]);
}

#[test]
fn subscribers_get_what_begins_as_they_want() {
    let check = |wanted: &[u8], is_matching: bool| {
        // Once as messages, and once as the commands of version 3.1.
        let mut command = Vec::new();
        let body = [b"\x09SUBSCRIBE", wanted].concat();
        command.extend([4, body.len() as u8]);
        command.extend(body);
        for subscription in [subscription(&[&[1], wanted].concat()), command] {
            let kept = KeptBatches::new(10, 10);
            push(&kept, 0..2, 5);
            let mut session = open(Role::Publisher, "SUB", &kept);
            assert_eq!(exchange(&mut session, &subscription).unwrap(), b"", "not what was before");
            push(&kept, 2..4, 300);
            let received = exchange(&mut session, b"").unwrap();
            assert_eq!(numbers(&received), if is_matching { &[2, 3][..] } else { &[] }, "{wanted:?}");
            for message in messages(&received) {
                assert_eq!((message.len(), &message[0][..], message[2].len()), (3, TOPIC, 300));
            }
            assert_eq!(session.take_missed(), 0);
        }
    };
    check(b"", true);
    check(b"kv@", true);
    check(TOPIC, true);
    check(b"kv@demos", false);
    check(b"@", false);
}

#[test]
fn a_peer_that_unsubscribes_gets_nothing_more() {
    let kept = KeptBatches::new(10, 10);
    let mut session = open(Role::Publisher, "XSUB", &kept);
    let both = [subscription(b"\x01kv"), subscription(b"\x01"), subscription(b"\x01other")].concat();
    exchange(&mut session, &both).unwrap();
    exchange(&mut session, &subscription(b"\x00")).unwrap();
    push(&kept, 0..1, 5);
    assert_eq!(numbers(&exchange(&mut session, b"").unwrap()), [0], "one is left");
    // In the middle of a message.
    push(&kept, 1..3, 2 * OUT_BYTES);
    session.work().unwrap();
    let rest = exchange(&mut session, b"\x04\x09\x06CANCELkv").unwrap();
    assert_eq!(numbers(&rest), [1]);
    push(&kept, 3..4, 5);
    assert_eq!(exchange(&mut session, b"").unwrap(), b"");
    assert!(!session.wants_batches());
    exchange(&mut session, &subscription(b"\x01k")).unwrap();
    push(&kept, 4..5, 5);
    assert_eq!(numbers(&exchange(&mut session, b"").unwrap()), [4]);
    assert_eq!(session.take_missed(), 0, "what was not wanted is not missed");
}

#[test]
fn slow_subscribers_miss_batches_and_they_are_counted() {
    let kept = KeptBatches::new(4, 1);
    let mut session = open(Role::Publisher, "SUB", &kept);
    exchange(&mut session, &subscription(b"\x01")).unwrap();
    push(&kept, 0..10, 5);
    assert_eq!(numbers(&exchange(&mut session, b"").unwrap()), [6, 7, 8, 9]);
    assert_eq!((session.take_missed(), session.take_missed()), (6, 0));
    // The rest of a message that is partly sent was dropped.
    push(&kept, 10..11, 2 * OUT_BYTES);
    session.work().unwrap();
    push(&kept, 11..15, 5);
    assert_eq!(exchange(&mut session, b""), Err(Fault::TooSlow));
    assert_eq!(session.take_missed(), 5);
}

#[test]
fn pings_are_answered_between_messages() {
    let kept = KeptBatches::new(10, 10);
    let ping = b"\x04\x0c\x04PING\0\x0ahello";
    let pong = b"\x04\x0a\x04PONGhello";
    for (role, socket_type) in [(Role::Publisher, "SUB"), (Role::Repeater, "DEALER")] {
        let mut session = open(role, socket_type, &kept);
        assert_eq!(exchange(&mut session, ping).unwrap(), pong);
    }
    let mut session = open(Role::Publisher, "SUB", &kept);
    exchange(&mut session, &subscription(b"\x01")).unwrap();
    push(&kept, 0..1, 2 * OUT_BYTES);
    session.work().unwrap();
    let received = exchange(&mut session, ping).unwrap();
    assert_eq!(numbers(received.strip_suffix(pong).unwrap()), [0]);
}

#[test]
fn a_peer_with_invalid_data_is_closed() {
    let kept = KeptBatches::new(10, 10);
    push(&kept, 0..1, 5);
    let check = |role, bytes: &[u8], fault: Fault| {
        let mut session = Session::new(role, TOPIC, &kept);
        assert_eq!(exchange(&mut session, bytes), Err(fault), "{bytes:?}");
    };
    let both = [(Role::Publisher, "SUB"), (Role::Repeater, "DEALER")];
    for (role, fitting) in both {
        check(role, b"GET / HTTP/1.1\r\n\r\n", Broken::Greeting.into());
        check(role, &hello("PUSH"), Fault::SocketType);
        let early = [&zmtp::greeting()[..], &request(0)].concat();
        check(role, &early, Broken::Command.into());
        let huge = [&zmtp::greeting()[..], b"\x06\0\0\x01\0\0\0\0\0"].concat();
        check(role, &huge, Broken::FrameTooLong(1 << 40).into());
        let huge = [&hello(fitting)[..], b"\x03\0\0\0\0\0\0\x10\x01"].concat();
        check(role, &huge, Broken::FrameTooLong(4_097).into());
    }
    check(Role::Publisher, &hello("DEALER"), Fault::SocketType);
    check(Role::Repeater, &hello("SUB"), Fault::SocketType);
    let many = [hello("DEALER"), b"\x01\0".repeat(9)].concat();
    check(Role::Repeater, &many, Fault::TooManyFrames);
}

#[test]
fn what_is_no_request_has_no_answer() {
    let kept = KeptBatches::new(10, 10);
    push(&kept, 0..1, 5);
    let mut session = open(Role::Repeater, "DEALER", &kept);
    let number = b"\0\x08\0\0\0\0\0\0\0\0";
    let wrong: [&[u8]; 5] = [
        b"\0\0",
        number,
        b"\x01\0\0\x07\0\0\0\0\0\0\0",
        &[b"\x01\x01x", &number[..]].concat(),
        &[b"\x01\0\x01\x08\0\0\0\0\0\0\0\0\0\0", &b"\x01\0\0\0"[..]].concat(),
    ];
    for bytes in wrong {
        assert_eq!(exchange(&mut session, bytes).unwrap(), b"", "{bytes:?}");
    }
    assert_eq!(numbers(&exchange(&mut session, &request(0)).unwrap()), [0, u64::MAX]);
}

/// A payload that counts itself while somebody holds it.
struct Payload {
    bytes: Vec<u8>,
    num_alive: Arc<AtomicUsize>,
}

impl AsRef<[u8]> for Payload {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        self.num_alive.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The largest number of peers, none of which reads, while more batches come than are kept. Their sessions do
/// not grow, and none keeps a dropped batch alive.
#[test]
fn peers_that_read_nothing_take_what_they_take() {
    const BATCH: usize = 1 << 20;
    let kept = KeptBatches::new(1_000, 1_000);
    let num_alive = Arc::new(AtomicUsize::new(0));
    let push = |number| {
        num_alive.fetch_add(1, Ordering::Relaxed);
        let payload = Payload { bytes: vec![0; BATCH], num_alive: Arc::clone(&num_alive) };
        kept.push(number, Bytes::from_owner(payload));
    };
    let num_batches = 2 * (MAX_KEPT_BYTES / BATCH) as u64;
    let mut sessions: Vec<Session<'_>> = Vec::new();
    for number in 0..num_batches {
        push(number);
        // Some come later, in the middle of another batch.
        for is_subscriber in [true, false] {
            let (role, socket_type, wish) = match is_subscriber {
                true => (Role::Publisher, "SUB", subscription(b"\x01")),
                false => (Role::Repeater, "DEALER", request(number).repeat(250)),
            };
            let mut session = open(role, socket_type, &kept);
            send(&mut session, &wish);
            sessions.push(session);
        }
        for session in &mut sessions {
            session.work().unwrap();
            assert!(session.num_bytes() <= MAX_BYTES, "{}", session.num_bytes());
        }
        assert!(num_alive.load(Ordering::Relaxed) * BATCH <= MAX_KEPT_BYTES);
    }
    assert_eq!(sessions.len(), 256);
    // All but the last subscriber are in the middle of a batch. That one has seen none.
    let num_waiting = sessions.iter().filter(|session| session.output().is_empty()).count();
    assert_eq!(num_waiting, 1);
    for session in &mut sessions[..200] {
        session.written(session.output().len());
        if let Err(fault) = session.work() {
            assert_eq!(fault, Fault::TooSlow);
        }
    }
}

/// Bytes that peers could send: handshakes, valid requests, and arbitrary bytes.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let part = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40),
        (any::<u8>(), any::<u64>())
            .prop_map(|(flags, length)| [&[flags & 7 | 2][..], &length.to_be_bytes()].concat()),
        (any::<bool>(), prop::collection::vec(any::<u8>(), 0..5_000)).prop_map(|(has_more, body)| {
            let mut bytes = Vec::new();
            zmtp::put_frame(&mut bytes, has_more, &body);
            bytes
        }),
        (0_u64..30).prop_map(request),
        (0_u8..2, 0..=TOPIC.len()).prop_map(|(kind, end)| subscription(&[&[kind], &TOPIC[..end]].concat())),
        Just(b"\x04\x0c\x04PING\0\x0ahello".to_vec()),
    ];
    let hello = prop_oneof![
        Just(hello("SUB")),
        Just(hello("DEALER")),
        Just(zmtp::greeting().to_vec()),
        Just(Vec::new())
    ];
    (hello, prop::collection::vec(part, 0..12)).prop_map(|(hello, parts)| [hello, parts.concat()].concat())
}

proptest! {
    /// For any bytes in any chunks, and however slowly the output is read: nothing panics, the memory is
    /// limited, and a live session has output to send or space for input.
    #[test]
    fn any_bytes_are_survived(
        bytes in bytes(),
        chunks in prop::collection::vec((0_usize..600, 0_usize..5_000, any::<bool>()), 1..200),
        is_publisher in any::<bool>(),
    ) {
        let kept = KeptBatches::new(20, 10);
        push(&kept, 0..15, 2_000);
        let role = if is_publisher { Role::Publisher } else { Role::Repeater };
        let mut session = Session::new(role, TOPIC, &kept);
        let (mut left, mut number) = (&bytes[..], 15);
        for (chunk, taken, is_published) in chunks {
            let num_sent = send(&mut session, &left[..chunk.min(left.len())]);
            left = &left[num_sent..];
            if is_published {
                push(&kept, number..number + 1, 700);
                number += 1;
            }
            let worked = session.work();
            prop_assert!(session.num_bytes() <= MAX_BYTES, "{}", session.num_bytes());
            if worked.is_err() {
                return Ok(());
            }
            prop_assert!(!session.space().is_empty() || !session.output().is_empty());
            let num_taken = taken.min(session.output().len());
            session.written(num_taken);
        }
    }
}
