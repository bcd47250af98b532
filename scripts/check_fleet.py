#!/usr/bin/env python3
"""Three servers behind routers that others wrote: what is found in caches, and what a killed server costs.

    python scripts/check_fleet.py target/release/tinyvllm

Needs the packages vllm-router, smg, pyzmq and msgpack. Runs the built-in model on this machine; nothing else is asked.
Prints a line for each check and ends with 1 if one fails.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import msgpack
import zmq

BLOCK_SIZE = 32
FLAGS = f"serve --threads 1 --max-model-len 512 --block-size {BLOCK_SIZE}"
PATIENCE = 30


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def request(url: str, body=None, timeout=PATIENCE):
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as answer:
        return json.load(answer) if "json" in answer.headers.get("content-type", "") else answer.read().decode()


def wait_for(what: str, check):
    start = time.monotonic()
    while time.monotonic() - start < PATIENCE:
        try:
            if result := check():
                return result
        except (OSError, ValueError):
            pass
        time.sleep(0.1)
    raise SystemExit(f"FAIL  {what} within {PATIENCE} s")


class Process:
    """A program, ended with this one. What it writes is kept for a failure."""

    def __init__(self, command: list, env=None):
        self.output = tempfile.TemporaryFile("w+")
        self.child = subprocess.Popen(
            command, stdout=self.output, stderr=subprocess.STDOUT, env=os.environ | (env or {})
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.kill()
        self.child.wait()

    def said(self) -> str:
        self.output.seek(0)
        return self.output.read()[-4000:]


class Replica(Process):
    """A server with events of its prefix cache."""

    def __init__(self, program: str, port: int, events: int, replay: int):
        self.url, self.program = f"http://127.0.0.1:{port}", program
        self.ports = port, events, replay
        self.events, self.replay = f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
        config = {"enable_kv_cache_events": True, "endpoint": self.events, "replay_endpoint": self.replay}
        super().__init__([program, *FLAGS.split(), "--port", str(port), "--kv-events-config", json.dumps(config)])

    def ready(self):
        wait_for(f"a server is ready: {self.said()}", lambda: request(self.url + "/v1/models"))
        return self

    def metric(self, name: str) -> float:
        lines = request(self.url + "/metrics").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def start(program: str, count: int) -> list:
    replicas = [Replica(program, free_port(), free_port(), free_port()) for _ in range(count)]
    return [replica.ready() for replica in replicas]


def router(name: str, policy: str, replicas: list, extra=()) -> tuple:
    port = free_port()
    urls = [replica.url for replica in replicas]
    common = ["--host", "127.0.0.1", "--port", str(port), "--policy", policy, "--worker-urls", *urls]
    folder = pathlib.Path(sys.executable).parent
    program = shutil.which(name, path=f"{folder}:{os.environ['PATH']}")
    launch = ["launch"] if name == "smg" else []
    process = Process([program, *launch, *common, "--prometheus-port", str(free_port()), *extra])
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{name} is ready", lambda: complete(url, "Hello"))
    except SystemExit as error:
        raise SystemExit(f"{error}\n{process.said()}") from None
    return process, url


def complete(url: str, prompt, max_tokens=1):
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return request(url + "/v1/completions", body)


def cached_tokens(answer) -> int:
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def conversation(family: int, turn: int) -> str:
    """The text of a growing conversation: every turn has all of the earlier ones as its prefix."""
    lines = [f"Story {family * 7919} part {part}: the fox number {family * 31 + part} went home. " for part in range(turn + 1)]
    return "".join(lines)


def hit_rate(program: str, name: str, policy: str, extra=lambda replicas: ()) -> float:
    """The share of prompt tokens that caches had, for eight conversations of six turns each, in turns."""
    replicas = start(program, 3)
    process, url = router(name, policy, replicas, extra(replicas))
    with process:
        before = [sum(r.metric(f"vllm:prefix_cache_{kind}_total") for r in replicas) for kind in ("hits", "queries")]
        for turn in range(6):
            for family in range(8):
                complete(url, conversation(family, turn))
        after = [sum(r.metric(f"vllm:prefix_cache_{kind}_total") for r in replicas) for kind in ("hits", "queries")]
    for replica in replicas:
        replica.__exit__()
    hits, queries = (now - then for now, then in zip(after, before))
    return hits / queries


class Index:
    """What a router knows from events alone: chains of blocks."""

    def __init__(self, replica: Replica):
        self.blocks, self.next, self.replica = {}, 0, replica

    def replay(self):
        """Asks for everything that was missed."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, PATIENCE * 1000)
            dealer.connect(self.replica.replay)
            dealer.send_multipart([b"", self.next.to_bytes(8, "big")])
            while True:
                empty, _topic, number, payload = dealer.recv_multipart()
                assert empty == b""
                if number == b"\xff" * 8:
                    return
                self.take(int.from_bytes(number, "big"), payload)

    def take(self, number: int, payload: bytes):
        assert number == self.next, f"batch {number} after {self.next - 1}"
        self.next += 1
        _time, events, _rank = msgpack.unpackb(payload)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
            for position, name in enumerate(event.get("block_hashes", ())):
                if event["type"] == "BlockRemoved":
                    del self.blocks[name]
                    continue
                size = event["block_size"]
                parent = event["block_hashes"][position - 1] if position else event["parent_block_hash"]
                self.blocks[parent, tuple(event["token_ids"][position * size : (position + 1) * size])] = name
                self.blocks[name] = None

    def num_found(self, prompt: list) -> int:
        parent, found = None, 0
        while found + BLOCK_SIZE < len(prompt):
            parent = self.blocks.get((parent, tuple(prompt[found : found + BLOCK_SIZE])))
            if parent is None:
                break
            found += BLOCK_SIZE
        return found


