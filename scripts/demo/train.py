#!/usr/bin/env python3
"""Trains the demo model that is built into tinyvllm and writes it as one GGUF file.

Everything the model learns comes from `corpus.py` and `chat.py`: the script makes the text, trains the
tokenizer on it, trains a small Llama-architecture model, quantises it and writes the file. It needs only NumPy and
PyTorch. The same seed gives the same corpus and tokenizer everywhere, and the same weights on the same hardware with
the same package versions.

    python3 scripts/demo/train.py --device cuda --out OUT_DIR      # from nothing: a few minutes on one H200
    python3 scripts/demo/train.py --device cpu --init src/demo/model.gguf --out OUT_DIR …      # from that file on
    python3 scripts/demo/train.py --smoke --out OUT_DIR            # the whole path on a CPU, in under a minute
"""

import argparse
import dataclasses
import heapq
import json
import math
import multiprocessing
import os
import random
import re
import sys
import time
from collections import Counter, defaultdict

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed workspace
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import chat
from chat import ASSISTANT, BOS, END, EOS, SPECIAL_TOKENS, USER
from write_gguf import GgufReader, write_gguf

SAMPLE_STORIES = [
    "Once upon a time, in a small village by the sea,",
    "Once upon a time",
    "In a deep green forest, there lived a curious fox named",
    "The dog",
    "The capital of France is",
]
SAMPLE_OPENINGS = [
    "Once upon a time",
    "Once upon a time, there was a little dragon named Smok",
    "It was a dark and stormy night",
]
SAMPLE_QUESTIONS = [
    "What is tinyvllm?",
    "What is a KV cache?",
    "What is paged attention?",
    "Who are you?",
    "Are you a big model?",
    "How do I load another model?",
    "How do I stop an answer?",
    "What is 3 + 4?",
    "Tell me a story about a rabbit.",
    "What is quantum physics?",
]


@dataclasses.dataclass
class Config:
    """Shape of the model. Row widths are multiples of 256, so that every GGUF block format fits."""

    vocab: int = 2048
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 768
    context: int = 1024
    rope_base: float = 10000.0
    eps: float = 1e-5


# --------------------------------------------------------------------------------------------------------------
# Tokenizer: byte-level BPE with the pre-tokenizer that GGUF calls "llama-bpe"
# --------------------------------------------------------------------------------------------------------------

# The llama-bpe expression for ASCII text, which is all that the corpus has; Python's `re` lacks \p{L} and \p{N}.
PRETOKENS = re.compile(
    r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}"
    r"| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = re.compile("(" + "|".join(re.escape(s) for s in SPECIAL_TOKENS) + ")")


