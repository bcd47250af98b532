#!/usr/bin/env python3
"""Makes the model fixtures in tests/fixtures: tiny random models with the results they must give.

    python scripts/make_fixtures.py OUT [--stages reference gguf kquant blocks]

Stages, each of which needs only what the earlier ones wrote:

reference  tiny/NAME/: config.json, generation_config.json and model.safetensors of a random model, and
           golden.safetensors with what transformers computes for it in float32 on the CPU:
           ids [48], logits [48, vocab], hidden [4, 48, hidden] (embedding, after layers 1 and 2, final
           norm) and greedy [40] (8 prompt tokens and 32 generated ones).
gguf       tiny/NAME/NAME.TYPE.gguf, converted from the folder, and NAME.TYPE.golden.safetensors with the
           logits of a numpy forward pass over the dequantised weights of that very file.
kquant     kquant/NAME/NAME.q4_k_mix.gguf: models of width 256 with Q4_K, Q6_K and the type that stands in
           where a row is no multiple of 256, and their golden logits. Their float models are temporary.
blocks     blocks.safetensors: random bytes of every block type and the values they decode to.

Versions that made the fixtures in the repository (Python 3.11); other versions may draw other weights:

    torch 2.9.1, transformers 5.23.0       stages reference and kquant
    xllamacpp 2026.10.11549                stage kquant, for its K-quant encoder
    gguf 0.19.0, safetensors 0.8.0, numpy 2.4.6

Nothing is downloaded: all weights are random. They are drawn so that mistakes show: norms are not 1,
biases not 0, and embeddings of tied models small enough that greedy output does not repeat one token.
"""

import argparse
import ctypes
import json
import os
import tempfile
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GgmlType
from gguf.quants import dequantize
from gguf.quants import quantize as gguf_quantize
from safetensors.numpy import load_file, save_file

VOCAB_SIZE = 288
NUM_LAYERS = 3
PROMPT_LEN = 48

# Which GGUF files of each model are worth their bytes in the repository. The f32 file needs no golden
# logits of its own: those of the folder hold for it.
TINY_GGUF_TYPES = {
    "llama": ["f32", "q8_0"],
    "llama3": ["q4_0"],
    "mistral": [],
    "qwen2": ["q8_0"],
    "qwen3": [],
}
KQUANT_MODELS = ["llama", "qwen3"]

# GGUF architecture of each transformers model type.
GGUF_ARCH = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def model_config(name, hidden_size):
    """The transformers configuration of a tiny model.

    Each one has what makes its architecture special: scaled rotary frequencies (llama3), heads that are
    not hidden / heads wide (llama3, mistral, qwen3), tied embeddings, biases, norms of q and k.
    """
    import transformers

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "num_hidden_layers": NUM_LAYERS,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
    }

    def rope(theta):
        return {"rope_type": "default", "rope_theta": theta}

    llama3_rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    tied_qwen = {"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_parameters": rope(1e6)}
    config_class, special = {
        "llama": (transformers.LlamaConfig, {"rope_parameters": rope(10000.0)}),
        "llama3": (
            transformers.LlamaConfig,
            {"tie_word_embeddings": True, "head_dim": 32, "rope_parameters": llama3_rope},
        ),
        "mistral": (
            transformers.MistralConfig,
            {"head_dim": 24, "sliding_window": None, "rope_parameters": rope(1e6)},
        ),
        "qwen2": (transformers.Qwen2Config, tied_qwen),
        "qwen3": (transformers.Qwen3Config, tied_qwen | {"head_dim": 32}),
    }[name]
    return config_class(**(common | special))


def draw_weights(model, seed):
    """Replaces all parameters by random ones of sensible size."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    embedding_std = 0.1 if model.config.tie_word_embeddings else 0.7
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.1 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise * embedding_std)
            else:
                parameter.copy_(noise / np.sqrt(parameter.shape[-1]))


def make_reference(name, folder, hidden_size=64):
    """Writes the model `name` and its golden results to `folder`."""
    import torch
    import transformers

    config = model_config(name, hidden_size)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    draw_weights(model, seed=1234)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    config_path = folder / "config.json"
    config_json = json.loads(config_path.read_text())
    config_path.write_text(json.dumps(config_json, indent=1, sort_keys=True))

    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB_SIZE, (1, PROMPT_LEN), generator=generator)
    with torch.no_grad():
        output = model(ids, use_cache=False, output_hidden_states=True)
        generated = model.generate(
            ids[:, :8],
            attention_mask=torch.ones(1, 8, dtype=torch.long),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
    golden = {
        "ids": ids.numpy().astype(np.int64)[0],
        "logits": output.logits[0].numpy(),
        "hidden": np.stack([hidden[0].numpy() for hidden in output.hidden_states]),
        "greedy": generated.sequences.numpy().astype(np.int64)[0],
    }
    save_file(golden, folder / "golden.safetensors")
    print(f"{folder}: greedy {golden['greedy'][8:18].tolist()}")


LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def load_folder(folder):
    """The config.json and the float32 tensors of a Hugging Face folder."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    return config, {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def interleave_rotary_rows(weight, num_heads):
    """Row j·d/2 + i of each head becomes row 2i + j.

    GGUF files of arch llama rotate neighbouring rows, Hugging Face models rows half a head apart.
    """
    rows = weight.shape[0]
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def llama3_frequency_divisors(rope, head_dim):
    """What GGUF stores as rope_freqs.weight: long waves are divided by the factor, short ones are kept."""
    frequencies = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    wavelengths = 2 * np.pi / frequencies
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    original = rope["original_max_position_embeddings"]
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(wavelengths > original / low, factor, between)
    divisors = np.where(wavelengths < original / high, 1.0, divisors)
    return divisors.astype(np.float32)


