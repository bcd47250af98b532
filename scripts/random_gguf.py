#!/usr/bin/env python3
"""Write a GGUF model with random weights, in seconds: for speed measurements and loading tests.

`--shape` names a model whose shape the file gets, TinyLlama-1.1B by default, and the types
are mixed the way llama.cpp's own quantiser mixes them, so a file made here costs an engine the same
bytes and operations as a real one; `--layers` cuts a model that is too large for the machine. Blocks
are filled with random quants under scales that give every matrix the standard deviation
1/sqrt(inputs), which keeps activations of the order of 1 through any number of layers. The
tokenizer is a working byte-level BPE over made-up words: random ids decode to pronounceable noise.

    pip install numpy gguf
    python scripts/random_gguf.py --type q4_k_m tinyllama-q4_k_m.gguf
    python scripts/random_gguf.py --type q8_0 --layers 4 --hidden 512 --ffn 1536 --heads 8 small.gguf
    python scripts/random_gguf.py --type q4_0 --shape deepseek-v2-lite v2-lite-q4_0.gguf
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

# The matrices of a mix, as llama.cpp's quantiser chooses them: (most, output head, the ones that
# get more bits in about half of the layers).
MIXES = {
    "f32": (T.F32, T.F32, T.F32),
    "f16": (T.F16, T.F16, T.F16),
    "bf16": (T.BF16, T.BF16, T.BF16),
    "q8_0": (T.Q8_0, T.Q8_0, T.Q8_0),
    "q4_0": (T.Q4_0, T.Q6_K, T.Q4_0),
    "q4_1": (T.Q4_1, T.Q6_K, T.Q4_1),
    "q5_0": (T.Q5_0, T.Q6_K, T.Q5_0),
    "q5_1": (T.Q5_1, T.Q6_K, T.Q5_1),
    "q4_k_m": (T.Q4_K, T.Q6_K, T.Q6_K),
    "q5_k_m": (T.Q5_K, T.Q6_K, T.Q6_K),
    "q6_k": (T.Q6_K, T.Q6_K, T.Q6_K),
    "q2_k": (T.Q2_K, T.Q6_K, T.Q3_K),
    "q3_k_m": (T.Q3_K, T.Q6_K, T.Q4_K),
    "iq4_nl": (T.IQ4_NL, T.Q6_K, T.Q5_K),
    "iq4_xs": (T.IQ4_XS, T.Q6_K, T.Q5_K),
    "iq3_s": (T.IQ3_S, T.Q6_K, T.Q4_K),
    "iq2_xxs": (T.IQ2_XXS, T.Q5_K, T.Q2_K),
    "mxfp4": (T.MXFP4, T.Q8_0, T.MXFP4),
    # A type for each matrix in turn, as no quantiser does: for loading tests.
    "dynamic": (None, T.Q3_K, None),
}
DYNAMIC = (
    T.IQ2_XXS, T.Q2_K, T.IQ3_XXS, T.Q3_K, T.IQ4_XS, T.IQ2_S, T.IQ4_NL, T.MXFP4, T.IQ3_S, T.IQ2_XS, T.TQ2_0, T.IQ1_S,
    T.TQ1_0, T.IQ1_M,
)
FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
    "q5_1": gguf.LlamaFileType.MOSTLY_Q5_1,
    "q4_k_m": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "q5_k_m": gguf.LlamaFileType.MOSTLY_Q5_K_M,
    "q6_k": gguf.LlamaFileType.MOSTLY_Q6_K,
    "q2_k": gguf.LlamaFileType.MOSTLY_Q2_K,
    "q3_k_m": gguf.LlamaFileType.MOSTLY_Q3_K_M,
    "iq4_nl": gguf.LlamaFileType.MOSTLY_IQ4_NL,
    "iq4_xs": gguf.LlamaFileType.MOSTLY_IQ4_XS,
    "iq3_s": gguf.LlamaFileType.MOSTLY_IQ3_S,
    "iq2_xxs": gguf.LlamaFileType.MOSTLY_IQ2_XXS,
    "mxfp4": gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
    "dynamic": gguf.LlamaFileType.GUESSED,
}
# What a type becomes when a row is no multiple of its 256-value super-block.
NARROW = {T.Q4_K: T.Q5_0, T.Q5_K: T.Q5_1, T.Q6_K: T.Q8_0}
NARROW |= {kind: T.IQ4_NL for kind in DYNAMIC}
# Where the blocks have their f16 scale. MXFP4 has a power of two instead, IQ1_M the scale in four chunks.
SCALE_AT = {
    T.Q2_K: 80, T.Q3_K: 108, T.IQ4_NL: 0, T.IQ4_XS: 0, T.IQ2_XXS: 0, T.IQ2_XS: 0, T.IQ2_S: 0, T.IQ3_XXS: 0, T.IQ3_S: 0,
    T.IQ1_S: 0, T.TQ1_0: 52, T.TQ2_0: 64,
}



@dataclass(frozen=True)
class Latent:
    """Attention over a latent row: DeepSeek 2 and its relatives."""

    rank: int
    nope: int
    rope: int
    value: int
    q_rank: int = 0


@dataclass(frozen=True)
class Experts:
    """Layers of experts, after the first ones, which are dense."""

    num: int
    per_token: int
    ffn: int
    dense_layers: int = 0
    shared: int = 0
    sigmoid: bool = False
    normalize: bool = False
    scale: float = 1.0
    # The router and the experts add vectors.
    biases: bool = False


@dataclass(frozen=True)
class Shape:
    arch: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    context: int
    kv_heads: int = 0
    head_dim: int = 0
    tied: bool = False
    eps: float = 1e-6
    theta: float = 10000.0
    yarn: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    # Values of a head that are rotated, if not all.
    rope_dim: int = 0
    # Projections whose weights are in one tensor.
    fused_qkv: bool = False
    fused_gate_up: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    # A score of each head without a value.
    sinks: bool = False
    # The norm before feed-forward networks, if it is not ffn_norm.
    ffn_norm: str = "ffn_norm"
    # Of embeddings, scores, residuals and logits.
    multipliers: tuple[float, float, float, float] | None = None
    window: int = 0
    latent: Latent | None = None
    experts: Experts | None = None


SHAPES = {
    "tinyllama": Shape("llama", 22, 2048, 5632, 32, 32000, 2048, kv_heads=4, eps=1e-5),
    "youtu-2b": Shape(
        "deepseek2", 32, 2048, 6144, 16, 128256, 131072, tied=True, theta=1.6e6, latent=Latent(512, 128, 64, 128, 1536)
    ),
    "deepseek-v2-lite": Shape(
        "deepseek2", 27, 2048, 10944, 16, 102400, 163840, yarn=True, latent=Latent(512, 128, 64, 128),
        experts=Experts(64, 6, 1408, dense_layers=1, shared=2),
    ),
    "glm-4.7-flash": Shape(
        "deepseek2", 47, 2048, 10240, 20, 154880, 202752, eps=1e-5, theta=1e6, latent=Latent(512, 192, 64, 256, 768),
        experts=Experts(64, 4, 1536, dense_layers=1, shared=1, sigmoid=True, normalize=True, scale=1.8),
    ),
    "qwen3-30b-a3b": Shape(
        "qwen3moe", 48, 2048, 6144, 32, 151936, 40960, kv_heads=4, head_dim=128, theta=1e6, qk_norm=True,
        experts=Experts(128, 8, 768),
    ),
    "granite-3.3-2b": Shape(
        "granite", 40, 2048, 8192, 32, 49159, 131072, kv_heads=8, tied=True, eps=1e-5, theta=1e7,
        multipliers=(12.0, 0.015625, 0.22, 8.0),
    ),
    "phi-4-mini": Shape(
        "phi3", 32, 3072, 8192, 24, 200064, 4096, kv_heads=8, tied=True, eps=1e-5, rope_dim=96, fused_qkv=True,
        fused_gate_up=True,
    ),
    "ministral-3-3b": Shape(
        "mistral3", 26, 3072, 9216, 32, 131072, 262144, kv_heads=8, head_dim=128, tied=True, eps=1e-5, theta=1e6,
        yarn=True,
    ),
    "seed-oss-36b": Shape(
        "seed_oss", 64, 5120, 27648, 80, 155136, 524288, kv_heads=8, head_dim=128, theta=1e7, qkv_bias=True,
        ffn_norm="post_attention_norm",
    ),
    "glm-4-9b": Shape(
        "glm4", 40, 4096, 13696, 32, 151552, 32768, kv_heads=2, head_dim=128, eps=1e-5, rope_dim=64, post_norms=True,
        fused_gate_up=True,
    ),
    "gemma3-1b": Shape(
        "gemma3", 26, 1152, 6912, 4, 262144, 32768, kv_heads=1, head_dim=256, tied=True, theta=1e6, qk_norm=True,
        post_norms=True, window=512,
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss", 24, 2880, 2880, 64, 201088, 131072, kv_heads=8, head_dim=64, eps=1e-5, theta=150000.0, yarn=True,
        qkv_bias=True, output_bias=True, sinks=True, window=128, ffn_norm="post_attention_norm",
        experts=Experts(32, 4, 2880, biases=True),
    ),
}

# Rows are drawn from a pool of this many random bytes at random offsets: drawing two gigabytes of
# fresh random numbers would take longer than writing them.
POOL = 1 << 24


class Source:
    """Random bytes and normals, reproducible from a seed."""

    def __init__(self, seed):
        self.rng = np.random.Generator(np.random.SFC64(seed))
        self.bytes_pool = np.frombuffer(self.rng.bytes(POOL), dtype=np.uint8)
        self.normal_pool = self.rng.standard_normal(POOL // 4, dtype=np.float32)

    def _take(self, pool, count):
        out = np.empty(count, dtype=pool.dtype)
        done = 0
        while done < count:
            start = int(self.rng.integers(0, len(pool) // 2))
            n = min(count - done, len(pool) - start)
            out[done : done + n] = pool[start : start + n]
            done += n
        return out

    def octets(self, rows, columns):
        return self._take(self.bytes_pool, rows * columns).reshape(rows, columns)

    def normal(self, count):
        return self._take(self.normal_pool, count)

    def scale(self, blocks, mean):
        """One positive f16 scale per block, within ±25 % of `mean`."""
        return (mean * (0.75 + 0.5 * self.rng.random(blocks, dtype=np.float32))).astype(np.float16)


def signed(d, source):
    """Flips the sign of half of the scales, so that an off-centre code (-8..7) has mean zero."""
    flip = (source.octets(1, len(d))[0] & 1).astype(bool)
    return np.where(flip, -d, d).astype(np.float16)


def as_bytes(values):
    return values.astype("<f2").view(np.uint8).reshape(len(values), 2)


def k_scales(source, blocks):
    """The 12 bytes that hold eight 6-bit scales and eight equal 6-bit minimums, all in 32..63."""
    sc = source.octets(blocks, 8) % 32 + 32
    low, high = sc[:, :4], sc[:, 4:]
    top = (high >> 4) << 6
    return np.concatenate([low | top, low | top, (high & 15) | ((high & 15) << 4)], axis=1)


def random_blocks(kind, blocks, sigma, source):
    """`blocks` encoded blocks of a type whose values have mean 0 and standard deviation `sigma`."""
    octets = source.octets
    if kind == T.Q4_0:
        d = signed(source.scale(blocks, sigma / 4.61), source)
        return np.concatenate([as_bytes(d), octets(blocks, 16)], axis=1)
    if kind == T.Q4_1:
        d = source.scale(blocks, sigma / 4.61)
        return np.concatenate([as_bytes(d), as_bytes(d * np.float16(-7.5)), octets(blocks, 16)], axis=1)
    if kind == T.Q5_0:
        d = signed(source.scale(blocks, sigma / 9.23), source)
        return np.concatenate([as_bytes(d), octets(blocks, 20)], axis=1)
    if kind == T.Q5_1:
        d = source.scale(blocks, sigma / 9.23)
        return np.concatenate([as_bytes(d), as_bytes(d * np.float16(-15.5)), octets(blocks, 20)], axis=1)
    if kind == T.Q8_0:
        d = source.scale(blocks, sigma / 73.6)
        quants = np.maximum(octets(blocks, 32).view(np.int8), -127).view(np.uint8)
        return np.concatenate([as_bytes(d), quants], axis=1)
    if kind == T.Q4_K:
        # value = d·sc·q − dmin·m with m = sc, so dmin = 7.5·d centres it. The mean scale is 47.5.
        d = source.scale(blocks, sigma / (47.5 * 4.61))
        return np.concatenate(
            [as_bytes(d), as_bytes(d * np.float16(7.5)), k_scales(source, blocks), octets(blocks, 128)], axis=1
        )
    if kind == T.Q5_K:
        d = source.scale(blocks, sigma / (47.5 * 9.23))
        return np.concatenate(
            [as_bytes(d), as_bytes(d * np.float16(15.5)), k_scales(source, blocks), octets(blocks, 160)], axis=1
        )
    if kind == T.Q6_K:
        magnitude = octets(blocks, 16) % 64 + 64
        sign = octets(blocks, 16) & 1
        scales = np.where(sign, -magnitude.astype(np.int16), magnitude.astype(np.int16)).astype(np.int8)
        d = source.scale(blocks, sigma / (95.5 * 18.5))
        return np.concatenate([octets(blocks, 192), scales.view(np.uint8), as_bytes(d)], axis=1)
    if kind in SCALE_AT or kind in (T.IQ1_M, T.MXFP4):
        raw = octets(blocks, gguf.GGML_QUANT_SIZES[kind][1])
        set_scale(kind, raw, np.ones(blocks, np.float16))
        deviation = float(gguf.quants.dequantize(raw[:64], kind).std())
        set_scale(kind, raw, signed(source.scale(blocks, sigma / deviation), source))
        return raw
    raise ValueError(f"no random blocks for {kind.name}")


def set_scale(kind, raw, d):
    """Gives blocks of random codes the scales `d`."""
    if kind == T.MXFP4:
        raw[:, 0] = np.round(np.log2(np.abs(d.astype(np.float32)))) + 127
    elif kind == T.IQ1_M:
        for piece in range(4):
            nibble = (d.view(np.uint16) >> (4 * piece) & 15).astype(np.uint8)
            raw[:, 49 + 2 * piece] = raw[:, 49 + 2 * piece] & 15 | nibble << 4
    else:
        at = SCALE_AT[kind]
        raw[:, at : at + 2] = as_bytes(d)
    if kind == T.Q2_K:
        # Minimums that centre the codes 0..3: the same numbers of a scale that is 1.5 times as large.
        raw[:, :16] = raw[:, :16] & 15 | raw[:, :16] << 4
        raw[:, 82:84] = as_bytes(d * np.float16(1.5))


def random_matrix(kind, rows, columns, sigma, source):
    if kind in (T.F32, T.F16, T.BF16):
        x = source.normal(rows * columns).reshape(rows, columns) * np.float32(sigma)
        if kind == T.F32:
            return x
        if kind == T.F16:
            return x.astype(np.float16)
        return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(rows, columns * 2)
    per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
    blocks = random_blocks(kind, rows * columns // per_block, sigma, source)
    assert blocks.shape[1] == bytes_per_block
    return blocks.reshape(rows, columns // per_block * bytes_per_block)


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file, `[rows, columns]` or `[matrices, rows, columns]`; a vector is ones without a deviation."""

    name: str
    kind: T
    shape: tuple
    sigma: float = 0.0

    def num_bytes(self):
        per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // per_block * bytes_per_block

    def data(self, source):
        if len(self.shape) == 1:
            return source.normal(*self.shape) * np.float32(self.sigma) if self.sigma else np.ones(self.shape, np.float32)
        *matrices, rows, columns = self.shape
        if not matrices:
            return random_matrix(self.kind, rows, columns, self.sigma, source)
        # The experts of a layer are windows, of whole rows, of a few matrices: making them all would take minutes.
        windows = min(matrices[0], 8)
        pool = random_matrix(self.kind, rows * windows, columns, self.sigma, source)
        starts = source.rng.integers(0, rows * (windows - 1) + 1, matrices[0])
        return np.stack([pool[start : start + rows] for start in starts])


