#!/usr/bin/env python3
"""Makes the model fixtures in tests/fixtures: tiny random models with the results they must give.

    python scripts/make_fixtures.py OUT [--stages reference gguf kquant dynamic blocks] [--models NAME …]

Stages, each of which needs only what the earlier ones wrote:

reference  tiny/NAME/: config.json, generation_config.json and model.safetensors of a random model, and
           golden.safetensors with what transformers computes for it in float32 on the CPU:
           ids [48], logits [48, vocab] and
           greedy [40] (8 prompt tokens and 32 generated ones). qwen3_moe and mixtral are drawn and
           computed by numpy, in float64.
gguf       tiny/NAME/NAME.TYPE.gguf, converted from the folder, and NAME.TYPE.golden.safetensors with the
           logits of a numpy forward pass over the dequantised weights of that very file.
           f32-legacy and q8_0-legacy are files from before attn_kv_b was split in two, q8_0-ollama is one of
           arch glm4moelite, in which two pairs of keys have changed places, and in q4_0-mixed the experts that
           all tokens go through are Q8_0.
kquant     kquant/NAME/NAME.q4_k_mix.gguf: models of width 256 with Q4_K, Q5_K, Q6_K and the type that
           stands in where a row is no multiple of 256, and their golden logits. Their float models are
           temporary.
dynamic    dynamic/NAME.dynamic.gguf: random blocks of the types of few bits, and their golden logits.
blocks     blocks.safetensors: random bytes of every block type and the values they decode to.

Versions that made the fixtures in the repository (Python 3.11); other versions may draw other weights:

    torch 2.9.1, transformers 5.23.0       stages reference (but for what numpy draws) and kquant
    xllamacpp 2026.10.11549                stage kquant, for its K-quant encoder
    gguf 0.19.0, safetensors 0.8.0, numpy 2.4.6

Nothing is downloaded: all weights are random. They are drawn so that mistakes show: norms are not 1,
biases not 0, and embeddings of tied models small enough that greedy output does not repeat one token.
"""

import argparse
import ctypes
import dataclasses
import json
import os
import tempfile
from pathlib import Path

import gguf
import numpy as np
import random_gguf
from gguf import GGMLQuantizationType as GgmlType
from gguf.quants import dequantize
from gguf.quants import quantize as gguf_quantize
from safetensors.numpy import load_file, save_file

VOCAB_SIZE = 288
NUM_LAYERS = 3
PROMPT_LEN = 48

# Which GGUF files of each model are worth their bytes in the repository. The f32 file needs no golden
# logits of its own: those of the folder hold for it. So does the f16 file, because the weights of these models are halves.
TINY_GGUF_TYPES = {
    "llama": ["f32", "q8_0"],
    "llama3": ["q4_0"],
    "mistral": [],
    "qwen2": ["q8_0"],
    "qwen3": [],
    "qwen3_moe": ["q8_0"],
    "mixtral": ["q8_0"],
    "gemma3": ["f32", "q8_0"],
    "smollm3": ["f32"],
    "granite": ["f16"],
    "phi3": ["f16"],
    "seed_oss": ["f16"],
    "glm4": ["f16"],
    "olmo3": ["f16"],
    "ministral3": ["f16"],
    "deepseek_v2_lite": ["q8_0", "q4_0", "f32-legacy", "q8_0-legacy", "q4_0-mixed"],
    "youtu": ["q8_0", "q4_0"],
    "glm4_moe_lite": ["q8_0", "q4_0", "q8_0-ollama"],
}
KQUANT_MODELS = ["llama", "qwen3", "deepseek_v2_lite", "youtu", "glm4_moe_lite"]

# GGUF architecture of each transformers model type.
GGUF_ARCH = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "smollm3": "smollm3",
    "granite": "granite",
    "phi3": "phi3",
    "seed_oss": "seed_oss",
    "glm4": "glm4",
    "olmo3": "olmo2",
    "ministral3": "mistral3",
    "deepseek_v2": "deepseek2",
    "youtu": "deepseek2",
    "glm4_moe_lite": "deepseek2",
}
OLLAMA_ARCH = "glm4moelite"
LATENT_ARCHS = ("deepseek2", OLLAMA_ARCH)
# Architectures that divide the weights of the chosen experts by their sum without a key that says so.
NORMALIZING_ARCHS = ("llama", "qwen3moe")

# Architectures whose files have the rows of rotated heads in another order than folders.
INTERLEAVING_ARCHS = ("llama", "smollm3", "granite", "mistral3")
# Those that rotate neighbouring values.
INTERLEAVED_ARCHS = (*INTERLEAVING_ARCHS, "glm4")
# Of four layers of SmolLM3, the last one rotates nothing.
SMOLLM3_PERIOD = 4
# Of six layers of Gemma 3, the last one attends to everything. The others have a base of their own, which GGUF files leave out.
GEMMA3_PERIOD = 6
GEMMA3_LOCAL_BASE = 10000.0

