#!/usr/bin/env python3
"""Makes the fixtures of gpt-oss: a tiny random model in every form in which its weights are kept.

    python scripts/make_gpt_oss_fixture.py OUT

tiny/gpt_oss/        a folder with dense weights in half precision, and golden.safetensors with what transformers computes
                     for it in float32 on the CPU, as make_fixtures.py has it. gpt_oss.f16.gguf and gpt_oss.mxfp4.gguf
                     are the same weights.
tiny/gpt_oss_mxfp4/  the folder with experts in MXFP4, as the published ones have them.

The experts' weights are values of MXFP4 and the others halves and bfloat16 at once, so all formats have the same values
and one result. They are drawn so that mistakes show: activations are large enough to be clamped, the window is shorter
than the prompt, and the ramp of YaRN does not end at whole pairs.

Versions that made the fixtures in the repository (Python 3.11): torch 2.15.0, transformers 5.24.0, gguf 0.19.0.
"""

import argparse
import json
import os
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GgmlType
from gguf.quants import dequantize, quantize
from make_fixtures import (
    PROMPT_LEN,
    ROUTER_GAIN,
    VOCAB_SIZE,
    add_toy_vocabulary,
    finish_gguf,
)
from safetensors.numpy import save_file

NUM_EXPERTS = 4
HIDDEN = 32
INSIDE = 64
# Of what goes into the activation, a part is beyond its limits.
GATE_GAIN = 4.0
DOWN_GAIN = 0.3


def model_config():
    import transformers

    return transformers.GptOssConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=INSIDE,
        num_hidden_layers=2,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=7,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    )


def as_mxfp4(values):
    """The values of MXFP4 that come nearest, along the last dimension."""
    return dequantize(quantize(values, GgmlType.MXFP4), GgmlType.MXFP4).reshape(values.shape).astype(np.float32)


def draw_weights(model, seed):
    """Replaces all parameters by random ones that every format of the model can hold."""
    import torch

    random = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = random.standard_normal(tuple(parameter.shape)).astype(np.float32)
            if name.endswith(("gate_up_proj", "down_proj")):
                # Rows of a matrix are columns here.
                gain = GATE_GAIN if name.endswith("gate_up_proj") else DOWN_GAIN
                rows = np.ascontiguousarray(values.swapaxes(1, 2)) * gain / np.sqrt(values.shape[1])
                values = as_mxfp4(rows.astype(np.float32)).swapaxes(1, 2)
            elif "norm" in name:
                values = 1 + 0.1 * values
            elif name.endswith("sinks"):
                values = 2 * values
            elif name.endswith("bias"):
                values = 0.3 * values
            elif "embed_tokens" in name:
                values = 0.7 * values
            else:
                gain = ROUTER_GAIN if name.endswith("router.weight") else 1.0
                values = values * gain / np.sqrt(values.shape[-1])
            drawn = torch.from_numpy(np.ascontiguousarray(values, np.float32))
            parameter.copy_(drawn.bfloat16().half().float())


def write_config(model, folder, quantization=None):
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["GptOssForCausalLM"], "dtype": "float16"}
    if quantization:
        config |= {"dtype": "bfloat16", "quantization_config": quantization}
    path.write_text(json.dumps(config, indent=1, sort_keys=True))


def to_folder_blocks(values):
    """MXFP4 as folders have it: bytes of two neighbouring values, the first one in the lower half, and scales."""
    raw = quantize(values, GgmlType.MXFP4).reshape(*values.shape[:-1], -1, 17)
    scales, codes = raw[..., 0], raw[..., 1:]
    # GGUF has the first sixteen values of a block in the lower halves.
    in_order = np.concatenate([codes & 15, codes >> 4], axis=-1)
    return in_order[..., 0::2] | in_order[..., 1::2] << 4, np.ascontiguousarray(scales)


def mxfp4_folder(weights):
    out = {}
    for name, value in weights.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            rows = np.ascontiguousarray(value.swapaxes(1, 2))
            out[name + "_blocks"], out[name + "_scales"] = to_folder_blocks(rows)
        else:
            out[name] = value.astype(np.float16)
    return out


LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.router": "ffn_gate_inp",
}


def gguf_tensors(weights, num_layers):
    out = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    for layer in range(num_layers):
        theirs, ours = f"model.layers.{layer}.", f"blk.{layer}."
        for module, name in LAYER_NAMES.items():
            for ending in ("weight", "bias"):
                if f"{theirs}{module}.{ending}" in weights:
                    out[f"{ours}{name}.{ending}"] = weights[f"{theirs}{module}.{ending}"]
        out[ours + "attn_sinks.weight"] = weights[theirs + "self_attn.sinks"]
        experts = theirs + "mlp.experts."
        both = weights[experts + "gate_up_proj"].swapaxes(1, 2)
        both_biases = weights[experts + "gate_up_proj_bias"]
        for part, name in enumerate(("ffn_gate_exps", "ffn_up_exps")):
            out[f"{ours}{name}.weight"] = both[:, part::2]
            out[f"{ours}{name}.bias"] = both_biases[:, part::2]
        out[ours + "ffn_down_exps.weight"] = weights[experts + "down_proj"].swapaxes(1, 2)
        out[ours + "ffn_down_exps.bias"] = weights[experts + "down_proj_bias"]
    return out


def write_gguf(config, weights, path, expert_type):
    arch = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.GPT_OSS]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("general.type", "model")
    writer.add_string("general.name", "gpt_oss")
    writer.add_quantization_version(2)
    rope = config.rope_parameters
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    add_toy_vocabulary(writer, config.vocab_size)
    writer.add_add_bos_token(False)
    for name, value in gguf_tensors(weights, config.num_hidden_layers).items():
        value = np.ascontiguousarray(value, np.float32)
        is_exact = value.ndim < 2 or name.endswith((".bias", "ffn_gate_inp.weight"))
        own_type = GgmlType.F32 if is_exact else expert_type if "_exps" in name else GgmlType.F16
        data = value if is_exact else quantize(value, own_type)
        writer.add_tensor(name, data, raw_dtype=own_type)
    finish_gguf(writer)


def golden_of(model):
    import torch

    ids = torch.randint(3, VOCAB_SIZE, (1, PROMPT_LEN), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0]
        greedy = ids[0, :8].tolist()
        margins = []
        while len(greedy) < 40:
            last = model(torch.tensor([greedy]), use_cache=False).logits[0, -1]
            best = last.topk(2)
            margins.append(float(best.values[0] - best.values[1]))
            greedy.append(int(best.indices[0]))
    print(f"greedy {greedy[8:]}, smallest margin {min(margins):.1e}, logits of std {float(logits.std()):.2f}")
    return {
        "ids": ids.numpy().astype(np.int64)[0],
        "logits": logits.numpy(),
        "greedy": np.array(greedy, np.int64),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write to; tests read tests/fixtures")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(model_config(), attn_implementation="eager")
    model = model.float().eval()
    draw_weights(model, seed=1234)
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}

    dense, packed = arguments.out / "tiny" / "gpt_oss", arguments.out / "tiny" / "gpt_oss_mxfp4"
    for folder in (dense, packed):
        folder.mkdir(parents=True, exist_ok=True)
    golden = golden_of(model)
    save_file(golden, dense / "golden.safetensors")
    write_config(model, dense)
    halves = {name: np.ascontiguousarray(value.astype(np.float16)) for name, value in weights.items()}
    save_file(halves, dense / "model.safetensors", {"format": "pt"})
    write_config(model, packed, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    save_file(mxfp4_folder(weights), packed / "model.safetensors", {"format": "pt"})
    write_gguf(model.config, weights, dense / "gpt_oss.f16.gguf", GgmlType.F16)
    write_gguf(model.config, weights, dense / "gpt_oss.mxfp4.gguf", GgmlType.MXFP4)
    own = {name: golden[name] for name in ("ids", "logits")}
    save_file(own, dense / "gpt_oss.mxfp4.golden.safetensors")


if __name__ == "__main__":
    main()
