#!/usr/bin/env python3
"""Makes a server a worker of NVIDIA Dynamo: tokens in, tokens out, and the events of its prefix cache.

    tinyvllm serve MODEL --port 8001 --kv-events-config '{"enable_kv_cache_events": true}'
    python dynamo_worker.py http://127.0.0.1:8001 --model-path MODEL --discovery-backend file

MODEL is a folder, for Dynamo reads the tokenizer and the chat template itself. Needs the package ai-dynamo. The key, if
the server has any, is in TINYVLLM_API_KEY. Ends when the server is gone, so that Dynamo sends nothing there.
"""

import argparse
import asyncio
import json
import logging
import os
import signal

import aiohttp
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.run import run
from dynamo.llm.exceptions import Disconnected, InvalidArgument

# Checks in a row, one a second, that a server may miss.
MAX_MISSED = 5
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"
)  # fmt: skip
STOPPING = ("max_tokens", "min_tokens", "ignore_eos")


class Server(LLMEngine):
    def __init__(self, url: str, folder: str, name: str | None):
        self.url, self.folder, self.name = url.rstrip("/"), folder, name
        self.session = self.watch = None
        self.answers = {}

    @classmethod
    async def from_args(cls, argv=None):
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("url")
        parser.add_argument("--model-path", required=True)
        parser.add_argument("--served-model-name")
        parser.add_argument("--namespace", default=os.environ.get("DYN_NAMESPACE", "dynamo"))
        parser.add_argument("--discovery-backend", default=os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"))
        parser.add_argument("--request-plane", default=os.environ.get("DYN_REQUEST_PLANE", "tcp"))
        parser.add_argument("--event-plane", default=os.environ.get("DYN_EVENT_PLANE"))
        args = parser.parse_args(argv)
        config = WorkerConfig(
            namespace=args.namespace,
            component="tinyvllm",
            model_name=args.model_path,
            served_model_name=args.served_model_name,
            discovery_backend=args.discovery_backend,
            request_plane=args.request_plane,
            event_plane=args.event_plane,
        )
        return cls(args.url, args.model_path, args.served_model_name), config

    async def get(self, path: str):
        async with self.session.get(self.url + path) as answer:
            answer.raise_for_status()
            return await (answer.json() if answer.content_type == "application/json" else answer.text())

    async def start(self, worker_id: int) -> EngineConfig:
        del worker_id
        key = os.environ.get("TINYVLLM_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # An answer takes as long as it takes, and repeats the tokens of the prompt in its first line.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        self.session = aiohttp.ClientSession(headers=headers, timeout=timeout, read_bufsize=16 << 20)
        while True:
            try:
                model = (await self.get("/v1/models"))["data"][0]
                break
            except aiohttp.ClientError as error:
                logging.info("waiting for %s: %s", self.url, error)
                await asyncio.sleep(1)
        self.model = model["id"]
        cache = next(line for line in (await self.get("/metrics")).splitlines() if "cache_config_info{" in line)
        labels = dict(label.split("=") for label in cache[cache.index("{") + 1 : cache.index("}")].split(","))
        self.watch = asyncio.create_task(self.end_with_server())
        return EngineConfig(
            model=self.folder,
            served_model_name=self.name or self.model,
            llm=LlmRegistration(
                context_length=model["max_model_len"],
                kv_cache_block_size=int(labels["block_size"].strip('"')),
                total_kv_blocks=int(labels["num_gpu_blocks"].strip('"')),
            ),
        )

    async def end_with_server(self):
        missed = 0
        while missed < MAX_MISSED:
            await asyncio.sleep(1)
            try:
                await asyncio.wait_for(self.get("/health"), 5)
                missed = 0
            except (aiohttp.ClientError, asyncio.TimeoutError):
                missed += 1
        logging.error("%s is gone", self.url)
        signal.raise_signal(signal.SIGTERM)

    async def kv_event_sources(self) -> list:
        return [ZmqSource(source["endpoint"], source["topic"]) for source in await self.get("/kv_event_sources")]

    async def health_check_payload(self) -> dict:
        return build_health_check_payload(bos_token_id=0)

    async def generate(self, request, context):
        sampling, stopping, output = (
            request.get(name) or {} for name in ("sampling_options", "stop_conditions", "output_options")
        )
        wanted = {
            "logprobs": output.get("logprobs"),
            "prompt_logprobs": output.get("prompt_logprobs"),
            "guided_decoding": sampling.get("guided_decoding"),
            "n": None if sampling.get("n") == 1 else sampling.get("n"),
        }
        if refused := [name for name, value in wanted.items() if value is not None]:
            raise InvalidArgument(f"{', '.join(refused)}: not by way of Dynamo; ask the server itself")
        body = {
            "model": self.model,
            "prompt": request["token_ids"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            # Dynamo makes the text, with all tokens, and looks for stop strings in it.
            "skip_special_tokens": False,
            "stop_token_ids": stopping.get("stop_token_ids_hidden") or [],
            **{name: sampling[name] for name in SAMPLING if sampling.get(name) is not None},
            **{name: stopping[name] for name in STOPPING if stopping.get(name) is not None},
        }
        try:
            async for chunk in self.chunks(body, context):
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            # Dynamo then asks another worker to go on.
            raise Disconnected(f"{self.url}: {error}") from error

    async def chunks(self, body: dict, context):
        finish, usage = "cancelled", None
        async with self.session.post(self.url + "/v1/completions", json=body) as answer:
            if answer.status == 400:
                raise InvalidArgument((await answer.json())["error"]["message"])
            answer.raise_for_status()
            self.answers[context.id()] = answer
            try:
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise Disconnected(chunk["error"]["message"])
                    usage = chunk.get("usage") or usage
                    for choice in chunk["choices"]:
                        finish = choice["finish_reason"] or finish
                        if choice.get("token_ids"):
                            yield {"token_ids": choice["token_ids"], "index": 0}
            except aiohttp.ClientError:
                # `abort` closed it; else the server did.
                if not context.is_stopped():
                    raise
            finally:
                self.answers.pop(context.id(), None)
        last = {"token_ids": [], "index": 0, "finish_reason": finish}
        yield last | ({"completion_usage": usage} if usage else {})

    async def abort(self, context):
        # The server aborts a request that no client reads.
        if answer := self.answers.get(context.id()):
            answer.close()

    async def cleanup(self):
        if self.watch:
            self.watch.cancel()
        if self.session:
            await self.session.close()


if __name__ == "__main__":
    run(Server)
