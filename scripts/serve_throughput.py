#!/usr/bin/env python3
"""Tokens per second of a running server with one client and with several, in turn.

    tinyvllm serve --port 8000 --disable-access-log &
    scripts/serve_throughput.py http://127.0.0.1:8000 --clients 8 --expect 2.0

The client only counts bytes, so that it takes little of the machine. Each figure is the best of all rounds:
whatever else the machine does can only make a round slower. The exit status is 1 if several clients together get
less than `--expect` times what one client gets.
"""

import argparse
import json
import selectors
import socket
import sys
import time
from urllib.parse import urlparse


def seconds(address: tuple[str, int], clients: int, tokens: int) -> float:
    """All clients at once, each with one stream."""
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    selector = selectors.DefaultSelector()
    tails: dict[socket.socket, bytes] = {}
    begin = time.perf_counter()
    for number in range(clients):
        data = json.dumps(body | {"prompt": f"{body['prompt']}, {number}"}).encode()
        stream = socket.create_connection(address)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {address[0]}\r\ncontent-type: application/json\r\n"
        stream.sendall(f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        tails[stream] = b""
        selector.register(stream, selectors.EVENT_READ)
    complete = 0
    while tails:
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)
            tails[key.fileobj] = (tails[key.fileobj] + data)[-64:]
            if not data:
                complete += b"[DONE]" in tails.pop(key.fileobj)
                selector.unregister(key.fileobj)
                key.fileobj.close()
    if complete < clients:
        sys.exit(f"only {complete} of {clients} streams were complete")
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--expect", type=float, default=0.0, help="least ratio")
    args = parser.parse_args()
    url = urlparse(args.url)
    address = (url.hostname, url.port or 80)
    seconds(address, 1, 16)
    best = {1: 0.0, args.clients: 0.0}
    for _ in range(args.rounds):
        for clients in best:
            # As many tokens either way, so that both figures meet the same disturbances.
            times = [seconds(address, clients, args.tokens) for _ in range(args.clients // clients)]
            best[clients] = max(best[clients], args.clients * args.tokens / sum(times))
    ratio = best[args.clients] / best[1]
    print(f"1 client {best[1]:.0f} tokens/s, {args.clients} clients {best[args.clients]:.0f} tokens/s: {ratio:.2f} times")
    sys.exit(ratio < args.expect)


if __name__ == "__main__":
    main()
