"""What the checks share: requests, programs that end with this one, and what becomes of a check. Needs no package."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

# Seconds for anything that is waited for.
TIMEOUT_SECONDS = 60
FAILURES = []
# From below those that systems hand out as ephemeral ports: they stay free until a process binds them.
PORTS = iter(random.sample(range(15_000, 30_000), 10_000))


def free_port() -> int:
    for port in PORTS:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise SystemExit("FAIL  no port is free")


def request(url: str, body=None, key: str = "none"):
    """What the server answers: a value if it is JSON, else a text."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=TIMEOUT_SECONDS) as answer:
        return json.load(answer) if "json" in answer.headers.get("content-type", "") else answer.read().decode()


def wait_for(what: str, condition, process=None):
    """Until the condition gives something; a process that ends first ends the script."""
    start = time.monotonic()
    while time.monotonic() - start < TIMEOUT_SECONDS:
        if process and process.child.poll() is not None:
            raise SystemExit(f"FAIL  {what}: the program ended\n{process.said()}")
        try:
            if result := condition():
                return result
        except (OSError, ValueError):
            pass
        time.sleep(0.1)
    said = f"\n{process.said()}" if process else ""
    raise SystemExit(f"FAIL  {what} within {TIMEOUT_SECONDS} s{said}")


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


def check(what: str, good: bool):
    """A line of the report."""
    print(f"{'ok  ' if good else 'FAIL'}  {what}", flush=True)
    if not good:
        FAILURES.append(what)


def finish(name: str):
    """The last line, and the exit status."""
    print(f"{len(FAILURES)} failed" if FAILURES else f"ok: {name}")
    sys.exit(1 if FAILURES else 0)


def expect(error, call):
    """The call must raise exactly this."""
    try:
        call()
    except error as found:
        return found
    raise AssertionError(f"no {error.__name__}")