def byte_characters():
    """GPT-2's printable stand-in for each byte, the form in which GGUF stores byte-level tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {b: chr(b) for b in printable}, 0
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + extra)
            extra += 1
    return table


BYTE_CHARS = byte_characters()


def to_chars(piece):
    return "".join(BYTE_CHARS[b] for b in piece.encode("utf-8"))


class Tokenizer:
    """Special tokens, then the 256 bytes, then one token per merge."""

    def __init__(self, merges):
        self.merges = merges
        self.tokens = SPECIAL_TOKENS + [BYTE_CHARS[b] for b in range(256)] + [a + b for a, b in merges]
        self.ids = {t: i for i, t in enumerate(self.tokens)}
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.cache = {}

    @classmethod
    def train(cls, documents, vocab):
        counts = Counter()
        for text in documents:
            for part in SPECIALS.split(text):
                if part not in SPECIAL_TOKENS:
                    counts.update(PRETOKENS.findall(part))
        words = [(list(to_chars(w)), n) for w, n in sorted(counts.items())]
        pairs, where = Counter(), defaultdict(set)
        for index, (symbols, n) in enumerate(words):
            for pair in zip(symbols, symbols[1:]):
                pairs[pair] += n
                where[pair].add(index)
        heap = [(-n, pair) for pair, n in pairs.items()]
        heapq.heapify(heap)
        merges, known = [], set(SPECIAL_TOKENS) | set(BYTE_CHARS.values())
        while heap and len(merges) < vocab - len(SPECIAL_TOKENS) - 256:
            count, best = heapq.heappop(heap)
            if pairs[best] != -count:  # an outdated entry; the current count is in the heap as well
                continue
            if count == 0 or best[0] + best[1] in known:
                pairs[best] = 0
                continue
            known.add(best[0] + best[1])
            merges.append(best)
            changed = set()
            for index in where.pop(best):
                symbols, n = words[index]
                for pair in zip(symbols, symbols[1:]):
                    pairs[pair] -= n
                    changed.add(pair)
                symbols[:] = merge_pair(symbols, best)
                for pair in zip(symbols, symbols[1:]):
                    pairs[pair] += n
                    where[pair].add(index)
                    changed.add(pair)
            for pair in changed:
                if pairs[pair] > 0:
                    heapq.heappush(heap, (-pairs[pair], pair))
        return cls(merges)

    def encode_piece(self, piece):
        chars = to_chars(piece)
        if chars in self.ids:  # llama-bpe takes a pre-token that is a token as a whole ("ignore_merges")
            return [self.ids[chars]]
        symbols = list(chars)
        while len(symbols) > 1:
            best = min(zip(symbols, symbols[1:]), key=lambda pair: self.ranks.get(pair, math.inf))
            if best not in self.ranks:
                break
            symbols = merge_pair(symbols, best)
        return [self.ids[s] for s in symbols]

    def encode(self, text):
        ids = []
        for part in SPECIALS.split(text):
            if part in SPECIAL_TOKENS:
                ids.append(self.ids[part])
                continue
            for piece in PRETOKENS.findall(part):
                known = self.cache.get(piece)
                if known is None:
                    known = self.cache[piece] = self.encode_piece(piece)
                ids += known
        return ids

    def decode(self, ids):
        back = {c: b for b, c in BYTE_CHARS.items()}
        parts = [self.tokens[i] for i in ids]
        data = b"".join(p.encode() if p in SPECIAL_TOKENS else bytes(back[c] for c in p) for p in parts)
        return data.decode("utf-8", errors="replace")


def merge_pair(symbols, pair):
    out, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and symbols[i] == pair[0] and symbols[i + 1] == pair[1]:
            out.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out


# --------------------------------------------------------------------------------------------------------------
# Corpus: shards of documents, made and tokenized in parallel
# --------------------------------------------------------------------------------------------------------------

SHARD_DOCUMENTS = 2000
VALIDATION_SHARD = 1_000_000  # shards from here on are never trained on


def shard_documents(seed, shard, count, openings=0.0):
    rng = random.Random(seed * 10_000_019 + shard)
    return [chat.document(rng, openings) for _ in range(count)]


def encode_shard(job):
    tokenizer, seed, shard, count, openings = job
    ids = []
    for text in shard_documents(seed, shard, count, openings):
        ids += tokenizer.encode(text)
    return np.array(ids, dtype=np.uint16)


def make_corpus(tokenizer, seed, shards, first, count, processes, openings=0.0):
    jobs = [(tokenizer, seed, first + i, count, openings) for i in range(shards)]
    if processes == 1:
        return np.concatenate([encode_shard(job) for job in jobs])
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return np.concatenate(list(pool.imap(encode_shard, jobs)))


class Windows:
    """Draws training windows that begin where a document begins, as a prompt does."""

    def __init__(self, ids, length, bos, device):
        self.ids = torch.from_numpy(ids.astype(np.int32)).to(device)
        starts = np.flatnonzero(ids == bos)
        self.starts = torch.from_numpy(starts[starts < len(ids) - length - 1])
        self.length = length
        self.offsets = torch.arange(length + 1, device=device)

    def batch(self, rows):
        """Inputs and targets for a vector of document numbers."""
        begin = self.starts[rows].to(self.ids.device)
        window = self.ids[begin[:, None] + self.offsets].long()
        return window[:, :-1], window[:, 1:]


# --------------------------------------------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.attn_norm = nn.RMSNorm(c.hidden, eps=c.eps)
        self.attn_q = nn.Linear(c.hidden, c.heads * c.head_dim, bias=False)
        self.attn_k = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.attn_v = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.attn_output = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(c.hidden, eps=c.eps)
        self.ffn_gate = nn.Linear(c.hidden, c.ffn, bias=False)
        self.ffn_up = nn.Linear(c.hidden, c.ffn, bias=False)
        self.ffn_down = nn.Linear(c.ffn, c.hidden, bias=False)

    def forward(self, x, cos, sin, past=None):
        """`past` is the list of keys and values of earlier tokens, which grows; None where all tokens are in `x`."""
        c, (batch, length, _) = self.c, x.shape
        h = self.attn_norm(x)
        q = rotate(self.attn_q(h).view(batch, length, c.heads, c.head_dim), cos, sin)
        k = rotate(self.attn_k(h).view(batch, length, c.kv_heads, c.head_dim), cos, sin)
        v = self.attn_v(h).view(batch, length, c.kv_heads, c.head_dim)
        if past is not None:
            past.append((k, v))
            k, v = (torch.cat(parts, dim=1) for parts in zip(*past))
        group = c.heads // c.kv_heads
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        a = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=length > 1)
        x = x + self.attn_output(a.transpose(1, 2).reshape(batch, length, -1))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


def rotate(x, cos, sin):
    """RoPE on neighbouring pairs (x[2i], x[2i+1]): the order GGUF's `llama` architecture stores."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)