def head_dim_of(config):
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def gguf_tensors(config, tensors):
    """Names and values as a GGUF file of the model has them, in file order."""
    num_heads = config["num_attention_heads"]
    rotary_heads = {"self_attn.q_proj": num_heads, "self_attn.k_proj": config["num_key_value_heads"]}
    out = {
        "token_embd.weight": tensors["model.embed_tokens.weight"],
        "output_norm.weight": tensors["model.norm.weight"],
    }
    if not config.get("tie_word_embeddings"):
        out["output.weight"] = tensors["lm_head.weight"]
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        out["rope_freqs.weight"] = llama3_frequency_divisors(rope, head_dim_of(config))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, value in tensors.items():
            if not name.startswith(prefix):
                continue
            module, ending = name[len(prefix) :].rsplit(".", 1)
            if GGUF_ARCH[config["model_type"]] == "llama" and module in rotary_heads:
                value = interleave_rotary_rows(value, rotary_heads[module])
            out[f"blk.{layer}.{LAYER_NAMES[module]}.{ending}"] = value
    return out


def add_hyperparameters(writer, arch, config):
    def u32(key, value):
        writer.add_uint32(f"{arch}.{key}", int(value))

    def f32(key, value):
        writer.add_float32(f"{arch}.{key}", float(value))

    rope = config.get("rope_parameters") or {}
    head_dim = head_dim_of(config)
    u32("block_count", config["num_hidden_layers"])
    u32("context_length", config["max_position_embeddings"])
    u32("embedding_length", config["hidden_size"])
    u32("feed_forward_length", config["intermediate_size"])
    u32("vocab_size", config["vocab_size"])
    u32("attention.head_count", config["num_attention_heads"])
    f32("attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    f32("rope.freq_base", rope.get("rope_theta", 10000.0))
    u32("attention.head_count_kv", config["num_key_value_heads"])
    u32("rope.dimension_count", head_dim)
    u32("attention.key_length", head_dim)
    u32("attention.value_length", head_dim)


def add_toy_vocabulary(writer, vocab_size):
    """A byte-level BPE vocabulary: 3 control tokens, 256 bytes, a few merges, padding."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = dict(zip(printable, printable, strict=True))
    for byte in range(256):
        if byte not in symbols:
            symbols[byte] = 256 + len(symbols) - len(printable)
    tokens = ["<unk>", "<s>", "</s>"] + [chr(symbols[byte]) for byte in range(256)]
    normal, unknown, control, unused = 1, 2, 3, 5
    types = [unknown, control, control] + [normal] * 256
    pairs = ["h e", "l l", "Ġ t", "i n", "e r", "he ll", "hell o", "Ġt he"]
    for pair in pairs:
        tokens.append(pair.replace(" ", ""))
        types.append(normal)
    while len(tokens) < vocab_size:
        tokens.append(f"[PAD{len(tokens)}]")
        types.append(unused)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(pairs)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def is_kept_exact(name, value):
    return value.ndim < 2 or name.endswith("_norm.weight")


def finish_gguf(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(folder, path, type_name):
    """Converts a folder to a GGUF file whose matrices all have one type."""
    config, tensors = load_folder(folder)
    arch = GGUF_ARCH[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("general.type", "model")
    writer.add_string("general.name", config["model_type"])
    writer.add_quantization_version(2)
    add_hyperparameters(writer, arch, config)
    add_toy_vocabulary(writer, config["vocab_size"])
    writer.add_add_bos_token(False)
    wanted = GgmlType[type_name.upper()]
    for name, value in gguf_tensors(config, tensors).items():
        ggml_type = GgmlType.F32 if is_kept_exact(name, value) else wanted
        if value.shape[-1] % gguf.GGML_QUANT_SIZES[ggml_type][0]:
            ggml_type = GgmlType.F16
        value = np.ascontiguousarray(value, np.float32)
        data = value if ggml_type == GgmlType.F32 else gguf_quantize(value, ggml_type)
        writer.add_tensor(name, data, raw_dtype=ggml_type)
    finish_gguf(writer)


class GgufModel:
    """Metadata and dequantised float64 tensors of a file."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.fields = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.arch = self.fields["general.architecture"].contents()

    def __contains__(self, name):
        return name in self.tensors

    def __getitem__(self, name):
        tensor = self.tensors[name]
        values = tensor.data
        if tensor.tensor_type != GgmlType.F32:
            values = dequantize(values, tensor.tensor_type)
        shape = [int(dim) for dim in reversed(tensor.shape)]
        return np.asarray(values, dtype=np.float64).reshape(shape)

    def number(self, key):
        return self.fields[f"{self.arch}.{key}"].contents()


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x, frequencies, interleaved):
    """Rotary embedding of x [heads, tokens, head_dim] at positions 0, 1, …"""
    angles = np.arange(x.shape[1], dtype=np.float64)[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    half = len(frequencies)
    if interleaved:
        first, second = np.s_[..., 0::2], np.s_[..., 1::2]
    else:
        first, second = np.s_[..., :half], np.s_[..., half:]
    out = np.empty_like(x)
    out[first] = x[first] * cos - x[second] * sin
    out[second] = x[first] * sin + x[second] * cos
    return out


def attention(query, key, value):
    """Causal attention; query [heads, tokens, head_dim], key and value with fewer heads."""
    group = query.shape[0] // key.shape[0]
    key, value = np.repeat(key, group, 0), np.repeat(value, group, 0)
    scores = query @ key.transpose(0, 2, 1) * (1 / np.sqrt(query.shape[-1]))
    num_tokens = query.shape[1]
    visible = np.tril(np.ones((num_tokens, num_tokens), bool))
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value


def forward(path, ids):
    """Logits [tokens, vocab] of a Llama-family GGUF file, in float64 throughout."""
    model = GgufModel(path)
    eps = model.number("attention.layer_norm_rms_epsilon")
    num_heads = model.number("attention.head_count")
    num_kv_heads = model.number("attention.head_count_kv")
    rotary_dim = model.number("rope.dimension_count")
    base = model.number("rope.freq_base")
    frequencies = base ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    if "rope_freqs.weight" in model:
        frequencies = frequencies / model["rope_freqs.weight"]
    interleaved = model.arch == "llama"

    x = model["token_embd.weight"][ids]
    num_tokens = len(ids)
    for layer in range(model.number("block_count")):
        prefix = f"blk.{layer}."

        def project(h, which, heads, prefix=prefix):
            y = h @ model[f"{prefix}attn_{which}.weight"].T
            if f"{prefix}attn_{which}.bias" in model:
                y = y + model[f"{prefix}attn_{which}.bias"]
            return y.reshape(num_tokens, heads, -1).transpose(1, 0, 2)

        h = rms_norm(x, model[prefix + "attn_norm.weight"], eps)
        query, key = project(h, "q", num_heads), project(h, "k", num_kv_heads)
        value = project(h, "v", num_kv_heads)
        if prefix + "attn_q_norm.weight" in model:
            query = rms_norm(query, model[prefix + "attn_q_norm.weight"], eps)
            key = rms_norm(key, model[prefix + "attn_k_norm.weight"], eps)
        query = rotate(query, frequencies, interleaved)
        key = rotate(key, frequencies, interleaved)
        mixed = attention(query, key, value).transpose(1, 0, 2).reshape(num_tokens, -1)
        x = x + mixed @ model[prefix + "attn_output.weight"].T

        h = rms_norm(x, model[prefix + "ffn_norm.weight"], eps)
        gate = h @ model[prefix + "ffn_gate.weight"].T
        up = h @ model[prefix + "ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ model[prefix + "ffn_down.weight"].T
    x = rms_norm(x, model["output_norm.weight"], eps)
    head = "output.weight" if "output.weight" in model else "token_embd.weight"
    return x @ model[head].T


def write_golden_logits(path, ids):
    """Writes what the file's own weights give, next to the file."""
    logits = forward(path, ids).astype(np.float32)
    save_file({"ids": ids, "logits": logits}, path.with_suffix(".golden.safetensors"))
    return logits


def stage_reference(out):
    for name in TINY_GGUF_TYPES:
        make_reference(name, out / "tiny" / name)


def stage_gguf(out):
    for name, types in TINY_GGUF_TYPES.items():
        folder = out / "tiny" / name
        golden = load_file(folder / "golden.safetensors")
        for type_name in types:
            path = folder / f"{name}.{type_name}.gguf"
            write_gguf(folder, path, type_name)
            if type_name == "f32":
                logits = forward(path, golden["ids"])
            else:
                logits = write_golden_logits(path, golden["ids"])
            report(path, logits, golden["logits"])


def report(path, logits, exact_logits):
    """Prints how far a file's logits are from those of the model it was made from."""
    difference = np.abs(logits - exact_logits).max()
    agreement = (logits.argmax(-1) == exact_logits.argmax(-1)).mean()
    print(f"{path}: against the float model max |Δ| {difference:.1e}, same argmax {agreement:.3f}")


def k_quant_encoder():
    """ggml's own encoders, which the Python package gguf lacks for these types."""
    import xllamacpp

    library = ctypes.CDLL(os.path.join(os.path.dirname(xllamacpp.__file__), "xllamacpp.abi3.so"))
    floats = ctypes.POINTER(ctypes.c_float)
    int64 = ctypes.c_int64
    encode_rows = library.ggml_quantize_chunk
    encode_rows.restype = ctypes.c_size_t
    encode_rows.argtypes = [ctypes.c_int32, floats, ctypes.c_void_p, int64, int64, int64, floats]

    def encode(values, ggml_type):
        row_len = values.shape[-1]
        num_rows = values.size // row_len
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
        out = np.zeros((num_rows, row_len // block_len * block_bytes), np.uint8)
        source = values.ctypes.data_as(floats)
        written = encode_rows(int(ggml_type), source, out.ctypes.data, 0, num_rows, row_len, None)
        assert written == out.size, f"{written} bytes instead of {out.size}"
        return out.reshape(*values.shape[:-1], -1)

    return encode


def k_quant_type(name, value):
    """The type that files named Q4_K_M give a tensor, with their fallbacks for short rows."""
    if is_kept_exact(name, value):
        return GgmlType.F32
    sensitive = ("output.weight", "token_embd.weight")
    if name in sensitive or "ffn_down" in name or "attn_v" in name:
        candidates = [GgmlType.Q6_K, GgmlType.Q8_0, GgmlType.F16]
    else:
        candidates = [GgmlType.Q4_K, GgmlType.Q5_0, GgmlType.F16]
    row_len = value.shape[-1]
    return next(t for t in candidates if row_len % gguf.GGML_QUANT_SIZES[t][0] == 0)


def write_k_quant_gguf(name, folder, path, encode):
    config, tensors = load_folder(folder)
    arch = GGUF_ARCH[config["model_type"]]
    mostly_q4_k_m = 15
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("general.type", "model")
    writer.add_string("general.name", name)
    writer.add_quantization_version(2)
    writer.add_file_type(mostly_q4_k_m)
    add_hyperparameters(writer, arch, config)
    add_toy_vocabulary(writer, config["vocab_size"])
    for tensor, value in gguf_tensors(config, tensors).items():
        value = np.ascontiguousarray(value, np.float32)
        ggml_type = k_quant_type(tensor, value)
        if ggml_type == GgmlType.F32:
            data = value
        elif ggml_type == GgmlType.F16:
            data = value.astype(np.float16)
        else:
            data = encode(value, ggml_type)
        writer.add_tensor(tensor, data, raw_dtype=ggml_type)
    finish_gguf(writer)


def stage_kquant(out):
    encode = k_quant_encoder()
    for name in KQUANT_MODELS:
        path = out / "kquant" / name / f"{name}.q4_k_mix.gguf"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / name
            make_reference(name, folder, hidden_size=256)
            write_k_quant_gguf(name, folder, path, encode)
            golden = load_file(folder / "golden.safetensors")
        logits = write_golden_logits(path, golden["ids"])
        report(path, logits, golden["logits"])


def stage_blocks(out):
    """Random bytes are valid blocks of any type; only the f16 fields are set to numbers of sane size."""
    f16_offsets = {
        "Q4_0": [0],
        "Q4_1": [0, 2],
        "Q5_0": [0],
        "Q5_1": [0, 2],
        "Q8_0": [0],
        "Q4_K": [0, 2],
        "Q5_K": [0, 2],
        "Q6_K": [208],
    }
    num_blocks = 16
    random = np.random.default_rng(42)
    tensors = {}
    for name, offsets in f16_offsets.items():
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[GgmlType[name]]
        raw = random.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
        for offset in offsets:
            scales = (random.standard_normal(num_blocks) * 0.02).astype(np.float16)
            raw[:, offset : offset + 2] = scales.view(np.uint8).reshape(num_blocks, 2)
        values = dequantize(raw, GgmlType[name]).astype(np.float32)
        tensors[f"{name}.raw"] = raw
        tensors[f"{name}.f32"] = values.reshape(num_blocks, block_len)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "blocks.safetensors")


STAGES = {
    "reference": stage_reference,
    "gguf": stage_gguf,
    "kquant": stage_kquant,
    "blocks": stage_blocks,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write to; tests read tests/fixtures")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    for stage in arguments.stages:
        STAGES[stage](arguments.out)


if __name__ == "__main__":
    main()
