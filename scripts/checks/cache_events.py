"""ZeroMQ's own sockets hear of the prefix cache, and ask for what they missed.

    python3 scripts/checks/cache_events.py http://127.0.0.1:8000

Needs the packages pyzmq and msgpack, and a server with `--kv-events-config` that has a `replay_endpoint`, a topic that is
not empty, and no other clients. Prints `ok: events`.
"""

import sys
import time

import msgpack
import zmq
from harness import TIMEOUT_SECONDS, request

HEARTBEAT = 100  # ms
END = b"\xff" * 8


def generate(url: str, seed: int):
    """Publishes one batch: a prompt that is new."""
    prompt = [(position * (7 + seed) + seed * 13) % 200 + 20 for position in range(100)]
    request(f"{url}/v1/completions", {"prompt": prompt, "max_tokens": 1})


def connect(context, kind: int, endpoint: str):
    """A socket that gives the server three heartbeats to answer before it leaves."""
    socket = context.socket(kind)
    socket.linger, socket.rcvtimeo = 0, 1000 * TIMEOUT_SECONDS
    socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT, 3 * HEARTBEAT
    socket.connect(endpoint)
    return socket


def replay(socket) -> list:
    """The rest of the answer to a request: numbers and payloads."""
    batches = []
    while True:
        empty, _topic, number, payload = socket.recv_multipart()
        assert empty == b"", empty
        if number == END:
            return batches
        batches.append((int.from_bytes(number, "big"), payload))


def main(url: str):
    source = request(f"{url}/kv_event_sources")[0]
    topic = source["topic"].encode()
    context = zmq.Context()
    begin, raw = (connect(context, kind, source["endpoint"]) for kind in (zmq.SUB, zmq.XSUB))
    other = connect(context, zmq.SUB, source["endpoint"])
    begin.subscribe(topic[:2])
    other.subscribe(b"elsewhere")
    raw.send(b"\x01")
    # A subscription takes effect when it arrives, and nothing reports it.
    seed = 0
    while not (begin.poll(HEARTBEAT) and raw.poll(HEARTBEAT)):
        generate(url, seed)
        seed += 1
    heard = begin.recv_multipart()
    assert heard[0] == topic and msgpack.unpackb(heard[2])[1], heard

    dealer = connect(context, zmq.DEALER, source["replay_endpoint"])
    for _ in range(3):
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
    answers = [replay(dealer) for _ in range(3)]
    assert [number for number, _ in answers[0]] == list(range(seed + 1)), answers[0]
    assert answers[1:] == answers[:1] * 2, "asked three times, one after another"
    assert (int.from_bytes(heard[1], "big"), heard[2]) in answers[0], "the same, published and repeated"
    caller = connect(context, zmq.REQ, source["replay_endpoint"])
    caller.send((seed).to_bytes(8, "big"))
    assert caller.recv_multipart() == [topic, seed.to_bytes(8, "big"), answers[0][-1][1]]

    # Both sides are there after many heartbeats, and a subscription can be taken back.
    time.sleep(10 * HEARTBEAT / 1000)
    begin.unsubscribe(topic[:2])
    begin.subscribe(topic)
    dealer.send_multipart([b"", (0).to_bytes(8, "big")])
    assert replay(dealer) == answers[0]
    for socket in (begin, raw):
        while socket.poll(0):
            socket.recv_multipart()
    generate(url, seed)
    last = begin.recv_multipart()
    assert int.from_bytes(last[1], "big") == seed + 1 and last == raw.recv_multipart(), last
    assert not other.poll(0), "another topic"
    metrics = request(f"{url}/metrics").splitlines()
    closed = [line for line in metrics if line.startswith("tinyvllm_kv_event_peers_closed_total")]
    assert len(closed) == 1 and closed[0].endswith(" 0"), closed
    context.destroy(linger=0)
    print("ok: events")


if __name__ == "__main__":
    main(*sys.argv[1:])