FAILURES = []


def check(what: str, good: bool):
    print(f"{'ok  ' if good else 'FAIL'}  {what}", flush=True)
    if not good:
        FAILURES.append(what)


def exact_events(program: str):
    """Each of nine prefixes, on one of three servers, is known from the events alone, also after a reconnect."""
    replicas = start(program, 3)
    indices = [Index(replica) for replica in replicas]
    prompts = [[(number * 17 + i * 5) % 200 + 20 for i in range(100)] for number in range(9)]
    for number, prompt in enumerate(prompts):
        complete(replicas[number % 3].url, prompt)
        if number == 4:
            # Whoever was away for the rest asks for that only.
            [index.replay() for index in indices]
    [index.replay() for index in indices]
    right = 0
    for number, prompt in enumerate(prompts):
        best = max(range(3), key=lambda place: indices[place].num_found(prompt))
        answer = complete(replicas[best].url, prompt)
        right += best == number % 3 and cached_tokens(answer) == indices[best].num_found(prompt) == 96
    check(f"events: {right} of 9 prefixes known to the token", right == 9)
    for replica in replicas:
        replica.__exit__()


def kill_one(program: str, name: str, policy: str):
    """Fifty chats while one of three servers is killed, and later comes back under its address."""
    replicas = start(program, 3)
    flags = ["--cb-failure-threshold", "2", "--cb-timeout-duration-secs", "1", "--health-check-interval-secs", "1"]
    process, url = router(name, policy, replicas, flags)
    with process:

        def chat(number: int) -> bool:
            if number == 20:
                replicas[0].child.send_signal(signal.SIGKILL)
            messages = [{"role": "user", "content": f"Story {number}"}]
            body = {"model": "demo", "messages": messages, "max_tokens": 8, "ignore_eos": True}
            try:
                return request(url + "/v1/chat/completions", body)["usage"]["completion_tokens"] == 8
            except (OSError, ValueError, KeyError):
                return False

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answered = sum(pool.map(chat, range(50)))
        check(f"{name}, {policy}: {answered} of 50 chats answered while a server was killed", answered >= 46)
        replicas[0].__exit__()
        replicas[0] = Replica(program, *replicas[0].ports).ready()

        def is_back():
            for number in range(6):
                complete(url, f"Hello number {number}")
            return replicas[0].metric("vllm:request_success_total") > 0

        wait_for(f"{name}, {policy}: the server that came back gets requests", is_back)
        check(f"{name}, {policy}: the server that came back gets requests", True)
    for replica in replicas:
        replica.__exit__()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--only", choices=["events", "rates", "kill"])
    args = parser.parse_args()
    if args.only in (None, "events"):
        exact_events(args.program)
    if args.only in (None, "rates"):
        rates = {}
        for name, policy in [("vllm-router", "round_robin"), ("vllm-router", "cache_aware"), ("smg", "cache_aware")]:
            rates[name, policy] = rate = hit_rate(args.program, name, policy)
            print(f"      {name}, {policy}: {100 * rate:.1f} % of prompt tokens were cached", flush=True)
        for name in ("vllm-router", "smg"):
            better = rates[name, "cache_aware"] > rates["vllm-router", "round_robin"]
            check(f"{name}: more is cached where prefixes are followed", better)
    if args.only in (None, "kill"):
        for name in ("vllm-router", "smg"):
            kill_one(args.program, name, "round_robin")
    sys.exit(1 if FAILURES else 0)


if __name__ == "__main__":
    main()