class Llama(nn.Module):
    """The Llama architecture with tied embeddings; parameter names are the GGUF tensor names."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.token_embd = nn.Embedding(c.vocab, c.hidden)
        self.blk = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.output_norm = nn.RMSNorm(c.hidden, eps=c.eps)
        frequencies = c.rope_base ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
        angles = torch.arange(c.context, dtype=torch.float64)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().float()[:, None, :], persistent=False)
        self.register_buffer("sin", angles.sin().float()[:, None, :], persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * c.layers) if residual else 0.02)

    def forward(self, ids, past=None):
        """Logits for all of `ids`. With `past`, a list for each block, they follow the tokens of earlier calls: a whole
        prompt in the first call, then one token in each."""
        begin = sum(k.shape[1] for k, _ in past[0]) if past else 0
        here = slice(begin, begin + ids.shape[1])
        x = self.token_embd(ids)
        for i, block in enumerate(self.blk):
            x = block(x, self.cos[here], self.sin[here], past[i] if past else None)
        return F.linear(self.output_norm(x), self.token_embd.weight)

    def loss(self, ids, targets):
        return F.cross_entropy(self(ids).float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model, windows, rows, batch):
    """Mean loss per token in float32."""
    total = 0.0
    for i in range(0, len(rows), batch):
        part = rows[i : i + batch]
        total += model.loss(*windows.batch(part)).item() * len(part)
    return total / len(rows)


@torch.no_grad()
def generate(model, tokenizer, prompt, limit, temperature=0.0, seed=0):
    """Continues a prompt."""
    device = model.token_embd.weight.device
    rng = torch.Generator().manual_seed(seed)
    ids, begin = tokenizer.encode(prompt), len(tokenizer.encode(prompt))
    stop = {tokenizer.ids[EOS], tokenizer.ids[END]}
    past, new = [[] for _ in model.blk], ids
    while len(ids) < min(model.c.context, begin + limit):
        logits = model(torch.tensor([new], device=device), past)[0, -1].float().cpu()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng))
        if token in stop:
            break
        new = [token]
        ids.append(token)
    return ids[begin:]


def train(model, windows, args, device):
    """AdamW with warm-up and a cosine to zero; returns the mean loss of the last hundred steps."""
    decay = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": args.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device == "cuda")
    loss_fn = torch.compile(model.loss) if args.compile else model.loss
    order = torch.Generator().manual_seed(args.seed)
    warmup = max(1, args.steps // 20)
    recent, begin, deck = [], time.time(), torch.empty(0, dtype=torch.long)
    for step in range(args.steps):
        done = (step - warmup) / max(1, args.steps - warmup)
        scale = (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * scale
        if len(deck) < args.batch:  # every document begins a window once before any does so twice
            deck = torch.cat((deck, torch.randperm(len(windows.starts), generator=order)))
        rows, deck = deck[: args.batch], deck[args.batch :]
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = loss_fn(*windows.batch(rows))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent = (recent + [loss.detach()])[-100:]
        if step % min(100, max(1, args.steps // 10)) == 0 or step + 1 == args.steps:
            seconds = time.time() - begin
            rate = (step + 1) * args.batch * windows.length / seconds
            print(f"step {step:5d}  loss {loss.item():.4f}  {seconds:6.1f} s  {rate / 1e6:.2f} M tokens/s", flush=True)
    return torch.stack(recent).mean().item()


# --------------------------------------------------------------------------------------------------------------


def samples(model, tokenizer, limit):
    """What the model says: greedy (with token ids, for golden tests) and at temperature 0.7."""
    out = []
    prompts = [BOS + text for text in SAMPLE_STORIES]
    prompts += [f"{BOS}{USER}\n{q}{END}\n{ASSISTANT}\n" for q in SAMPLE_QUESTIONS + SAMPLE_OPENINGS]
    for prompt in prompts:
        greedy = generate(model, tokenizer, prompt, limit)
        warm = tokenizer.decode(generate(model, tokenizer, prompt, limit, 0.7, seed=1))
        out.append({"prompt": prompt, "prompt_ids": tokenizer.encode(prompt), "greedy_ids": greedy, "greedy": tokenizer.decode(greedy), "temperature_0.7": warm})
        print(f"--- {prompt!r}\n[greedy] {out[-1]['greedy']}\n[0.7] {warm}\n", flush=True)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for model.gguf, report.json and samples.json")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5500)
    parser.add_argument("--batch", type=int, default=128, help="windows in a step")
    parser.add_argument("--window", type=int, default=1024, help="tokens in a window")
    parser.add_argument("--openings", type=float, default=0.0, help="share of additional conversations that begin with the beginning of a story")
    parser.add_argument("--shards", type=int, default=400, help=f"training shards of {SHARD_DOCUMENTS} documents")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--init", help="model.gguf whose tokenizer and weights the training begins with")
    parser.add_argument("--validation-rows", type=int, default=1024, help="held-out windows")
    parser.add_argument("--smoke", action="store_true", help="a tiny run on the CPU that checks the whole path")
    args = parser.parse_args()

    config, documents, processes, validation_rows, limit = Config(), SHARD_DOCUMENTS, os.cpu_count(), args.validation_rows, 400
    if args.smoke:
        args.device, args.steps, args.batch, args.shards, args.compile = "cpu", 12, 4, 1, False
        config, documents, processes, validation_rows, limit = Config(layers=2, context=256), 300, 1, 8, 20
    os.makedirs(args.out, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)

    begin = time.time()
    first = GgufReader(args.init) if args.init else None
    if first:
        tokenizer = Tokenizer(first.merges)
    else:
        tokenizer = Tokenizer.train([d for i in range(10) for d in shard_documents(args.seed, VALIDATION_SHARD + 1000 + i, documents)], config.vocab)
    assert len(tokenizer.tokens) == config.vocab, len(tokenizer.tokens)
    print(f"tokenizer: {config.vocab} tokens, {time.time() - begin:.1f} s", flush=True)
    ids = make_corpus(tokenizer, args.seed, args.shards, 0, documents, processes, args.openings)
    held_out = make_corpus(tokenizer, args.seed, 2, VALIDATION_SHARD, documents, 1)
    print(f"corpus: {len(ids)} training tokens, {len(held_out)} held-out tokens, {time.time() - begin:.1f} s", flush=True)

    model = Llama(config).to(args.device)
    if first:
        model.load_state_dict({name: torch.from_numpy(w.copy()) for name, w in first.weights.items()})
    parameters = sum(p.numel() for p in model.parameters())
    print(f"model: {parameters} parameters", flush=True)
    if not args.smoke:  # the demo model says these two things about itself
        assert config.layers == 8 and 6.5e6 <= parameters < 7.5e6
    windows = Windows(ids, min(args.window, config.context), tokenizer.ids[BOS], args.device)
    validation = Windows(held_out, config.context, tokenizer.ids[BOS], args.device)
    rows = torch.arange(validation_rows)
    train_begin = time.time()
    train_loss = train(model, windows, args, args.device)
    train_seconds = time.time() - train_begin

    model.eval()
    path = os.path.join(args.out, "model.gguf")
    f32_loss = evaluate(model, validation, rows, 32)
    values = write_gguf(path, model, tokenizer)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(values[name]))
    quantised_loss = evaluate(model, validation, rows, 32)
    report = {
        "command": " ".join(["python3"] + sys.argv), "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__, "init": args.init, "seed": args.seed, "config": dataclasses.asdict(config), "parameters": parameters,
        "documents": args.shards * documents, "corpus_tokens": len(ids), "steps": args.steps, "batch": args.batch, "window": windows.length, "openings": args.openings, "trained_tokens": args.steps * args.batch * windows.length,
        "train_seconds": round(train_seconds, 1), "total_seconds": round(time.time() - begin, 1), "train_loss_last_100_steps": train_loss,
        "validation_loss_f32": f32_loss, "validation_loss_quantised": quantised_loss, "validation_windows": validation_rows, "file_bytes": os.path.getsize(path)}
    print(json.dumps(report, indent=1), flush=True)
    with open(os.path.join(args.out, "report.json"), "w") as f:
        json.dump(report, f, indent=1)
    with open(os.path.join(args.out, "samples.json"), "w") as f:
        json.dump(samples(model, tokenizer, limit), f, indent=1)


if __name__ == "__main__":
    main()
