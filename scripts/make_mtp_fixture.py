#!/usr/bin/env python3
"""Makes the fixture of a model that drafts for itself: a tiny random GLM-4.7-Flash with its MTP block.

    python scripts/make_mtp_fixture.py OUT

tiny/mtp/  a folder with weights in half precision, and golden.safetensors with what transformers computes for the
           model and its decoder layer as the block, in double precision on the CPU:
           ids [24], logits [24, vocab] and greedy [40] as make_fixtures.py has them,
           mtp_logits [23, vocab], what the block predicts after the token after each of ids, and
           drafts [32, 3], the three tokens that the block predicts after the first 8, 9, … of greedy.

The block is what vLLM and SGLang compute: for the token at position i the projection of the norm of the embedding of token
i + 1 and of the norm of the model's last hidden state, which is after the model's own last norm; a decoder layer at
position i; a norm and a head. To continue, it gets its own state after that norm. Embedding and head are the model's.

Versions that made the fixture in the repository (Python 3.11): torch 2.15.0, transformers 5.24.0.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCAB_SIZE = 128
HIDDEN = 32
NUM_LAYERS = 2
PROMPT_LEN = 24
NUM_DRAFTED = 3
ROUTER_GAIN = 4.0


def model_config():
    import transformers

    # One layer more than the model has, which becomes the block.
    return transformers.Glm4MoeLiteConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=NUM_LAYERS + 1,
        mlp_layer_types=["dense", "sparse", "sparse"],
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )


def drawn(random, name, shape):
    """Random values that are halves."""
    values = random.standard_normal(shape)
    if "norm" in name:
        values = 1 + 0.1 * values
    elif name.endswith("e_score_correction_bias"):
        values = 0.15 * values
    elif "embed_tokens" in name:
        values = 0.7 * values
    else:
        gain = ROUTER_GAIN if name.endswith("mlp.gate.weight") else 1.0
        values = values * gain / np.sqrt(shape[-1])
    return values.astype(np.float16).astype(np.float64)


def draw_weights(model, random):
    import torch

    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            parameter.copy_(torch.from_numpy(drawn(random, name, tuple(parameter.shape))))


class Block:
    """The block, over all tokens of a sequence at once."""

    def __init__(self, model, random):
        import torch

        # The model runs this many of its layers.
        model.config.num_hidden_layers = NUM_LAYERS
        self.model, self.layer = model, model.model.layers[NUM_LAYERS]
        shapes = {
            "eh_proj": (HIDDEN, 2 * HIDDEN),
            "enorm": (HIDDEN,),
            "hnorm": (HIDDEN,),
            "shared_head.norm": (HIDDEN,),
        }
        own = {name: drawn(random, f"{name}.weight", shape) for name, shape in shapes.items()}
        # Their names do not say that they are norms.
        for name in ("enorm", "hnorm"):
            own[name] = (1 + 0.1 * random.standard_normal(HIDDEN)).astype(np.float16).astype(np.float64)
        self.own = {name: torch.from_numpy(value) for name, value in own.items()}

    def norm(self, name, x):
        eps = self.model.config.rms_norm_eps
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * self.own[name]

    def hidden(self, ids):
        import torch

        return self.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]

    def states(self, hidden, next_ids):
        """Of tokens with these hidden states that are followed by these, [tokens, hidden]."""
        import torch

        inner = self.model.model
        tokens = self.norm("enorm", inner.embed_tokens(torch.tensor(next_ids)))
        x = torch.cat([tokens, self.norm("hnorm", hidden)], dim=-1) @ self.own["eh_proj"].T
        num = len(next_ids)
        positions = torch.arange(num)[None]
        mask = torch.full((1, 1, num, num), float("-inf"), dtype=x.dtype).triu(1)
        rotation = inner.rotary_emb(x[None], positions)
        y = self.layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        return self.norm("shared_head.norm", y[0])

    def draft(self, ids):
        """Greedy tokens after all of ids, and the smallest margin of one."""
        import torch

        hidden, next_ids, margins = self.hidden(ids)[:-1], list(ids[1:]), []
        for _ in range(NUM_DRAFTED):
            state = self.states(hidden, next_ids)[-1:]
            best = self.model.lm_head(state)[0].topk(2)
            margins.append(float(best.values[0] - best.values[1]))
            next_ids.append(int(best.indices[0]))
            hidden = torch.cat([hidden, state])
        return next_ids[-NUM_DRAFTED:], min(margins)


def golden_of(block, random):
    import torch

    model = block.model
    ids = random.integers(3, VOCAB_SIZE, PROMPT_LEN).tolist()
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    mtp_logits = model.lm_head(block.states(block.hidden(ids)[:-1], ids[1:]))
    greedy, margins = ids[:8], []
    while len(greedy) < 40:
        best = model(torch.tensor([greedy]), use_cache=False).logits[0, -1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        greedy.append(int(best.indices[0]))
    drafts = [block.draft(greedy[:num]) for num in range(8, 40)]
    print(f"greedy {greedy[8:]}, smallest margin {min(margins):.1e}")
    print(f"drafts {[tokens for tokens, _ in drafts]}, smallest margin {min(margin for _, margin in drafts):.1e}")
    return {
        "ids": np.array(ids, np.int64),
        "logits": logits.numpy().astype(np.float32),
        "greedy": np.array(greedy, np.int64),
        "mtp_logits": mtp_logits.numpy().astype(np.float32),
        "drafts": np.array([tokens for tokens, _ in drafts], np.int64),
    }


def folder_tensors(block):
    """The names of published folders, in which each expert has matrices of its own."""
    out = {}
    for name, value in block.model.state_dict().items():
        value = value.numpy().astype(np.float16)
        if name.endswith("mlp.experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, both in enumerate(value):
                out[f"{prefix}{expert}.gate_proj.weight"], out[f"{prefix}{expert}.up_proj.weight"] = np.split(both, 2)
        elif name.endswith("mlp.experts.down_proj"):
            for expert, own in enumerate(value):
                out[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = own
        else:
            out[name] = value
    for name, value in block.own.items():
        out[f"model.layers.{NUM_LAYERS}.{name}.weight"] = value.numpy().astype(np.float16)
    return {name: np.ascontiguousarray(value) for name, value in out.items()}


def write_config(model, folder):
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "dtype": "float16",
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse"],
        "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    path.write_text(json.dumps(config, indent=1, sort_keys=True))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write to; tests read tests/fixtures")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    # Of the first seeds, the one whose smallest margins are the widest: others leave a choice to the last digits.
    random = np.random.default_rng(50)
    # Not all implementations compute in double precision.
    model = transformers.AutoModelForCausalLM.from_config(
        model_config(), attn_implementation="eager", experts_implementation="eager"
    )
    model = model.double().eval()
    draw_weights(model, random)
    folder = arguments.out / "tiny" / "mtp"
    folder.mkdir(parents=True, exist_ok=True)
    block = Block(model, random)
    with torch.no_grad():
        save_file(golden_of(block, random), folder / "golden.safetensors")
    save_file(folder_tensors(block), folder / "model.safetensors", {"format": "pt"})
    write_config(model, folder)


if __name__ == "__main__":
    main()
