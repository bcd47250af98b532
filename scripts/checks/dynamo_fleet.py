#!/usr/bin/env python3
"""Three servers behind NVIDIA Dynamo, by way of scripts/deploy/dynamo_worker.py.

    python scripts/checks/dynamo_fleet.py target/release/tinyvllm

Needs the packages ai-dynamo, pyzmq and msgpack. Runs the built-in model on this machine; nothing else is asked. Prints
a line for each check and ends with 1 if one fails.
"""

import concurrent.futures
import contextlib
import json
import pathlib
import struct
import sys
import tempfile
import urllib.error
import urllib.request

from fleet import complete, fleet, request, routed_by_events
from harness import Process, check, finish, free_port, wait_for

ROOT = pathlib.Path(__file__).parents[2]
SCALARS = {4: "I", 5: "i", 6: "f", 7: "?", 10: "Q"}
# How tokenizers of the kind "llama-bpe" cut text into words.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def metadata(path: pathlib.Path) -> dict:
    """What a GGUF file says of its model."""
    data, at = path.read_bytes(), 0

    def take(form: str) -> tuple:
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values

    def string() -> str:
        return take(f"{take('Q')[0]}s")[0].decode()

    def value(kind: int):
        if kind == 9:
            kind, length = take("IQ")
            return [value(kind) for _ in range(length)]
        return string() if kind == 8 else take(SCALARS[kind])[0]

    _magic, _version, _num_tensors, num_values = take("4sIQQ")
    return {string(): value(take("I")[0]) for _ in range(num_values)}


def write_tokenizer(folder: pathlib.Path):
    """The built-in model's tokenizer and template as other programs read them."""
    meta = metadata(ROOT / "src/demo/model.gguf")
    tokens, bos, eos = (meta[f"tokenizer.ggml.{name}"] for name in ("tokens", "bos_token_id", "eos_token_id"))
    special = [
        {"id": id, "content": tokens[id], "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for id, kind in enumerate(meta["tokenizer.ggml.token_type"])
        if kind == 3
    ]
    words = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    first, text = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    files = {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": special,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, byte_level]},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [first, text],
                "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}},
            },
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "ignore_merges": True,
                "vocab": {token: id for id, token in enumerate(tokens)},
                "merges": meta["tokenizer.ggml.merges"],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "chat_template": meta["tokenizer.chat_template"],
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "bos_token_id": bos,
            "eos_token_id": eos,
            "vocab_size": len(tokens),
            "max_position_embeddings": meta["llama.context_length"],
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


@contextlib.contextmanager
def dynamo(replicas: list):
    """Where Dynamo's frontend listens, and the workers. They are found by files, and events go by ZeroMQ: nothing else
    is needed."""
    with contextlib.ExitStack() as stack:
        scratch = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, found = scratch / "model", scratch / "found"
        [folder.mkdir() for folder in (model, found)]
        write_tokenizer(model)
        env = {"DYN_FILE_KV": str(found), "HF_HUB_OFFLINE": "1", "HOME": str(scratch)}
        planes = ["--discovery-backend", "file", "--event-plane", "zmq"]
        workers = []
        for replica in replicas:
            worker = [ROOT / "scripts/deploy/dynamo_worker.py", replica.url, "--model-path", model]
            workers.append(stack.enter_context(Process([sys.executable, *map(str, worker), *planes], env)))
        port = free_port()
        router = ["--router-mode", "kv", "--migration-limit", "3", "--router-min-initial-workers", "3"]
        place = ["--http-host", "127.0.0.1", "--http-port", str(port)]
        frontend = Process([sys.executable, "-m", "dynamo.frontend", *place, *planes, *router], env)
        stack.enter_context(frontend)
        url = f"http://127.0.0.1:{port}"
        wait_for("Dynamo is ready", lambda: complete(url, "Hello"), frontend)
        yield url, workers


def main():
    program = str(pathlib.Path(sys.argv[1]).resolve())
    with fleet(program) as replicas, dynamo(replicas) as (url, workers):
        body = {"model": "demo", "max_tokens": 8, "ignore_eos": True, "temperature": 0}

        def chat(url: str, number: int, **fields):
            messages = [{"role": "user", "content": f"Story {number}"}]
            return request(url + "/v1/chat/completions", body | fields | {"messages": messages})

        def text(answer) -> str:
            return answer["choices"][0]["message"]["content"]

        num_same = 0
        for number in range(6):
            lines = [line[6:] for line in chat(url, number, stream=True).splitlines() if line.startswith("data: {")]
            choices = [choice for line in lines for choice in json.loads(line)["choices"]]
            streamed = "".join(choice["delta"].get("content") or "" for choice in choices)
            num_same += streamed == text(chat(url, number)) == text(chat(replicas[0].url, number))
        check(f"dynamo: {num_same} of 6 chats, streamed and whole, are the server's own", num_same == 6)

        routed_by_events("dynamo", url, replicas)

        long = body | {"stream": True, "max_tokens": 450, "messages": [{"role": "user", "content": "Hello"}]}
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(url + "/v1/chat/completions", json.dumps(long).encode(), headers)
        with urllib.request.urlopen(asked) as answer:
            answer.read(200)
        wait_for("a client that disconnects is aborted", lambda: not sum(one.metric("vllm:num_requests_running") for one in replicas))
        tokens = sum(replica.metric("vllm:generation_tokens_total") for replica in replicas)
        check(f"dynamo: a client that disconnects is aborted ({tokens:.0f} tokens so far)", tokens < 450)

        try:
            chat(url, 0, logprobs=True)
            refused = False
        except urllib.error.HTTPError as error:
            refused = error.code == 400 and "logprobs" in error.read().decode()
        check("dynamo: what does not come through is refused by name", refused)

        def survives(number: int) -> bool:
            if number == 20:
                replicas[0].child.kill()
            try:
                return chat(url, number)["usage"]["completion_tokens"] == 8
            except (OSError, ValueError, KeyError):
                return False

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answered = sum(pool.map(survives, range(50)))
        check(f"dynamo: {answered} of 50 chats answered while a server was killed", answered >= 48)
        wait_for("the worker of the killed server ends", lambda: workers[0].child.poll() is not None)
        check("dynamo: the worker of the killed server ends", workers[1].child.poll() is None)
    finish("dynamo")


if __name__ == "__main__":
    main()
