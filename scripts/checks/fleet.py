#!/usr/bin/env python3
"""Three servers behind routers of other projects: what is found in caches, and what a killed server costs.

    python scripts/checks/fleet.py target/release/tinyvllm [--routers vllm-router smg sglang-router litellm]

Needs the packages vllm-router, pyzmq and msgpack, and those of the other routers, whose programs may also be elsewhere
in the path. Runs the built-in model on this machine; nothing else is asked. Prints a line for each check and ends with
1 if one fails.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import secrets
import shutil
import signal
import sys
import tempfile
import time

import harness
import msgpack
import zmq
from harness import TIMEOUT_SECONDS, Process, check, finish, free_port, wait_for

BLOCK_SIZE = 32
FLAGS = f"serve --threads 1 --max-model-len 512 --block-size {BLOCK_SIZE}"
# Only litellm needs one.
KEY = f"sk-{secrets.token_hex(32)}"


def request(url: str, body=None):
    return harness.request(url, body, KEY)


class Replica(Process):
    """A server with events of its prefix cache."""

    def __init__(self, program: str, port: int, events: int, replay: int):
        self.url, self.program = f"http://127.0.0.1:{port}", program
        self.ports = port, events, replay
        self.events, self.replay = f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
        config = {"enable_kv_cache_events": True, "endpoint": self.events, "replay_endpoint": self.replay}
        super().__init__([program, *FLAGS.split(), "--port", str(port), "--kv-events-config", json.dumps(config)])

    def ready(self):
        wait_for("a server is ready", lambda: request(self.url + "/v1/models"), self)
        return self

    def metric(self, name: str) -> float:
        lines = request(self.url + "/metrics").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@contextlib.contextmanager
def fleet(program: str):
    """Three servers."""
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(Replica(program, free_port(), free_port(), free_port())) for _ in range(3)]
        yield [replica.ready() for replica in replicas]


@contextlib.contextmanager
def router(name: str, policy: str, replicas: list, extra=()):
    """Where the router listens."""
    folder = pathlib.Path(sys.executable).parent
    program = shutil.which(name, path=f"{folder}:{os.environ['PATH']}")
    if program is None:
        raise SystemExit(f"FAIL  {name} is neither next to this Python nor in the path")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    launch = [] if name in ("vllm-router", "litellm") else ["launch"]
    command = [program, *launch, "--host", "127.0.0.1", "--port", str(port)]
    urls = [replica.url for replica in replicas]
    with tempfile.TemporaryDirectory() as scratch:
        if name == "litellm":
            config = pathlib.Path(scratch) / "config.yaml"
            # What is JSON is YAML.
            config.write_text(json.dumps(litellm_config(urls)))
            command += ["--config", str(config)]
        else:
            ports = ["--prometheus-port", str(free_port())]
            command += [*ports, "--policy", policy, "--worker-urls", *urls, *extra]
        with Process(command, {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}) as process:
            wait_for(f"{name} is ready", lambda: complete(url, "Hello"), process)
            yield url


def litellm_config(urls: list) -> dict:
    """The same name for all servers; one that failed is left alone for two seconds."""
    places = [{"model": "hosted_vllm/demo", "api_base": f"{url}/v1", "api_key": "none"} for url in urls]
    models = [{"model_name": "demo", "litellm_params": place} for place in places]
    settings = {"num_retries": 3, "allowed_fails": 1, "cooldown_time": 2}
    return {"model_list": models, "router_settings": settings}


def event_flags(replicas: list) -> list:
    """Where vllm-router's policy kv_aware finds the events."""
    flags = ["--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", "demo"]
    for replica in replicas:
        flags += ["--kv-event-source", f"{replica.url}={replica.events}"]
        flags += ["--kv-event-replay-source", f"{replica.url}={replica.replay}"]
    return flags


def complete(url: str, prompt, max_tokens=1):
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return request(url + "/v1/completions", body)


def cached_tokens(answer) -> int:
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def conversation(family: int, turn: int) -> str:
    """The text of a growing conversation: every turn has all of the earlier ones as its prefix."""
    lines = [f"Story {family * 7919} part {part}: the fox number {family * 31 + part} went home. " for part in range(turn + 1)]
    return "".join(lines)


def hit_rate(program: str, name: str, policy: str) -> float:
    """The share of prompt tokens that caches had, for eight conversations of six turns each, in turns."""
    with fleet(program) as replicas:
        extra = event_flags(replicas) if policy == "kv_aware" else ()

        def totals() -> list:
            names = [f"vllm:prefix_cache_{kind}_total" for kind in ("hits", "queries")]
            return [sum(replica.metric(name) for replica in replicas) for name in names]

        with router(name, policy, replicas, extra) as url:
            before = totals()
            for turn in range(6):
                for family in range(8):
                    complete(url, conversation(family, turn))
            hits, queries = (now - then for now, then in zip(totals(), before))
    return hits / queries


