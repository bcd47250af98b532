#!/usr/bin/env python3
"""How long one client waits beside the load of another, and what the load costs.

    tinyvllm serve &
    python scripts/fair_load.py http://127.0.0.1:8000

The load comes from 127.0.0.1, the other client from 127.0.0.2, so the server must run on this Linux machine and
without API keys. Needs Python 3.10 and nothing else.
"""

import argparse
import asyncio
import json
import statistics
import time
import urllib.parse

LOAD, OTHER = "127.0.0.1", "127.0.0.2"
TEXT = "Once upon a time there was a small cache that kept what it was given. "


async def ask(url, address, path, body=None):
    """Status and body of one request on a connection of its own."""
    reader, writer = await asyncio.open_connection(url.hostname, url.port, local_addr=(address, 0))
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    try:
        answer = await reader.read(-1)
    finally:
        writer.close()
    head, _, answer = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), answer


def body(prompt, num_tokens, **more):
    return {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, **more}


class Load:
    """What the first client sends; counts what came back."""

    def __init__(self, url):
        self.url, self.num_tokens, self.num_refused = url, 0, 0

    async def send(self, request):
        status, answer = await ask(self.url, LOAD, "/v1/completions", request)
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


async def timed(url, number):
    """Milliseconds of a short request of the other client, and of a look at its health; none where refused."""
    start = time.monotonic()
    status, _ = await ask(url, OTHER, "/v1/completions", body(f"Other {number}", 16))
    took = (time.monotonic() - start) * 1e3
    start = time.monotonic()
    await ask(url, OTHER, "/health")
    return (took if status == 200 else None), (time.monotonic() - start) * 1e3


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", type=urllib.parse.urlsplit)
    parser.add_argument("--probes", type=int, default=5, help="requests of the other client beside each load")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds before each of them")
    parser.add_argument("--seconds", type=float, default=10, help="how long the 320 connections go on")
    parser.add_argument("--only", help="the load whose name begins so")
    args = parser.parse_args()
    number = 0
    alone = []
    for _ in range(7):
        number += 1
        alone.append((await timed(args.url, number))[0])
    print(f"alone: {statistics.median(alone):.0f} ms")
    for name, send in loads(args.seconds).items():
        if args.only and not name.startswith(args.only):
            continue
        load = Load(args.url)
        start = time.monotonic()
        running = asyncio.create_task(send(load))
        waits, health = [], []
        while len(waits) < args.probes:
            await asyncio.sleep(args.pause)
            if running.done():
                break
            number += 1
            wait, look = await timed(args.url, number)
            waits.append(wait)
            health.append(look)
        await running
        took = time.monotonic() - start
        shown = " ".join("refused" if wait is None else f"{wait:.0f}" for wait in waits)
        print(
            f"{name}: the other waited {shown or '-'} ms; /health at most {max(health, default=0):.0f} ms; "
            f"load {took:.1f} s, {load.num_tokens / took:.0f} tokens/s, {load.num_refused} refused",
            flush=True,
        )


asyncio.run(main())