def vector(name, length, sigma=0.0):
    return Tensor(name, T.F32, (length,), sigma)


def matrix(name, kind, *shape, sigma=None, gain=1.0):
    columns = shape[-1]
    if isinstance(kind, itertools.cycle):
        kind = next(kind)
    for fallback in (NARROW.get(kind, T.F16), T.F16):
        if columns % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = fallback
    return Tensor(name, kind, shape, (sigma or columns**-0.5) * gain)


def tensors(shape, mix):
    most, head, more = MIXES[mix]
    if mix == "dynamic":
        most = more = itertools.cycle(DYNAMIC)
    hidden, layers = shape.hidden, shape.layers
    # A tied embedding is the head as well: small, or a token would predict itself.
    if shape.tied:
        yield matrix("token_embd.weight", head, shape.vocab, hidden)
    else:
        yield matrix("token_embd.weight", most, shape.vocab, hidden, sigma=1.0)
        yield matrix("output.weight", head, shape.vocab, hidden)
    yield vector("output_norm.weight", hidden)
    for i in range(layers):
        eighth = layers // 8
        extra = i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2
        important = more if extra else most
        # Two additions a layer to the residual stream: damped so that its size stays of the order of 1.
        damped = (2 * layers) ** -0.5
        p = f"blk.{i}."
        yield vector(p + "attn_norm.weight", hidden)
        if shape.latent:
            yield from latent_attention(p, shape, most, damped)
        else:
            yield from attention(p, shape, most, important, damped)
        if shape.post_norms:
            yield vector(p + "post_attention_norm.weight", hidden)
            yield vector(p + "post_ffw_norm.weight", hidden)
        yield vector(p + f"{shape.ffn_norm}.weight", hidden)
        experts = shape.experts
        if experts and i >= experts.dense_layers:
            yield matrix(p + "ffn_gate_inp.weight", T.F32, experts.num, hidden)
            if experts.sigmoid:
                yield vector(p + "exp_probs_b.bias", experts.num, 0.05)
            yield from feed_forward(p, "_exps", (experts.num,), hidden, experts.ffn, most, important, damped)
            if experts.biases:
                yield vector(p + "ffn_gate_inp.bias", experts.num, 0.05)
                for which, width in (("gate", experts.ffn), ("up", experts.ffn), ("down", hidden)):
                    yield Tensor(p + f"ffn_{which}_exps.bias", T.F32, (experts.num, width), 0.05)
            if experts.shared:
                width = experts.shared * experts.ffn
                yield from feed_forward(p, "_shexp", (), hidden, width, most, important, damped)
        else:
            yield from feed_forward(p, "", (), hidden, shape.ffn, most, important, damped, shape.fused_gate_up)