# Keys that transformers 5 leaves out of config.json, although other programs need them.
UNSAVED_KEYS = {
    "deepseek_v2_lite": {"scoring_func": "softmax"},
    "glm4_moe_lite": {
        "first_k_dense_replace": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}

# Router weights are larger than others, so that tokens differ in their experts.
ROUTER_GAIN = 3.0


def model_config(name, hidden_size):
    """The transformers configuration of a tiny model.

    Each one has what makes its architecture special: scaled rotary frequencies (llama3), heads that are
    not hidden / heads wide (llama3, mistral, qwen3), tied embeddings, biases, norms of q and k, latent
    attention with one projection of queries or two, experts chosen by either kind of probability.
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

    def latent(qk_nope_head_dim):
        return {
            "kv_lora_rank": 64,
            "qk_nope_head_dim": qk_nope_head_dim,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "num_key_value_heads": 4,
        }

    experts = {"moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
    deepseek = {
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 64,
        },
    }
    youtu = {
        "q_lora_rank": 96,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope(1.6e6),
    }
    glm = {
        "q_lora_rank": 96,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "rope_parameters": rope(1e6),
    }
    # A window that is shorter than the prompt, and heads that are not hidden / heads wide.
    kinds = ["sliding_attention"] * (GEMMA3_PERIOD - 1) + ["full_attention"]
    gemma3 = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": GEMMA3_PERIOD,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 7,
        "layer_types": kinds,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": rope(GEMMA3_LOCAL_BASE),
        },
    }
    smollm3 = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": SMOLLM3_PERIOD,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope(2e6),
    }
    # Small ones, for what is special in them.
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    granite = {
        "embedding_multiplier": 0.5,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.8,
        "logits_scaling": 2.0,
        "rope_parameters": rope(10000.0),
    }
    # Every sequence is longer than the context before scaling, so the long factors count for all tokens.
    phi3 = {
        "original_max_position_embeddings": 4,
        "sliding_window": 20,
        "rope_parameters": rope(10000.0)
        | {
            "rope_type": "longrope",
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2],
            "long_factor": [1.25, 3.0, 7.5],
        },
    }
    few_heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    seed_oss = few_heads | {"head_dim": 24, "attention_bias": True, "rope_parameters": rope(1e7)}
    glm4 = few_heads | {
        "head_dim": 24,
        "attention_bias": True,
        "rope_parameters": rope(10000.0) | {"partial_rotary_factor": 0.5},
    }
    # The layers with a window have a rotation without scaling. OLMo 2 is the same without windows.
    olmo3 = {
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": rope(500000.0) | {"rope_type": "linear", "factor": 4.0},
            "sliding_attention": rope(500000.0),
        },
    }
    olmo2 = {"rope_parameters": rope(500000.0) | {"rope_type": "linear", "factor": 4.0}}
    # Queries grow every eight positions.
    ministral3 = {
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": rope(1e6)
        | {
            "rope_type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    }
    config_class, special = {
        "ministral3": (transformers.Ministral3Config, small | ministral3),
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
        "deepseek_v2_lite": (transformers.DeepseekV2Config, latent(32) | experts | deepseek),
        "gemma3": (transformers.Gemma3TextConfig, gemma3),
        "smollm3": (transformers.SmolLM3Config, smollm3),
        "granite": (transformers.GraniteConfig, small | granite),
        "phi3": (transformers.Phi3Config, small | phi3),
        "seed_oss": (transformers.SeedOssConfig, small | seed_oss),
        "glm4": (transformers.Glm4Config, small | glm4),
        "olmo3": (transformers.Olmo3Config, small | olmo3),
        "olmo2": (transformers.Olmo2Config, small | olmo2),
        "youtu": (transformers.YoutuConfig, latent(32) | youtu),
        "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, latent(48) | experts | glm),
    }[name]
    return config_class(**(common | special))


def is_gemma(config):
    return config.model_type == "gemma3_text"


def draw_weights(model, seed):
    """Replaces all parameters by random ones of sensible size."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    embedding_std = 0.1 if model.config.tie_word_embeddings else 0.7
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                # Gemma adds the 1 itself.
                parameter.copy_(0.1 * noise + (0 if is_gemma(model.config) else 1))
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise * embedding_std)
            else:
                gain = ROUTER_GAIN if name.endswith("mlp.gate.weight") else 1.0
                parameter.copy_(noise * gain / np.sqrt(parameter.shape[-1]))
        if "f16" in TINY_GGUF_TYPES.get(model.config.model_type, []):
            for parameter in model.parameters():
                parameter.copy_(parameter.half())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.15 * torch.randn(buffer.shape, generator=generator))


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
    config_json = json.loads(config_path.read_text()) | UNSAVED_KEYS.get(name, {})
    config_path.write_text(json.dumps(config_json, indent=1, sort_keys=True))

    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB_SIZE, (1, PROMPT_LEN), generator=generator)
    with torch.no_grad():
        output = model(ids, use_cache=False)
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
        "greedy": generated.sequences.numpy().astype(np.int64)[0],
    }
    save_file(golden, folder / "golden.safetensors")
    print(f"{folder}: greedy {golden['greedy'][8:18].tolist()}")
    if name == "olmo3":
        make_olmo2_golden(folder, model, ids)
    if name in ("olmo3", "ministral3"):
        keep_halves(folder / "model.safetensors")


def keep_halves(path):
    """The weights as the halves that they are."""
    halves = {name: value.astype(np.float16) for name, value in load_file(path).items()}
    save_file(halves, path, {"format": "pt"})


