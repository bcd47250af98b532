"""Writes the demo model as a GGUF file and reads it again: block formats, metadata, tensors."""

import math
import struct

import numpy as np

from chat import BOS, END, EOS, SPECIAL_TOKENS

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + (message['content'] | trim) + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

# --------------------------------------------------------------------------------------------------------------
# Quantisation: NumPy versions of the GGUF block formats (bytes out, and the values that those bytes stand for)
# --------------------------------------------------------------------------------------------------------------


def f16(x):
    return x.astype(np.float16)


def quantise_q8_0(w):
    x = w.reshape(-1, 32)
    d = f16(np.abs(x).max(1, keepdims=True) / 127)
    scale = d.astype(np.float32)
    q = np.clip(np.rint(x / np.where(scale == 0, 1, scale)), -127, 127).astype(np.int8)
    data = np.concatenate((d.view(np.uint8), q.view(np.uint8)), axis=1)
    return data, (scale * q).reshape(w.shape)


def quantise_q5_0(w):
    """Five bits with one scale for 32 values; of several scales, the one with the least squared error is kept."""
    x = w.reshape(-1, 32)
    peak = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)
    best_error, best_d, best_q = None, None, None
    for shrink in np.linspace(0.80, 1.04, 25):
        d = f16(peak * shrink / -16)
        scale = d.astype(np.float32)
        q = np.clip(np.floor(x / np.where(scale == 0, 1, scale) + 16.5), 0, 31).astype(np.int32)
        error = ((scale * (q - 16) - x) ** 2).sum(1, keepdims=True)
        if best_error is None:
            best_error, best_d, best_q = error, d, q
        better = error < best_error
        best_error, best_d, best_q = np.where(better, error, best_error), np.where(better, d, best_d), np.where(better, q, best_q)
    low, high = best_q[:, :16], best_q[:, 16:]
    nibbles = ((low & 15) | ((high & 15) << 4)).astype(np.uint8)
    bits = ((best_q >> 4).astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)
    data = np.concatenate((best_d.view(np.uint8), bits[:, None].view(np.uint8), nibbles), axis=1)
    return data, (best_d.astype(np.float32) * (best_q - 16)).reshape(w.shape)


def quantise_q6_k(w):
    """Six bits; 16 values share an 8-bit scale, and 256 values share the scale of these scales."""
    x = w.reshape(-1, 16, 16)
    peak = np.take_along_axis(x, np.abs(x).argmax(2)[..., None], 2)[..., 0]
    wanted = peak / -32
    top = np.take_along_axis(wanted, np.abs(wanted).argmax(1)[:, None], 1)
    d = f16(top / -128)
    scale = d.astype(np.float32)
    sub = np.clip(np.rint(wanted / np.where(scale == 0, 1, scale)), -128, 127).astype(np.int8)
    step = scale[:, :, None] * sub[:, :, None].astype(np.float32)
    q = np.clip(np.rint(x / np.where(step == 0, 1, step)), -32, 31)
    values = (step * q).reshape(w.shape)
    q = (q.astype(np.int32) + 32).reshape(-1, 2, 4, 32)  # [block, half n, group g, l]
    ql = np.concatenate(((q[:, :, 0] & 15) | ((q[:, :, 2] & 15) << 4), (q[:, :, 1] & 15) | ((q[:, :, 3] & 15) << 4)), axis=2)
    qh = sum((q[:, :, g] >> 4) << (2 * g) for g in range(4))
    blocks = len(q)
    data = np.concatenate((ql.astype(np.uint8).reshape(blocks, 128), qh.astype(np.uint8).reshape(blocks, 64),
                           sub.view(np.uint8), d.view(np.uint8)), axis=1)
    return data, values


def keep_f32(w):
    return np.ascontiguousarray(w, dtype=np.float32).view(np.uint8), w


def read_q8_0(data):
    blocks = data.reshape(-1, 34)
    return blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[:, 2:].view(np.int8)


def read_q5_0(data):
    blocks = data.reshape(-1, 22)
    high = (blocks[:, 2:6].copy().view(np.uint32) >> np.arange(32, dtype=np.uint32)) & 1
    low = np.concatenate((blocks[:, 6:] & 15, blocks[:, 6:] >> 4), axis=1)
    return blocks[:, :2].copy().view(np.float16).astype(np.float32) * ((low | (high << 4)).astype(np.int32) - 16)


def read_q6_k(data):
    blocks = data.reshape(-1, 210)
    ql, qh = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 32)
    low = np.stack((ql[:, :, 0] & 15, ql[:, :, 1] & 15, ql[:, :, 0] >> 4, ql[:, :, 1] >> 4), axis=2)
    high = np.stack([(qh >> (2 * g)) & 3 for g in range(4)], axis=2)
    q = (low | (high << 4)).astype(np.float32).reshape(-1, 16, 16) - 32
    scale = blocks[:, 208:].copy().view(np.float16).astype(np.float32) * blocks[:, 192:208].view(np.int8)
    return scale[:, :, None] * q