def attention(p, shape, most, important, damped):
    hidden, head_dim = shape.hidden, shape.head_dim
    q_dim, kv_dim = shape.heads * head_dim, shape.kv_heads * head_dim
    if shape.fused_qkv:
        yield matrix(p + "attn_qkv.weight", most, q_dim + 2 * kv_dim, hidden)
    else:
        yield matrix(p + "attn_q.weight", most, q_dim, hidden)
        yield matrix(p + "attn_k.weight", most, kv_dim, hidden)
        yield matrix(p + "attn_v.weight", important, kv_dim, hidden)
    if shape.qkv_bias:
        for which, length in (("q", q_dim), ("k", kv_dim), ("v", kv_dim)):
            yield vector(p + f"attn_{which}.bias", length, 0.05)
    if shape.qk_norm:
        yield vector(p + "attn_q_norm.weight", head_dim)
        yield vector(p + "attn_k_norm.weight", head_dim)
    yield matrix(p + "attn_output.weight", most, hidden, q_dim, gain=damped)
    if shape.output_bias:
        yield vector(p + "attn_output.bias", hidden, 0.05)
    if shape.sinks:
        yield vector(p + "attn_sinks.weight", shape.heads, 1.0)


def latent_attention(p, shape, most, damped):
    hidden, heads, latent = shape.hidden, shape.heads, shape.latent
    q_dim = heads * (latent.nope + latent.rope)
    if latent.q_rank:
        yield matrix(p + "attn_q_a.weight", most, latent.q_rank, hidden)
        yield vector(p + "attn_q_a_norm.weight", latent.q_rank)
        yield matrix(p + "attn_q_b.weight", most, q_dim, latent.q_rank)
    else:
        yield matrix(p + "attn_q.weight", most, q_dim, hidden)
    yield matrix(p + "attn_kv_a_mqa.weight", most, latent.rank + latent.rope, hidden)
    yield vector(p + "attn_kv_a_norm.weight", latent.rank)
    # Transposed in the file: a key is made of the latent row.
    yield matrix(p + "attn_k_b.weight", most, heads, latent.rank, latent.nope, sigma=latent.rank**-0.5)
    yield matrix(p + "attn_v_b.weight", most, heads, latent.value, latent.rank)
    yield matrix(p + "attn_output.weight", most, hidden, heads * latent.value, gain=damped)


