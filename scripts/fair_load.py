#!/usr/bin/env python3
"""How long one client waits beside the load of another, and what the load costs.

    tinyvllm serve &
    python scripts/fair_load.py http://127.0.0.1:8000

The load comes from 127.0.0.1, the other client from 127.0.0.2, so the server must run on this Linux machine and
without API keys. Needs Python 3.10 and nothing else. The load is a process of its own, so that its work is not in the
other client's times; it takes a processor from the server unless each has its own:

    taskset -c 0 tinyvllm serve --threads 1 &
    taskset -c 1 python scripts/fair_load.py --nice http://127.0.0.1:8000
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import time
import urllib.parse

LOAD, OTHER = "127.0.0.1", "127.0.0.2"
TEXT = "Once upon a time there was a small cache that kept what it was given. "


def request_bytes(path, body=None):
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


def parsed(answer):
    """Status and body."""
    head, _, answer = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), answer


def body(prompt, num_tokens, **more):
    return {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, **more}


class Load:
    """What the first client sends; counts what came back."""

    def __init__(self, url):
        self.url, self.num_tokens, self.num_refused = url, 0, 0

    async def send(self, request):
        reader, writer = await asyncio.open_connection(self.url.hostname, self.url.port, local_addr=(LOAD, 0))
        writer.write(request_bytes("/v1/completions", request))
        try:
            status, answer = parsed(await reader.read(-1))
        finally:
            writer.close()
        if status == 200:
            self.num_tokens += json.loads(answer)["usage"]["total_tokens"]
        else:
            self.num_refused += 1

    async def crowd(self, seconds):
        async def one(index):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await self.send(body(f"{index} {TEXT}", 16))

        await asyncio.gather(*(one(index) for index in range(320)))

    async def all_of(self, requests):
        await asyncio.gather(*(self.send(request) for request in requests))


def loads(seconds):
    # Texts that begin differently share no cache.
    return {
        "320 connections": lambda load: load.crowd(seconds),
        "200 short": lambda load: load.all_of(body(f"{i} {TEXT}", 16) for i in range(200)),
        "200 long prompts": lambda load: load.all_of(body(f"{i} " + TEXT * 20, 16) for i in range(200)),
        "one n=32": lambda load: load.all_of([body(TEXT, 440, n=32)]),
        "one list of 128": lambda load: load.all_of([body([f"{i} {TEXT}" for i in range(128)], 64)]),
    }


def run_load(args, name, sender):
    """Sends a load, in a process of its own, and tells what came of it."""
    if args.nice:
        os.nice(19)
    load = Load(args.url)
    start = time.monotonic()
    asyncio.run(loads(args.seconds)[name](load))
    sender.send((time.monotonic() - start, load.num_tokens, load.num_refused))


def ask(url, path, request=None):
    """The other client: milliseconds until the answer was there, its status and body."""
    start = time.monotonic()
    with socket.create_connection((url.hostname, url.port), source_address=(OTHER, 0)) as stream:
        stream.sendall(request_bytes(path, request))
        answer = b"".join(iter(lambda: stream.recv(1 << 16), b""))
    return (time.monotonic() - start) * 1e3, *parsed(answer)


def timed(url, number):
    """Milliseconds of a short request, those of it in the engine, and of a look at health; none where refused."""
    took, status, answer = ask(url, "/v1/completions", body(f"Other {number}", 16))
    if status != 200:
        return None, None, ask(url, "/health")[0]
    timings = json.loads(answer)["timings"]
    inside = sum(timings[part] for part in ("queue_ms", "prefill_ms", "decode_ms"))
    return took, inside, ask(url, "/health")[0]


def full_step(url, number):
    """Milliseconds of a step of 512 tokens, the most of one unless the server was told otherwise."""
    ids = [20 + (number + index) % 200 for index in range(512)]
    return json.loads(ask(url, "/v1/completions", body(ids, 1))[2])["timings"]["prefill_ms"]


def shown(times):
    return " ".join("refused" if time is None else f"{time:.1f}" for time in times) or "-"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", type=urllib.parse.urlsplit)
    parser.add_argument("--probes", type=int, default=5, help="requests of the other client beside each load")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds before each of them")
    parser.add_argument("--seconds", type=float, default=10, help="how long the 320 connections go on")
    parser.add_argument("--only", help="the load whose name begins so")
    parser.add_argument("--nice", action="store_true", help="the load gives way to the other client's clock")
    args = parser.parse_args()
    numbers = iter(range(1_000_000))
    alone = [timed(args.url, next(numbers)) for _ in range(15)]
    alone, inside = (statistics.median(times) for times in list(zip(*alone))[:2])
    step = statistics.median(full_step(args.url, next(numbers)) for _ in range(3))
    print(f"alone: {alone:.1f} ms, {inside:.1f} in the engine; a step of 512 tokens: {step:.1f} ms")
    for name in loads(args.seconds):
        if args.only and not name.startswith(args.only):
            continue
        receiver, sender = multiprocessing.Pipe(duplex=False)
        load = multiprocessing.Process(target=run_load, args=(args, name, sender))
        load.start()
        found = []
        while len(found) < args.probes:
            if receiver.poll(args.pause):
                break
            found.append(timed(args.url, next(numbers)))
        took, num_tokens, num_refused = receiver.recv()
        load.join()
        waits, inside, health = zip(*found) if found else ((), (), ())
        print(
            f"{name}: the other waited {shown(waits)} ms, in the engine {shown(inside)}; /health at most "
            f"{max(health, default=0):.0f} ms; load {took:.1f} s, {num_tokens / took:.0f} tokens/s, "
            f"{num_refused} refused",
            flush=True,
        )


if __name__ == "__main__":
    main()