F32, Q5_0, Q8_0, Q6_K = 0, 6, 8, 14
# Bytes of this many values, and what they stand for.
READERS = {F32: (4, 1, lambda data: data.view(np.float32)), Q5_0: (22, 32, read_q5_0), Q8_0: (34, 32, read_q8_0), Q6_K: (210, 256, read_q6_k)}
QUANTISERS = {F32: keep_f32, Q5_0: quantise_q5_0, Q8_0: quantise_q8_0, Q6_K: quantise_q6_k}


def tensor_type(name):
    """Most bits where an error does most harm: embeddings and attention first, then the last matrix of the FFN."""
    if "norm" in name:
        return F32
    if "ffn_down" in name:
        return Q6_K
    return Q5_0 if "ffn" in name else Q8_0


# --------------------------------------------------------------------------------------------------------------
# GGUF
# --------------------------------------------------------------------------------------------------------------

ALIGNMENT = 32


def gguf_string(text):
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def gguf_value(value):
    """A metadata value with its type: bool, int (u32), float (f32), str, or a list of str or int (i32)."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_string, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def metadata(c, tokenizer):
    return {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "tinyvllm demo",
        "general.description": "The small demo model built into tinyvllm: little stories and a few questions about the program.",
        "general.license": "MIT OR Apache-2.0",
        "general.file_type": 8,  # mostly Q5_0
        "general.quantization_version": 2,
        "general.alignment": ALIGNMENT,
        "llama.block_count": c.layers,
        "llama.context_length": c.context,
        "llama.embedding_length": c.hidden,
        "llama.feed_forward_length": c.ffn,
        "llama.attention.head_count": c.heads,
        "llama.attention.head_count_kv": c.kv_heads,
        "llama.attention.key_length": c.head_dim,
        "llama.attention.value_length": c.head_dim,
        "llama.attention.layer_norm_rms_epsilon": c.eps,
        "llama.rope.dimension_count": c.head_dim,
        "llama.rope.freq_base": c.rope_base,
        "llama.vocab_size": c.vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokenizer.tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL_TOKENS else 1 for t in tokenizer.tokens],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in tokenizer.merges],
        "tokenizer.ggml.bos_token_id": tokenizer.ids[BOS],
        "tokenizer.ggml.eos_token_id": tokenizer.ids[EOS],
        "tokenizer.ggml.eot_token_id": tokenizer.ids[END],
        "tokenizer.ggml.padding_token_id": tokenizer.ids[EOS],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_gguf(path, model, tokenizer):
    """Quantises and writes the model; returns the dequantised weights by name."""
    values, infos, blobs, offset = {}, b"", [], 0
    weights = {name: p.detach().float().cpu().numpy() for name, p in model.named_parameters()}
    for name, w in weights.items():
        kind = tensor_type(name)
        data, values[name] = QUANTISERS[kind](w)
        data = data.tobytes()
        shape = w.shape[::-1]
        infos += gguf_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        padding = -len(data) % ALIGNMENT
        blobs.append(data + bytes(padding))
        offset += len(data) + padding
    meta = metadata(model.c, tokenizer)
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(weights), len(meta))
    header += b"".join(gguf_string(key) + gguf_value(value) for key, value in meta.items()) + infos
    with open(path, "wb") as f:
        f.write(header + bytes(-len(header) % ALIGNMENT))
        f.write(b"".join(blobs))
    return values


class GgufReader:
    """Reads what `write_gguf` writes: the merges of the tokenizer and the dequantised weights by name."""

    SCALARS = {4: "I", 5: "i", 6: "f", 7: "?", 10: "Q"}

    def __init__(self, path):
        with open(path, "rb") as f:
            self.data = f.read()
        self.at = 0
        magic, version, num_tensors, num_values = self.take("4sIQQ")
        assert (magic, version) == (b"GGUF", 3), path
        meta = {self.string(): self.value(self.take("I")[0]) for _ in range(num_values)}
        self.merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
        infos = []
        for _ in range(num_tensors):
            name, (rank,) = self.string(), self.take("I")
            infos.append((name, self.take(f"{rank}Q")[::-1], *self.take("IQ")))
        begin = self.at + -self.at % ALIGNMENT
        self.weights = {}
        for name, shape, kind, offset in infos:
            block_bytes, block_values, read = READERS[kind]
            size = math.prod(shape) // block_values * block_bytes
            data = np.frombuffer(self.data, np.uint8, size, begin + offset)
            self.weights[name] = read(data).reshape(shape)

    def take(self, form):
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def string(self):
        (length,) = self.take("Q")
        return self.take(f"{length}s")[0].decode("utf-8")

    def value(self, kind):
        if kind == 8:
            return self.string()
        if kind == 9:
            item, count = self.take("IQ")
            return [self.value(item) for _ in range(count)]
        return self.take(self.SCALARS[kind])[0]