def feed_forward(p, suffix, stack, hidden, ffn, most, important, damped, is_fused=False):
    if is_fused:
        yield matrix(p + f"ffn_up{suffix}.weight", most, *stack, 2 * ffn, hidden)
    else:
        yield matrix(p + f"ffn_gate{suffix}.weight", most, *stack, ffn, hidden)
        yield matrix(p + f"ffn_up{suffix}.weight", most, *stack, ffn, hidden)
    yield matrix(p + f"ffn_down{suffix}.weight", important, *stack, hidden, ffn, gain=damped)


def vocabulary(size):
    """Tokens, token types and merges: 3 control tokens, the 256 bytes, then made-up words."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    character = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
    tokens = ["<unk>", "<s>", "</s>"] + [character[b] for b in range(256)]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    types += [gguf.TokenType.NORMAL] * 256
    merges = []
    space = character[32]
    vowels, consonants = "aeiouy", "bcdfghjklmnprstvwxz"
    syllables = [c + v for c in consonants for v in vowels]

    def merge(left, right):
        if len(tokens) < size:
            tokens.append(left + right)
            types.append(gguf.TokenType.NORMAL)
            merges.append(f"{left} {right}")

    for s in syllables:
        merge(s[0], s[1])
    for c in consonants:
        merge(space, c)
    for s in syllables:
        merge(space + s[0], s[1])
    for first in syllables:
        for second in syllables:
            merge(space + first, second)
    for first in syllables:
        for second in syllables:
            merge(first, second)
    while len(tokens) < size:
        tokens.append(f"<unused{len(tokens)}>")
        types.append(gguf.TokenType.UNUSED)
    return tokens, types, merges


def write_metadata(w, shape, mix):
    w.add_type("model")
    w.add_name(f"random-{mix}")
    w.add_file_type(FILE_TYPES[mix])
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_block_count(shape.layers)
    w.add_context_length(shape.context)
    w.add_embedding_length(shape.hidden)
    w.add_feed_forward_length(shape.ffn)
    w.add_head_count(shape.heads)
    w.add_layer_norm_rms_eps(shape.eps)
    w.add_vocab_size(shape.vocab)
    w.add_rope_freq_base(shape.theta)
    if shape.latent:
        write_latent_metadata(w, shape)
    else:
        w.add_head_count_kv(shape.kv_heads)
        w.add_key_length(shape.head_dim)
        w.add_value_length(shape.head_dim)
        w.add_rope_dimension_count(min(shape.rope_dim or shape.head_dim, shape.head_dim))
        if shape.window:
            w.add_sliding_window(shape.window)
        if shape.yarn:
            is_oss = shape.arch == "gpt-oss"
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            w.add_rope_scaling_factor(32.0 if is_oss else 16.0)
            w.add_rope_scaling_orig_ctx_len(4096 if is_oss else 16384)
            if not is_oss:
                w.add_rope_scaling_yarn_log_mul(1.0)
                w.add_float32(f"{shape.arch}.attention.temperature_scale", 0.1)
    if shape.multipliers:
        embeddings, scores, residuals, logits = shape.multipliers
        w.add_embedding_scale(embeddings)
        w.add_attention_scale(scores)
        w.add_residual_scale(residuals)
        w.add_logit_scale(logits)
    if experts := shape.experts:
        w.add_expert_count(experts.num)
        w.add_expert_used_count(experts.per_token)
        w.add_expert_feed_forward_length(experts.ffn)
    tokens, types, merges = vocabulary(shape.vocab)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("llama-bpe")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges(merges)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_add_bos_token(True)


def write_latent_metadata(w, shape):
    latent, experts = shape.latent, shape.experts
    # Lengths are those of the row in the cache, the ones with `_mla` those of heads.
    w.add_head_count_kv(1)
    w.add_key_length(latent.rank + latent.rope)
    w.add_value_length(latent.rank)
    w.add_key_length_mla(latent.nope + latent.rope)
    w.add_value_length_mla(latent.value)
    w.add_kv_lora_rank(latent.rank)
    w.add_rope_dimension_count(latent.rope)
    # llama.cpp takes a model of other depths than these for one with queries of low rank unless a key says otherwise.
    if latent.q_rank or shape.layers not in (26, 27):
        w.add_q_lora_rank(latent.q_rank)
    if shape.yarn:
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(40.0)
        w.add_rope_scaling_orig_ctx_len(4096)
        w.add_rope_scaling_yarn_log_mul(0.0707)
    w.add_leading_dense_block_count(experts.dense_layers if experts else shape.layers)
    w.add_expert_shared_count(experts.shared if experts else 0)
    if experts:
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if experts.sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
        w.add_expert_weights_scale(experts.scale)
        w.add_expert_weights_norm(experts.normalize)
    else:
        w.add_expert_feed_forward_length(shape.ffn)


def write(path, shape, mix, seed):
    source = Source(seed)
    w = gguf.GGUFWriter(str(path), shape.arch)
    write_metadata(w, shape, mix)
    plan = list(tensors(shape, mix))
    for tensor in plan:
        # A shape in values, so no conversion from bytes: the dtype given is only a stand-in.
        w.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes(), raw_dtype=tensor.kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for tensor in plan:
        w.write_tensor_data(tensor.data(source))
    w.close()


def parse(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("output", type=Path, help="the .gguf file to write")
    p.add_argument("--type", choices=MIXES, default="q4_k_m", help="type mix (default %(default)s)")
    p.add_argument("--shape", choices=SHAPES, default="tinyllama", help="whose shape (default %(default)s)")
    given = p.add_argument_group("instead of the shape's own")
    given.add_argument("--layers", type=int)
    given.add_argument("--hidden", type=int)
    given.add_argument("--ffn", type=int, help="width of dense feed-forward networks")
    given.add_argument("--heads", type=int)
    given.add_argument("--kv-heads", type=int)
    given.add_argument("--head-dim", type=int)
    given.add_argument("--vocab", type=int)
    given.add_argument("--context", type=int, help="context length in the metadata")
    given.add_argument("--tied", action="store_const", const=True, help="no output matrix: the embedding is the head")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    shape = SHAPES[args.shape]
    names = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "context", "tied")
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    for name in ("kv_heads", "head_dim"):
        if shape.latent and name in changes:
            p.error(f"--{name.replace('_', '-')} means nothing for {args.shape}, whose cache has no heads")
    for name, value in changes.items():
        if value < 1:
            p.error(f"--{name.replace('_', '-')} must be at least 1")
    shape = dataclasses.replace(shape, **changes)
    if not shape.latent:
        if "kv_heads" not in changes:
            shape = dataclasses.replace(shape, kv_heads=min(shape.kv_heads, shape.heads))
        if not shape.head_dim and shape.hidden % shape.heads:
            p.error(f"--hidden {shape.hidden} is no multiple of --heads {shape.heads}: give --head-dim")
        shape = dataclasses.replace(shape, head_dim=shape.head_dim or shape.hidden // shape.heads)
        if shape.heads % shape.kv_heads:
            p.error(f"--heads {shape.heads} is no multiple of --kv-heads {shape.kv_heads}")
    if shape.vocab < 259:
        p.error(f"--vocab {shape.vocab} is below 259: the 256 bytes and 3 control tokens need their ids")
    if shape.experts and shape.layers <= shape.experts.dense_layers:
        p.error(f"--layers {shape.layers} leaves no layer with experts: {shape.experts.dense_layers} are dense")
    return args, shape


def main():
    args, shape = parse(sys.argv[1:])
    start = time.monotonic()
    write(args.output, shape, args.type, args.seed)
    size = args.output.stat().st_size / 1e6
    print(f"{args.output}: {size:.0f} MB in {time.monotonic() - start:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