def make_olmo2_golden(folder, model, ids):
    """OLMo 2's results with OLMo 3's weights, in the same folder."""
    import torch
    import transformers

    older = transformers.AutoModelForCausalLM.from_config(
        model_config("olmo2", model.config.hidden_size), attn_implementation="eager"
    )
    older = older.float().eval()
    older.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = older(ids, use_cache=False).logits[0].numpy()
        greedy = ids[:, :8]
        while greedy.shape[1] < 40:
            best = older(greedy, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            greedy = torch.cat([greedy, best], 1)
    golden = {"ids": ids.numpy().astype(np.int64)[0], "logits": logits, "greedy": greedy[0].numpy().astype(np.int64)}
    save_file(golden, folder / "olmo2.golden.safetensors")


QWEN3_MOE_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "decoder_sparse_step": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}


# Two layers and four experts, which are as wide as config.json says of a network without experts.
MIXTRAL_CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "model_type": "mixtral",
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCAB_SIZE,
}

# Models that numpy draws and computes, without transformers.
NUMPY_CONFIGS = {"qwen3_moe": QWEN3_MOE_CONFIG, "mixtral": MIXTRAL_CONFIG}

# What Mixtral's folders call the parts of its experts, and what the other models' do.
MIXTRAL_NAMES = {
    "block_sparse_moe": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}


