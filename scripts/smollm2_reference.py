#!/usr/bin/env python3
"""What SmolLM2-135M-Instruct must answer, computed without this engine: makes tests/fixtures/smollm2/expected.json.

    python scripts/smollm2_reference.py SmolLM2-135M-Instruct.Q4_1.gguf tests/fixtures/smollm2

The weights of the file are taken as they decode, and the forward pass is a few lines of numpy in double precision. It
writes, for some prompts, the tokens of the prompt and the 200 most likely ones that follow it, one after the other, with
the smallest distance that the most likely logit ever has from the next one; and for the text in text.txt, cut into
pieces, the sum of the negative log-probabilities of all tokens but the first one of each piece, with their number.

Versions that made the file in the repository: Python 3.11, gguf 0.19.0, numpy 2.4.6, tokenizers 0.23.3.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NUM_TOKENS = 200
# Tokens of a chunk of the text.
PIECE_LEN = 512
CHAT = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "The main difference between TCP and UDP is that",
    "In 1969, Apollo 11 landed on the Moon. The crew consisted of",
    "List of ingredients for a simple tomato soup:\n1.",
    "SELECT name, age FROM users WHERE",
    "Dear Professor Smith,\n\nI am writing to",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    CHAT
    + "<|im_start|>user\nExplain what a database index is, with an example.<|im_end|>\n<|im_start|>assistant\n",
]


class Model:
    """A Llama in double precision. Rotary pairs are neighbours, as GGUF files of this architecture have them."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.fields = {key: field.contents() for key, field in reader.fields.items()}
        self.weights = {
            tensor.name: dequantize(tensor.data, tensor.tensor_type)
            .astype(np.float64)
            .reshape([int(size) for size in reversed(tensor.shape)])
            for tensor in reader.tensors
        }
        key = lambda name: self.fields[f"llama.{name}"]
        self.num_layers = key("block_count")
        self.num_heads = key("attention.head_count")
        self.num_kv_heads = key("attention.head_count_kv")
        self.epsilon = key("attention.layer_norm_rms_epsilon")
        self.head_dim = key("embedding_length") // self.num_heads
        self.theta = key("rope.freq_base")

    def tokenizer(self):
        tokens = self.fields["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in self.fields["tokenizer.ggml.merges"]]
        model = models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges)
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        control = gguf.TokenType.CONTROL
        types = self.fields["tokenizer.ggml.token_type"]
        special = [token for token, kind in zip(tokens, types) if kind == control]
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        return tokenizer

    def norm(self, x, name):
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon)
        return x / scale * self.weights[name]

    def rotate(self, x, start):
        """Of x [rows, heads, head_dim], where row 0 is at position `start`."""
        frequencies = self.theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = np.outer(np.arange(start, start + len(x)), frequencies)[:, None]
        cos, sin = np.cos(angles), np.sin(angles)
        even, odd = x[..., ::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    def forward(self, ids, cache):
        """The logits of all tokens after those that are in the cache, a list of keys and values by layer."""
        x = self.weights["token_embd.weight"][ids]
        rows = len(ids)
        for layer in range(self.num_layers):
            weight = lambda name: self.weights[f"blk.{layer}.{name}.weight"]
            project = lambda x, name, heads: (x @ weight(name).T).reshape(rows, heads, self.head_dim)
            keys, values = cache[layer]
            start = len(keys)
            h = self.norm(x, f"blk.{layer}.attn_norm.weight")
            q = self.rotate(project(h, "attn_q", self.num_heads), start)
            keys = np.concatenate([keys, self.rotate(project(h, "attn_k", self.num_kv_heads), start)])
            values = np.concatenate([values, project(h, "attn_v", self.num_kv_heads)])
            cache[layer] = (keys, values)
            shared = self.num_heads // self.num_kv_heads
            k, v = (np.repeat(part, shared, axis=1).transpose(1, 0, 2) for part in (keys, values))
            scores = q.transpose(1, 0, 2) @ k.transpose(0, 2, 1) / np.sqrt(self.head_dim)
            later = np.arange(len(keys))[None] > np.arange(start, start + rows)[:, None]
            scores = np.where(later[None], -np.inf, scores)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            attended = scores / scores.sum(-1, keepdims=True) @ v
            x = x + attended.transpose(1, 0, 2).reshape(rows, -1) @ weight("attn_output").T
            h = self.norm(x, f"blk.{layer}.ffn_norm.weight")
            gate = h @ weight("ffn_gate").T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ weight("ffn_up").T)) @ weight("ffn_down").T
        return self.norm(x, "output_norm.weight") @ self.weights["token_embd.weight"].T

    def new_cache(self):
        empty = np.zeros((0, self.num_kv_heads, self.head_dim))
        return [(empty, empty) for _ in range(self.num_layers)]

    def greedy(self, prompt_ids):
        """The most likely tokens, and the smallest distance of a most likely logit from the next one."""
        cache, ids, new, margin = self.new_cache(), [], prompt_ids, np.inf
        for _ in range(NUM_TOKENS):
            logits = self.forward(new, cache)[-1]
            second, first = np.sort(logits)[-2:]
            margin = min(margin, first - second)
            new = [int(logits.argmax())]
            ids += new
        return ids, float(margin)

    def negative_log_probabilities(self, ids):
        logits = self.forward(ids, self.new_cache())[:-1]
        logits -= logits.max(-1, keepdims=True)
        sums = np.log(np.exp(logits).sum(-1))
        return sums - logits[np.arange(len(logits)), ids[1:]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path, help="where text.txt is, and expected.json will be")
    args = parser.parse_args()
    model = Model(args.model)
    tokenizer = model.tokenizer()

    text = tokenizer.encode((args.folder / "text.txt").read_text()).ids
    pieces = [text[at : at + PIECE_LEN] for at in range(0, len(text), PIECE_LEN)]
    losses = [model.negative_log_probabilities(piece) for piece in pieces]
    mean = np.concatenate(losses).mean()
    print(f"{len(text)} tokens in {len(pieces)} chunks, perplexity {np.exp(mean):.6f}", flush=True)

    greedy = []
    for prompt in PROMPTS:
        prompt_ids = tokenizer.encode(prompt).ids
        ids, margin = model.greedy(prompt_ids)
        greedy.append({"prompt": prompt, "prompt_ids": prompt_ids, "ids": ids, "margin": round(margin, 6)})
        print(f"{margin:.6f} {tokenizer.decode(ids)[:60]!r}", flush=True)
    expected = {
        "perplexity": {
            "piece_len": PIECE_LEN,
            "num_tokens": len(text),
            "losses": [[float(piece.sum()), len(piece)] for piece in losses],
        },
        "greedy": greedy,
    }
    lines = ",\n".join(json.dumps(entry) for entry in greedy)
    text = f'{{"perplexity": {json.dumps(expected["perplexity"])},\n"greedy": [\n{lines}\n]}}\n'
    assert json.loads(text) == expected
    (args.folder / "expected.json").write_text(text)


if __name__ == "__main__":
    main()
