#!/usr/bin/env python3
"""Write a GGUF model with random weights, in seconds: for speed measurements and loading tests.

The default shape is TinyLlama-1.1B's and the types are mixed the way llama.cpp's own quantiser
mixes them, so a file made here costs an engine the same bytes and operations as a real one. Blocks
are filled with random quants under scales that give every matrix the standard deviation
1/sqrt(inputs), which keeps activations of the order of 1 through any number of layers. The
tokenizer is a working byte-level BPE over made-up words: random ids decode to pronounceable noise.

    pip install numpy gguf
    python scripts/random_gguf.py --type q4_k_m tinyllama-q4_k_m.gguf
    python scripts/random_gguf.py --type q8_0 --layers 4 --hidden 512 --ffn 1536 --heads 8 small.gguf
"""

import argparse
import sys
import time
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
}
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
}
# What a type becomes when a row is no multiple of its 256-value super-block.
NARROW = {T.Q4_K: T.Q5_0, T.Q5_K: T.Q5_1, T.Q6_K: T.Q8_0}

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
    raise ValueError(f"no random blocks for {kind.name}")


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


def tensor_plan(args):
    """(name, type, rows, columns, standard deviation) of every tensor; columns 0 means a norm."""
    most, head, more = MIXES[args.type]
    hidden, ffn, layers = args.hidden, args.ffn, args.layers
    head_dim = args.head_dim or hidden // args.heads
    q_dim, kv_dim = args.heads * head_dim, args.kv_heads * head_dim

    def matrix(name, kind, rows, columns, gain=1.0):
        if columns % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = NARROW.get(kind, T.F16)
        if columns % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = T.F16
        return (name, kind, rows, columns, gain / columns**0.5)

    yield matrix("token_embd.weight", most, args.vocab, hidden, hidden**0.5)
    if not args.tied:
        yield matrix("output.weight", head, args.vocab, hidden)
    yield ("output_norm.weight", T.F32, hidden, 0, 0.0)
    for i in range(layers):
        eighth = layers // 8
        extra = i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2
        important = more if extra else most
        # Two additions a layer to the residual stream: damped so that its size stays of the order of 1.
        damped = (2 * layers) ** -0.5
        p = f"blk.{i}."
        yield (p + "attn_norm.weight", T.F32, hidden, 0, 0.0)
        yield matrix(p + "attn_q.weight", most, q_dim, hidden)
        yield matrix(p + "attn_k.weight", most, kv_dim, hidden)
        yield matrix(p + "attn_v.weight", important, kv_dim, hidden)
        yield matrix(p + "attn_output.weight", most, hidden, q_dim, damped)
        yield (p + "ffn_norm.weight", T.F32, hidden, 0, 0.0)
        yield matrix(p + "ffn_gate.weight", most, ffn, hidden)
        yield matrix(p + "ffn_up.weight", most, ffn, hidden)
        yield matrix(p + "ffn_down.weight", important, hidden, ffn, damped)


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


def write(path, args):
    source = Source(args.seed)
    head_dim = args.head_dim or args.hidden // args.heads
    w = gguf.GGUFWriter(str(path), "llama")
    w.add_type("model")
    w.add_name(f"random-{args.type}")
    w.add_file_type(FILE_TYPES[args.type])
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_block_count(args.layers)
    w.add_context_length(args.context)
    w.add_embedding_length(args.hidden)
    w.add_feed_forward_length(args.ffn)
    w.add_head_count(args.heads)
    w.add_head_count_kv(args.kv_heads)
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_rope_dimension_count(head_dim)
    w.add_rope_freq_base(10000.0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(args.vocab)
    tokens, types, merges = vocabulary(args.vocab)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("llama-bpe")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges(merges)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_add_bos_token(True)

    plan = list(tensor_plan(args))
    for name, kind, rows, columns, _ in plan:
        per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
        shape = (rows, columns) if columns else (rows,)
        count = rows * (columns or 1)
        # A shape in values, so no conversion from bytes: the dtype given is only a stand-in.
        w.add_tensor_info(name, shape, np.dtype(np.float32), count // per_block * bytes_per_block, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for _, kind, rows, columns, sigma in plan:
        if columns:
            w.write_tensor_data(random_matrix(kind, rows, columns, sigma, source))
        else:
            w.write_tensor_data(np.ones(rows, dtype=np.float32))
    w.close()


def parse(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("output", type=Path, help="the .gguf file to write")
    p.add_argument("--type", choices=MIXES, default="q4_k_m", help="type mix (default %(default)s)")
    p.add_argument("--layers", type=int, default=22)
    p.add_argument("--hidden", type=int, default=2048)
    p.add_argument("--ffn", type=int, default=5632)
    p.add_argument("--heads", type=int, default=32)
    p.add_argument("--kv-heads", type=int, help="default: 4, or the number of heads if that is smaller")
    p.add_argument("--head-dim", type=int, help="default: hidden / heads")
    p.add_argument("--vocab", type=int, default=32000)
    p.add_argument("--context", type=int, default=2048, help="context length in the metadata")
    p.add_argument("--tied", action="store_true", help="no output matrix: the embedding serves as the head")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    args.kv_heads = args.kv_heads or min(4, args.heads)
    for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "context"):
        if getattr(args, name) < 1:
            p.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.vocab < 259:
        p.error(f"--vocab {args.vocab} is below 259: the 256 bytes and 3 control tokens need their ids")
    if args.heads % args.kv_heads:
        p.error(f"--heads {args.heads} is no multiple of --kv-heads {args.kv_heads}")
    if args.head_dim is None and args.hidden % args.heads:
        p.error(f"--hidden {args.hidden} is no multiple of --heads {args.heads}: give --head-dim")
    return args


def main():
    args = parse(sys.argv[1:])
    start = time.monotonic()
    write(args.output, args)
    size = args.output.stat().st_size / 1e6
    print(f"{args.output}: {size:.0f} MB in {time.monotonic() - start:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