def draw_numpy_weights(config, random):
    """Random weights under the names that Qwen 3 MoE has in transformers."""
    hidden, head_dim = config["hidden_size"], head_dim_of(config)
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width, num_experts = width_of_experts(config), num_experts_of(config)
    has_head_norms = config["model_type"] == "qwen3_moe"

    def matrix(rows, columns, std):
        return (random.standard_normal((rows, columns)) * std).astype(np.float32)

    def projection(rows, columns, gain=1.0):
        return matrix(rows, columns, gain / np.sqrt(columns))

    def norm(length):
        return (1 + 0.1 * random.standard_normal(length)).astype(np.float32)

    weights = {
        "model.embed_tokens": matrix(config["vocab_size"], hidden, 0.7),
        "lm_head": projection(config["vocab_size"], hidden),
        "model.norm": norm(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm": norm(hidden),
            prefix + "post_attention_layernorm": norm(hidden),
            prefix + "self_attn.q_proj": projection(num_heads * head_dim, hidden),
            prefix + "self_attn.k_proj": projection(num_kv_heads * head_dim, hidden),
            prefix + "self_attn.v_proj": projection(num_kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj": projection(hidden, num_heads * head_dim),
        }
        if has_head_norms:
            weights |= {
                prefix + "self_attn.q_norm": norm(head_dim),
                prefix + "self_attn.k_norm": norm(head_dim),
            }
        weights[prefix + "mlp.gate"] = projection(num_experts, hidden, ROUTER_GAIN)
        for expert in range(num_experts):
            weights |= {
                f"{prefix}mlp.experts.{expert}.gate_proj": projection(width, hidden),
                f"{prefix}mlp.experts.{expert}.up_proj": projection(width, hidden),
                f"{prefix}mlp.experts.{expert}.down_proj": projection(hidden, width),
            }
    return {name + ".weight": value for name, value in weights.items()}


def own_name(config, name):
    """The name of a tensor in the model's own folders."""
    if config["model_type"] != "mixtral":
        return name
    theirs = {ours: theirs for theirs, ours in MIXTRAL_NAMES.items()}
    return ".".join(theirs.get(part, part) for part in name.split("."))


def make_numpy_reference(config, folder):
    """Writes a model of NUMPY_CONFIGS and its golden results to `folder`."""
    random = np.random.default_rng(1234)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")
    weights = draw_numpy_weights(config, random)
    weights = {own_name(config, name): value for name, value in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    ids = random.integers(3, VOCAB_SIZE, PROMPT_LEN).astype(np.int64)
    with tempfile.TemporaryDirectory() as temporary:
        # A file of type f32 has the folder's weights.
        path = Path(temporary) / "exact.gguf"
        write_gguf(folder, path, "f32")
        logits = forward(path, ids).astype(np.float32)
        greedy = ids[:8].tolist()
        margins = []
        while len(greedy) < 40:
            last = forward(path, np.array(greedy))[-1]
            first, second = np.argsort(-last)[:2]
            margins.append(last[first] - last[second])
            greedy.append(int(first))
    greedy = np.array(greedy, np.int64)
    save_file({"ids": ids, "logits": logits, "greedy": greedy}, folder / "golden.safetensors")
    print(f"{folder}: greedy {greedy[8:18].tolist()}, smallest margin {min(margins):.1e}")


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
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
# Phi 3 and GLM 4 have some projections in one, GLM 4 norms after attention and feed-forward networks.
LAYER_NAMES |= {
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
# Gemma 3 has norms after attention and feed-forward networks as well, and another name for those before the latter.
GEMMA3_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SEED_OSS_NAMES = {"post_attention_layernorm": "post_attention_norm"}
OLMO_NAMES = SEED_OSS_NAMES | {"post_feedforward_layernorm": "post_ffw_norm"}
OWN_NAMES = {"gemma3_text": GEMMA3_NAMES, "seed_oss": SEED_OSS_NAMES, "olmo3": OLMO_NAMES}
ROUTER_BIAS = ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias")


def load_folder(folder):
    """The config.json and the float32 tensors of a Hugging Face folder, under the names of LAYER_NAMES."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")

    def common_name(name):
        return ".".join(MIXTRAL_NAMES.get(part, part) for part in name.split("."))

    return config, {common_name(name): tensor.astype(np.float32) for name, tensor in tensors.items()}


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


def split_kv_b(config, weight):
    """The two halves of attn_kv_b: keys, transposed, and values, [heads, …] each."""
    heads = weight.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
    num_key_rows = config["qk_nope_head_dim"]
    return heads[:, :num_key_rows].swapaxes(1, 2), heads[:, num_key_rows:]


def num_experts_of(config):
    keys = ("n_routed_experts", "num_experts", "num_local_experts")
    return next((config[key] for key in keys if config.get(key)), 0)


def width_of_experts(config):
    return config.get("moe_intermediate_size") or config["intermediate_size"]


def gguf_tensors(config, tensors, variant=""):
    """Names and values as a GGUF file of the model has them, in file order."""
    is_gemma3 = config["model_type"] == "gemma3_text"
    if is_gemma3:
        tensors = {n: value + 1 if n.endswith("norm.weight") else value for n, value in tensors.items()}
    names = LAYER_NAMES | OWN_NAMES.get(config["model_type"], {})
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
    if rope.get("rope_type") == "longrope":
        for which in ("long", "short"):
            out[f"rope_factors_{which}.weight"] = np.array(rope[f"{which}_factor"], np.float32)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, value in tensors.items():
            if not name.startswith(prefix):
                continue
            rest = name[len(prefix) :]
            if rest.startswith("mlp.experts."):
                continue
            if rest == ROUTER_BIAS[0]:
                out[f"blk.{layer}.{ROUTER_BIAS[1]}"] = value
                continue
            module, ending = rest.rsplit(".", 1)
            if module == "self_attn.kv_b_proj" and variant != "legacy":
                keys, values = split_kv_b(config, value)
                out[f"blk.{layer}.attn_k_b.weight"] = keys
                out[f"blk.{layer}.attn_v_b.weight"] = values
                continue
            if GGUF_ARCH[config["model_type"]] in INTERLEAVING_ARCHS and module in rotary_heads:
                value = interleave_rotary_rows(value, rotary_heads[module])
            out[f"blk.{layer}.{names[module]}.{ending}"] = value
        if f"{prefix}mlp.experts.0.gate_proj.weight" in tensors:
            for which in ("gate", "up", "down"):
                names = [
                    f"{prefix}mlp.experts.{expert}.{which}_proj.weight"
                    for expert in range(num_experts_of(config))
                ]
                out[f"blk.{layer}.ffn_{which}_exps.weight"] = np.stack([tensors[n] for n in names])
    return out


def add_hyperparameters(writer, arch, config, variant=""):
    def u32(key, value):
        writer.add_uint32(f"{arch}.{key}", int(value))

    def f32(key, value):
        writer.add_float32(f"{arch}.{key}", float(value))

    rope = config.get("rope_parameters") or config
    head_dim = head_dim_of(config)
    u32("block_count", config["num_hidden_layers"])
    u32("context_length", config["max_position_embeddings"])
    u32("embedding_length", config["hidden_size"])
    u32("feed_forward_length", config["intermediate_size"])
    u32("vocab_size", config["vocab_size"])
    u32("attention.head_count", config["num_attention_heads"])
    f32("attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    rope = rope.get("full_attention", rope)
    f32("rope.freq_base", rope.get("rope_theta", 10000.0))
    if arch in LATENT_ARCHS:
        add_latent_hyperparameters(writer, arch, config, variant)
        return
    if num_experts_of(config):
        u32("expert_count", num_experts_of(config))
        u32("expert_used_count", config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            u32("expert_feed_forward_length", config["moe_intermediate_size"])
    u32("attention.head_count_kv", config["num_key_value_heads"])
    if arch == "gemma3":
        u32("attention.sliding_window", config["sliding_window"])
        writer.add_string(f"{arch}.rope.scaling.type", "linear")
        f32("rope.scaling.factor", rope["factor"])
    else:
        u32("rope.dimension_count", int(head_dim * rope.get("partial_rotary_factor", 1)))
    if arch == "olmo2":
        u32("attention.sliding_window", config["sliding_window"])
        has_window = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array(f"{arch}.attention.sliding_window_pattern", has_window)
        writer.add_string(f"{arch}.rope.scaling.type", "linear")
        f32("rope.scaling.factor", rope["factor"])
    if arch == "mistral3":
        writer.add_string(f"{arch}.rope.scaling.type", "yarn")
        f32("rope.scaling.factor", rope["factor"])
        u32("rope.scaling.original_context_length", rope["original_max_position_embeddings"])
        f32("rope.scaling.yarn_beta_fast", rope["beta_fast"])
        f32("rope.scaling.yarn_beta_slow", rope["beta_slow"])
        f32("rope.scaling.yarn_log_multiplier", rope["mscale_all_dim"])
        f32("attention.temperature_scale", rope["llama_4_scaling_beta"])
    if arch == "granite":
        f32("embedding_scale", config["embedding_multiplier"])
        f32("residual_scale", config["residual_multiplier"])
        f32("attention.scale", config["attention_multiplier"])
        f32("logit_scale", config["logits_scaling"])
    if arch == "phi3":
        # The kind of scaling is omitted: the tensors show it.
        u32("attention.sliding_window", config["sliding_window"])
        original = config["original_max_position_embeddings"]
        u32("rope.scaling.original_context_length", original)
        factor = config["max_position_embeddings"] / original
        f32("rope.scaling.attn_factor", np.sqrt(1 + np.log(factor) / np.log(original)))
    u32("attention.key_length", head_dim)
    u32("attention.value_length", head_dim)


def add_latent_hyperparameters(writer, arch, config, variant):
    """What the keys of lengths mean depends on the age of the file.

    Today key_length and value_length are those of the cached row, and those of heads end in _mla.
    """

    def u32(key, value):
        writer.add_uint32(f"{arch}.{key}", int(value))

    def f32(key, value):
        writer.add_float32(f"{arch}.{key}", float(value))

    rope_dim, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    head = (config["qk_nope_head_dim"] + rope_dim, config["v_head_dim"])
    row = (rank + rope_dim, rank)
    # llama.cpp wants the 0 where queries have one projection.
    u32("attention.q_lora_rank", config.get("q_lora_rank") or 0)
    u32("attention.kv_lora_rank", rank)
    u32("rope.dimension_count", rope_dim)
    num_heads = config["num_attention_heads"]
    num_kv_heads, lengths, mla_lengths = {
        "": (1, row, head),
        "mixed": (1, row, head),
        "legacy": (num_heads, head, None),
        "ollama": (num_heads, head, row),
    }[variant]
    u32("attention.head_count_kv", num_kv_heads)
    u32("attention.key_length", lengths[0])
    u32("attention.value_length", lengths[1])
    if mla_lengths:
        u32("attention.key_length_mla", mla_lengths[0])
        u32("attention.value_length_mla", mla_lengths[1])

    num_experts = num_experts_of(config)
    num_dense = config["first_k_dense_replace"] if num_experts else config["num_hidden_layers"]
    u32("leading_dense_block_count", num_dense)
    u32("expert_feed_forward_length", config.get("moe_intermediate_size", config["intermediate_size"]))
    u32("expert_shared_count", config.get("n_shared_experts", 0))
    if num_experts:
        u32("expert_count", num_experts)
        u32("expert_used_count", config["num_experts_per_tok"])
        f32("expert_weights_scale", config["routed_scaling_factor"])
        u32("expert_group_count", config["n_group"])
        u32("expert_group_used_count", config["topk_group"])
        if config["norm_topk_prob"]:
            writer.add_bool(f"{arch}.expert_weights_norm", True)
        u32("expert_gating_func", {"softmax": 1, "sigmoid": 2}[config["scoring_func"]])
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        writer.add_string(f"{arch}.rope.scaling.type", "yarn")
        f32("rope.scaling.factor", rope["factor"])
        u32("rope.scaling.original_context_length", rope["original_max_position_embeddings"])
        f32("rope.scaling.yarn_beta_fast", rope["beta_fast"])
        f32("rope.scaling.yarn_beta_slow", rope["beta_slow"])
        f32("rope.scaling.yarn_log_multiplier", 0.1 * rope["mscale_all_dim"])


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
    return value.ndim < 2 or name.endswith(("_norm.weight", "ffn_gate_inp.weight"))


def finish_gguf(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(folder, path, type_name):
    """Converts a folder to a GGUF file whose matrices have one type or, if they are mixed, two: q4_0, f32-legacy."""
    type_name, _, variant = type_name.partition("-")
    config, tensors = load_folder(folder)
    arch = OLLAMA_ARCH if variant == "ollama" else GGUF_ARCH[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("general.type", "model")
    writer.add_string("general.name", config["model_type"])
    writer.add_quantization_version(2)
    add_hyperparameters(writer, arch, config, variant)
    add_toy_vocabulary(writer, config["vocab_size"])
    writer.add_add_bos_token(False)
    wanted = GgmlType[type_name.upper()]
    for name, value in gguf_tensors(config, tensors, variant).items():
        ggml_type = GgmlType.F32 if is_kept_exact(name, value) else wanted
        if variant == "mixed" and "_shexp." in name:
            ggml_type = GgmlType.Q8_0
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

    def number(self, key, default=None):
        """The value of a key of the architecture; without a default it has to be there."""
        field = self.fields.get(f"{self.arch}.{key}")
        if field is None and default is not None:
            return default
        return field.contents()


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


def rotate_first(x, frequencies, factor, interleaved):
    """The same of the first values alone, as many as there are frequencies for, which become `factor` times as long."""
    rotated, rest = np.split(x, [2 * len(frequencies)], axis=-1)
    return np.concatenate([factor * rotate(rotated, frequencies, interleaved), rest], axis=-1)


def softmax(x):
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def attention(query, key, value, scale, window=None):
    """Causal attention; query [heads, tokens, head_dim], key and value with fewer heads.

    With a window, a token attends to itself and the window - 1 tokens before it.
    """
    group = query.shape[0] // key.shape[0]
    key, value = np.repeat(key, group, 0), np.repeat(value, group, 0)
    scores = query @ key.transpose(0, 2, 1) * scale
    num_tokens = query.shape[1]
    visible = np.tril(np.ones((num_tokens, num_tokens), bool))
    if window:
        visible &= ~np.tril(visible, -window)
    return softmax(np.where(visible, scores, -np.inf)) @ value


def rotary_frequencies(model, is_local=False):
    """Frequencies of the pairs, and the factor that yarn puts on queries and keys together."""
    dim = model.number("rope.dimension_count", model.number("attention.key_length"))
    base = GEMMA3_LOCAL_BASE if is_local else model.number("rope.freq_base")
    pairs = np.arange(dim // 2)
    frequencies = base ** (-2 * pairs / dim)
    if "rope_freqs.weight" in model:
        return frequencies / model["rope_freqs.weight"], 1.0
    if is_local:
        return frequencies, 1.0
    if "rope_factors_long.weight" in model:
        return frequencies / model["rope_factors_long.weight"], model.number("rope.scaling.attn_factor")
    if model.number("rope.scaling.type", "none") == "linear":
        return frequencies / model.number("rope.scaling.factor"), 1.0
    if model.number("rope.scaling.type", "none") != "yarn":
        return frequencies, 1.0
    factor = model.number("rope.scaling.factor")
    original = model.number("rope.scaling.original_context_length")

    def pair_with_rotations(rotations):
        return dim * np.log(original / (2 * np.pi * rotations)) / (2 * np.log(base))

    low = max(np.floor(pair_with_rotations(model.number("rope.scaling.yarn_beta_fast", 32.0))), 0)
    high = min(np.ceil(pair_with_rotations(model.number("rope.scaling.yarn_beta_slow", 1.0))), dim - 1)
    share = np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
    mscale = 1 + model.number("rope.scaling.yarn_log_multiplier", 0.0) * np.log(max(factor, 1))
    return frequencies * (share / factor + 1 - share), mscale**2


def grouped_attention(model, prefix, h, eps):
    """Attention with keys and values of fewer heads; h and what it returns have [tokens, …]."""
    layer = int(prefix.split(".")[1])
    is_local = model.arch == "gemma3" and layer % GEMMA3_PERIOD != GEMMA3_PERIOD - 1
    window = model.number("attention.sliding_window") if is_local or model.arch == "phi3" else None
    frequencies, factor = rotary_frequencies(model, is_local)
    interleaved = model.arch in INTERLEAVED_ARCHS
    is_rotated = model.arch != "smollm3" or layer % SMOLLM3_PERIOD != SMOLLM3_PERIOD - 1

    num_heads, num_kv_heads = model.number("attention.head_count"), model.number("attention.head_count_kv")
    together = {}
    if prefix + "attn_qkv.weight" in model:
        weight = model[prefix + "attn_qkv.weight"]
        rows = len(weight) // (num_heads + 2 * num_kv_heads)
        ends = np.cumsum([num_heads * rows, num_kv_heads * rows])
        together = dict(zip("qkv", np.split(weight, ends), strict=True))

    def project(which, heads):
        weight = together.get(which)
        y = h @ (model[f"{prefix}attn_{which}.weight"] if weight is None else weight).T
        if f"{prefix}attn_{which}.bias" in model:
            y = y + model[f"{prefix}attn_{which}.bias"]
        return y.reshape(len(h), heads, -1).transpose(1, 0, 2)

    query = project("q", num_heads)
    key, value = project("k", num_kv_heads), project("v", num_kv_heads)
    if prefix + "attn_q_norm.weight" in model:
        query = rms_norm(query, model[prefix + "attn_q_norm.weight"], eps)
        key = rms_norm(key, model[prefix + "attn_k_norm.weight"], eps)
    if is_rotated:
        query = rotate_first(query, frequencies, factor, interleaved)
        key = rotate_first(key, frequencies, factor, interleaved)
    scale = model.number("attention.scale", 1 / np.sqrt(query.shape[-1]))
    mixed = attention(query, key, value, scale, window)
    return mixed.transpose(1, 0, 2).reshape(len(h), -1)


def latent_projections(model, prefix, num_heads):
    """From the latent row to keys [heads, nope, rank] and to values [heads, value, rank]."""
    if prefix + "attn_k_b.weight" in model:
        return model[prefix + "attn_k_b.weight"].transpose(0, 2, 1), model[prefix + "attn_v_b.weight"]
    joint = model[prefix + "attn_kv_b.weight"]
    joint = joint.reshape(num_heads, -1, joint.shape[-1])
    num_key_rows = model.number("attention.key_length") - model.number("rope.dimension_count")
    return joint[:, :num_key_rows], joint[:, num_key_rows:]


def latent_attention(model, prefix, h, eps):
    """Attention of which a token keeps one row; here keys and values are made from it for each head."""
    num_heads = model.number("attention.head_count")
    frequencies, scale = rotary_frequencies(model)
    if prefix + "attn_q.weight" in model:
        query = h @ model[prefix + "attn_q.weight"].T
    else:
        low = rms_norm(h @ model[prefix + "attn_q_a.weight"].T, model[prefix + "attn_q_a_norm.weight"], eps)
        query = low @ model[prefix + "attn_q_b.weight"].T
    query = query.reshape(len(h), num_heads, -1).transpose(1, 0, 2)
    to_key, to_value = latent_projections(model, prefix, num_heads)
    rank, nope = to_key.shape[2], to_key.shape[1]
    row = h @ model[prefix + "attn_kv_a_mqa.weight"].T
    latent = rms_norm(row[:, :rank], model[prefix + "attn_kv_a_norm.weight"], eps)
    rotated = rotate(row[None, :, rank:], frequencies, interleaved=True)
    key = np.concatenate(
        [latent @ to_key.transpose(0, 2, 1), np.repeat(rotated, num_heads, 0)],
        axis=-1,
    )
    query = np.concatenate(
        [query[..., :nope], rotate(query[..., nope:], frequencies, interleaved=True)],
        axis=-1,
    )
    value = latent @ to_value.transpose(0, 2, 1)
    mixed = attention(query, key, value, scale / np.sqrt(query.shape[-1]))
    return mixed.transpose(1, 0, 2).reshape(len(h), -1)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def feed_forward(h, gate, up, down, activation=silu):
    return (activation(h @ gate.T) * (h @ up.T)) @ down.T


def choose_experts(model, prefix, h):
    """The experts of each token and their weights, [tokens, chosen] both."""
    logits = h @ model[prefix + "ffn_gate_inp.weight"].T
    has_bias = prefix + "exp_probs_b.bias" in model
    softmax_gate, sigmoid_gate = 1, 2
    gate = model.number("expert_gating_func", sigmoid_gate if has_bias else softmax_gate)
    scores = 1 / (1 + np.exp(-logits)) if gate == sigmoid_gate else softmax(logits)
    ranking = scores + model[prefix + "exp_probs_b.bias"] if has_bias else scores
    chosen = np.argsort(-ranking, -1, kind="stable")[:, : model.number("expert_used_count")]
    weights = np.take_along_axis(scores, chosen, -1)
    if model.number("expert_weights_norm", model.arch in NORMALIZING_ARCHS):
        weights = weights / weights.sum(-1, keepdims=True)
    return chosen, weights * (model.number("expert_weights_scale", 0.0) or 1.0)


def mixture_of_experts(model, prefix, h):
    chosen, weights = choose_experts(model, prefix, h)
    gates, ups, downs = (model[f"{prefix}ffn_{which}_exps.weight"] for which in ("gate", "up", "down"))
    out = np.zeros_like(h)
    for expert in range(len(gates)):
        tokens, places = np.nonzero(chosen == expert)
        y = feed_forward(h[tokens], gates[expert], ups[expert], downs[expert])
        out[tokens] += weights[tokens, places][:, None] * y
    if prefix + "ffn_gate_shexp.weight" in model:
        shared = (model[f"{prefix}ffn_{which}_shexp.weight"] for which in ("gate", "up", "down"))
        out += feed_forward(h, *shared)
    return out


def forward(path, ids):
    """Logits [tokens, vocab] of a GGUF file, in float64 throughout."""
    model = GgufModel(path)
    eps = model.number("attention.layer_norm_rms_epsilon")
    attend = latent_attention if model.arch in LATENT_ARCHS else grouped_attention
    activation = gelu_tanh if model.arch == "gemma3" else silu

    def post_norm(name, y):
        """What is added to x, through a norm of its own if there is one."""
        return rms_norm(y, model[name], eps) if name in model else y

    x = model["token_embd.weight"][ids]
    if model.arch == "gemma3":
        x = x * np.sqrt(x.shape[-1])
    x = x * model.number("embedding_scale", 1.0)
    residual_scale = model.number("residual_scale", 1.0)
    for layer in range(model.number("block_count")):
        prefix = f"blk.{layer}."
        h = rms_norm(x, model[prefix + "attn_norm.weight"], eps)
        y = attend(model, prefix, h, eps) @ model[prefix + "attn_output.weight"].T
        # Seed-OSS calls the norm before its networks like those after attention.
        is_only = prefix + "ffn_norm.weight" not in model
        y = y if is_only else post_norm(prefix + "post_attention_norm.weight", y)
        x = x + residual_scale * y
        h = rms_norm(x, model[prefix + ("post_attention_norm.weight" if is_only else "ffn_norm.weight")], eps)
        if prefix + "ffn_gate_inp.weight" in model:
            x = x + mixture_of_experts(model, prefix, h)
        else:
            up, down = model[prefix + "ffn_up.weight"], model[prefix + "ffn_down.weight"]
            has_gate = prefix + "ffn_gate.weight" in model
            gate, up = (model[prefix + "ffn_gate.weight"], up) if has_gate else np.split(up, 2)
            y = feed_forward(h, gate, up, down, activation)
            x = x + residual_scale * post_norm(prefix + "post_ffw_norm.weight", y)
    x = rms_norm(x, model["output_norm.weight"], eps)
    head = "output.weight" if "output.weight" in model else "token_embd.weight"
    return x @ model[head].T / model.number("logit_scale", 1.0)


def write_golden_logits(path, ids):
    """Writes what the file's own weights give, next to the file."""
    logits = forward(path, ids).astype(np.float32)
    save_file({"ids": ids, "logits": logits}, path.with_suffix(".golden.safetensors"))
    return logits


def stage_reference(out, models):
    for name in TINY_GGUF_TYPES:
        if name not in models:
            continue
        folder = out / "tiny" / name
        if name in NUMPY_CONFIGS:
            make_numpy_reference(NUMPY_CONFIGS[name], folder)
        else:
            make_reference(name, folder)


def stage_gguf(out, models):
    for name, types in TINY_GGUF_TYPES.items():
        if name not in models:
            continue
        folder = out / "tiny" / name
        golden = load_file(folder / "golden.safetensors")
        for type_name in types:
            path = folder / f"{name}.{type_name}.gguf"
            write_gguf(folder, path, type_name)
            if name in ("olmo3", "ministral3"):
                # The folder's results hold; numpy has neither norms of whole rows nor queries that grow.
                logits = golden["logits"]
            elif type_name in ("f32", "f16"):
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
    if "shexp" in name:
        # Those files have no Q5_K; it is here so that a model has all three.
        candidates = [GgmlType.Q5_K, GgmlType.Q5_1, GgmlType.F16]
    elif name in sensitive or "ffn_down" in name or "attn_v" in name:
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


def stage_kquant(out, models):
    encode = k_quant_encoder()
    for name in KQUANT_MODELS:
        if name not in models:
            continue
        path = out / "kquant" / name / f"{name}.q4_k_mix.gguf"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / name
            make_reference(name, folder, hidden_size=256)
            write_k_quant_gguf(name, folder, path, encode)
            golden = load_file(folder / "golden.safetensors")
        logits = write_golden_logits(path, golden["ids"])
        report(path, logits, golden["logits"])


def stage_dynamic(out, _models):
    """Random blocks of every type that files of few bits hold, a type for each matrix in turn."""
    small = {"layers": 2, "hidden": 256, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 64}
    small |= {"vocab": VOCAB_SIZE, "context": 512}
    experts = random_gguf.Experts(3, 2, 256)
    shapes = {
        "llama": dataclasses.replace(random_gguf.SHAPES["tinyllama"], **small),
        "qwen3_moe": dataclasses.replace(random_gguf.SHAPES["qwen3-30b-a3b"], **small | {"layers": 1}, experts=experts),
    }
    ids = np.random.default_rng(7).integers(3, VOCAB_SIZE, PROMPT_LEN)
    for name, shape in shapes.items():
        path = out / "dynamic" / f"{name}.dynamic.gguf"
        path.parent.mkdir(parents=True, exist_ok=True)
        random_gguf.write(path, shape, "dynamic", seed=1)
        write_golden_logits(path, ids)


def stage_blocks(out, _models):
    """Random bytes are valid blocks of any type; only the factors are set to numbers of sane size."""
    f16_offsets = {
        "Q4_0": [0],
        "Q4_1": [0, 2],
        "Q5_0": [0],
        "Q5_1": [0, 2],
        "Q8_0": [0],
        "Q4_K": [0, 2],
        "Q5_K": [0, 2],
        "Q6_K": [208],
        "Q2_K": [80, 82],
        "Q3_K": [108],
        "IQ4_NL": [0],
        "IQ4_XS": [0],
        "MXFP4": [],
        "IQ2_XXS": [0],
        "IQ2_XS": [0],
        "IQ2_S": [0],
        "IQ3_XXS": [0],
        "IQ3_S": [0],
        "IQ1_S": [0],
        "IQ1_M": [],
        "TQ1_0": [52],
        "TQ2_0": [64],
    }
    num_blocks = 6
    random = np.random.default_rng(42)
    tensors = {}
    for name, offsets in f16_offsets.items():
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[GgmlType[name]]
        raw = random.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
        for offset in offsets:
            scales = (random.standard_normal(num_blocks) * 0.02).astype(np.float16)
            raw[:, offset : offset + 2] = scales.view(np.uint8).reshape(num_blocks, 2)
        if name == "MXFP4":
            # The two exponents below the normal numbers as well.
            raw[2:, 0] = 112 + raw[2:, 0] % 16
            raw[:2, 0] = [0, 1]
        if name == "IQ1_M":
            # Four bits of the factor are the highest ones of each of four words.
            scales = (random.standard_normal(num_blocks) * 0.02).astype(np.float16).view(np.uint16)
            for word in range(4):
                nibbles = (scales >> (4 * word) & 15).astype(np.uint8)
                raw[:, 49 + 2 * word] = raw[:, 49 + 2 * word] & 15 | nibbles << 4
        values = dequantize(raw, GgmlType[name]).astype(np.float32)
        tensors[f"{name}.raw"] = raw
        tensors[f"{name}.f32"] = values.reshape(num_blocks, block_len)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "blocks.safetensors")


STAGES = {
    "reference": stage_reference,
    "gguf": stage_gguf,
    "kquant": stage_kquant,
    "dynamic": stage_dynamic,
    "blocks": stage_blocks,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write to; tests read tests/fixtures")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument(
        "--models", nargs="+", choices=TINY_GGUF_TYPES, default=list(TINY_GGUF_TYPES), metavar="NAME"
    )
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    for stage in arguments.stages:
        STAGES[stage](arguments.out, arguments.models)


if __name__ == "__main__":
    main()