class Index:
    """What a router knows from events alone: chains of blocks."""

    def __init__(self, replica: Replica):
        self.blocks, self.next, self.replica = {}, 0, replica

    def follow(self):
        """Until everything that the server has reported is known."""
        total = self.replica.metric("tinyvllm_kv_event_batches_total")
        wait_for(f"{total} batches are known", lambda: self.replay() or self.next >= total)

    def replay(self):
        """Asks for everything that was missed."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, TIMEOUT_SECONDS * 1000)
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


def token_ids(number: int) -> list:
    """A prompt of 100 tokens that begins as no other one does."""
    return [20 + number // 200, 20 + number % 200, *((number * 17 + i * 5) % 200 + 20 for i in range(98))]


PROMPTS = [token_ids(number) for number in range(9)]


def exact_events(program: str):
    """Each of nine prefixes, on one of three servers, is known from the events alone, also after a reconnect."""
    with fleet(program) as replicas:
        indices = [Index(replica) for replica in replicas]
        for number, prompt in enumerate(PROMPTS):
            complete(replicas[number % 3].url, prompt)
            if number == 4:
                # A client that missed the rest requests only that.
                [index.follow() for index in indices]
        [index.follow() for index in indices]
        right = 0
        for number, prompt in enumerate(PROMPTS):
            best = max(range(3), key=lambda place: indices[place].num_found(prompt))
            answer = complete(replicas[best].url, prompt)
            right += best == number % 3 and cached_tokens(answer) == indices[best].num_found(prompt) == 96
        check(f"events: {right} of 9 prefixes known to the token", right == 9)


def routed_by_events(name: str, url: str, replicas: list):
    """A router that has seen none of nine prompts sends each to the server that has its prefix."""
    for number, prompt in enumerate(PROMPTS):
        complete(replicas[number % 3].url, prompt)
    # The router hears of events some time after the answers. Who finds the latest ones knows the earlier ones.
    fresh = iter(range(100, 10_000))

    def is_up_to_date() -> bool:
        markers = [token_ids(next(fresh)) for _ in replicas * 2]
        for number, marker in enumerate(markers):
            complete(replicas[number % 3].url, marker)
        time.sleep(0.2)
        return all(cached_tokens(complete(url, marker)) == 96 for marker in markers)

    wait_for(f"{name} knows what was reported last", is_up_to_date)
    right = sum(cached_tokens(complete(url, prompt)) == 96 for prompt in PROMPTS)
    check(f"{name}: {right} of 9 prefixes found at the first request", right == 9)


def kill_one(program: str, name: str):
    """Streams, then fifty chats while one of three servers is killed, which later comes back under its address."""
    quick = ["--cb-failure-threshold", "2", "--cb-timeout-duration-secs", "1", "--health-check-interval-secs", "1"]
    with fleet(program) as replicas, router(name, "round_robin", replicas, quick) as url:
        body = {"model": "demo", "max_tokens": 8, "ignore_eos": True, "temperature": 0}

        def chat(number: int, **fields):
            messages = [{"role": "user", "content": f"Story {number}"}]
            return request(url + "/v1/chat/completions", body | fields | {"messages": messages})

        def survives(number: int) -> bool:
            if number == 20:
                replicas[0].child.send_signal(signal.SIGKILL)
            try:
                return chat(number)["usage"]["completion_tokens"] == 8
            except (OSError, ValueError, KeyError):
                return False

        num_same = 0
        for number in range(6):
            lines = [line[6:] for line in chat(number, stream=True).splitlines() if line.startswith("data: ")]
            choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
            num_same += lines[-1] == "[DONE]" and text == chat(number)["choices"][0]["message"]["content"]
        check(f"{name}: {num_same} of 6 streams are whole", num_same == 6)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answered = sum(pool.map(survives, range(50)))
        check(f"{name}: {answered} of 50 chats answered while a server was killed", answered >= 48)
        replicas[0].child.wait()
        with Replica(program, *replicas[0].ports).ready() as returned:

            def is_back() -> bool:
                for number in range(6):
                    complete(url, f"Hello number {number}")
                return returned.metric("vllm:request_success_total") > 0

            wait_for(f"{name}: the server that came back gets requests", is_back)
            check(f"{name}: the server that came back gets requests", True)


def rates(program: str, names: list):
    """What is found in caches, by policy."""
    by_turns = hit_rate(program, "vllm-router", "round_robin")
    print(f"      by turns: {100 * by_turns:.1f} % of prompt tokens were cached", flush=True)
    pairs = [(name, "cache_aware") for name in names if name != "litellm"] + [("vllm-router", "kv_aware")]
    for name, policy in pairs:
        rate = hit_rate(program, name, policy)
        check(f"{name}, {policy}: {100 * rate:.1f} % of prompt tokens were cached", rate > 2 * by_turns)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--routers", nargs="+", default=["vllm-router", "smg"])
    args = parser.parse_args()
    program = str(pathlib.Path(args.program).resolve())
    exact_events(program)
    with fleet(program) as replicas, router("vllm-router", "kv_aware", replicas, event_flags(replicas)) as url:
        routed_by_events("vllm-router, kv_aware", url, replicas)
    rates(program, args.routers)
    for name in args.routers:
        kill_one(program, name)
    finish("the fleet")


if __name__ == "__main__":
    main()
