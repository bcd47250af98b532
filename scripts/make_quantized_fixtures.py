#!/usr/bin/env python3
"""Makes tests/fixtures/quantized.safetensors: a small matrix in each form in which other programs keep quantised
weights, with the values that they stand for.

    python scripts/make_quantized_fixtures.py tests/fixtures/quantized.safetensors

Codes, zeros and scales are drawn at random, the values are computed from them in single precision, and then they are
packed as each format defines it; so nothing here unpacks. A tensor's name is CASE/NAME, with NAME as in a model's file;
CASE/golden has the values. The metadata of the file has the quantisation_config of each case, as JSON.

The forms were compared once to other programs' readers of them: compressed-tensors 0.20.0, transformers 5.24.0 (FP8,
MXFP4), bitsandbytes, AutoAWQ, GPTQModel. numpy 2.4.6, ml_dtypes and safetensors 0.8.0 made the file.
"""

import argparse
import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

MODULE = "model.layers.0.mlp.up_proj"
ROWS, COLS = 16, 64
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

random = np.random.default_rng(33)
tensors, configs = {}, {}


def case(name, config, golden, module=MODULE, **parts):
    """A case: parts by the end of their names."""
    configs[name] = config
    tensors[f"{name}/golden"] = np.ascontiguousarray(golden, np.float32)
    for ending, part in parts.items():
        separator = "" if ending.startswith("_") else "."
        part = np.ascontiguousarray(part) if np.ndim(part) else np.asarray(part)
        tensors[f"{name}/{module}{separator}{ending}"] = part


def pack(codes, bits):
    """Rows of codes into rows of words, the first code in the lowest bits, without gaps."""
    bit = (codes[..., None].astype(np.uint64) >> np.arange(bits, dtype=np.uint64)) & 1
    flat = bit.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    flat = np.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % 32)])
    words = flat.reshape(*flat.shape[:-1], -1, 32) << np.arange(32, dtype=np.uint64)
    return words.sum(-1).astype(np.uint32).view(np.int32)


def scales(*shape, dtype=np.float16):
    return (random.uniform(0.002, 0.02, shape) * random.choice([-1, 1], shape)).astype(dtype)


def draw(bits, groups, zeros=None, dtype=np.float16):
    """Codes [rows, cols], zeros and scales [rows, groups], of which groups of columns have one."""
    codes = random.integers(0, 1 << bits, (ROWS, COLS))
    if zeros is None:
        zeros = random.integers(0, 1 << bits, (ROWS, groups))
    else:
        zeros = np.full((ROWS, groups), zeros)
    return codes, zeros, scales(ROWS, groups, dtype=dtype)


def values(codes, zeros, scale, group):
    """group: the group of each column."""
    return (codes - zeros[:, group]).astype(np.float32) * scale.astype(np.float32)[:, group]


def gptq(name, bits, zero, size, order=False, v2=False, listed=False, stored_zeros=True, **config):
    groups = COLS // size
    codes, zeros, scale = draw(bits, groups, zero)
    group = np.arange(COLS) // size
    if order:
        group = random.permutation(group)
    # Words go along the columns of the matrix, which are the rows of the tensor.
    parts = {"qweight": pack(codes, bits).T, "scales": scale.T}
    if stored_zeros:
        # The first format has one less, which its writers subtract from whole words where they can.
        less = 0 if v2 else np.ones_like(zeros)
        if 32 % bits == 0:
            less = pack(np.broadcast_to(less, zeros.shape).T, bits).view(np.uint32)
            parts["qzeros"] = (pack(zeros.T, bits).view(np.uint32) - less).view(np.int32)
        else:
            parts["qzeros"] = pack(((zeros - less) % (1 << bits)).T, bits)
    if order or listed:
        parts["g_idx"] = group.astype(np.int32)
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": order, **config}
    if v2:
        config["checkpoint_format"] = "gptq_v2"
    case(name, config, values(codes, zeros, scale, group), **parts)


def awq(name, zero, size):
    groups = COLS // size
    codes, zeros, scale = draw(4, groups, zero)

    def interleaved(table):
        """[.., rows] into words of eight rows."""
        rows = table.reshape(*table.shape[:-1], -1, 8)[..., AWQ_ORDER]
        return pack(rows.reshape(table.shape), 4)

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    golden = values(codes, zeros, scale, np.arange(COLS) // size)
    case(name, config, golden, qweight=interleaved(codes.T), qzeros=interleaved(zeros.T), scales=scale.T)


def compressed(name, bits, zero, groups, dtype, order=False, **weights):
    codes, zeros, scale = draw(bits, groups, zero, dtype)
    group = np.arange(COLS) * groups // COLS
    parts = {}
    if order:
        group = random.permutation(group)
        parts["weight_g_idx"] = group.astype(np.int32)
    if zero is None:
        parts["weight_zero_point"] = pack(zeros.T, bits).T
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": bits, "type": "int", **weights}}},
    }
    shape = np.array([ROWS, COLS], np.int64)
    golden = values(codes, zeros, scale, group)
    case(name, config, golden, weight_packed=pack(codes, bits), weight_scale=scale, weight_shape=shape, **parts)


def int8(name, dtype, per_channel=True):
    codes = random.integers(-128, 128, (ROWS, COLS)).astype(np.int8)
    scale = np.abs(scales(ROWS if per_channel else 1, 1, dtype=dtype))
    group = {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "dynamic": True}}
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
    }
    golden = codes.astype(np.float32) * scale.astype(np.float32)
    case(name, config, golden, weight=codes, weight_scale=scale)


def fp8(name, scale, ending, config, module=MODULE, shape=(ROWS, COLS), dtype=ml_dtypes.float8_e4m3fn):
    """scale: of a shape that divides that of the weights."""
    weight = random.normal(0, 40, shape).astype(dtype)
    if scale is None:
        case(name, config, weight.astype(np.float32), module, **{ending: weight})
        return
    spread = scale.astype(np.float32).reshape(scale.shape + (1,) * (weight.ndim - scale.ndim))
    for axis in range(weight.ndim):
        spread = np.repeat(spread, weight.shape[axis] // spread.shape[axis], axis)
    parts = {"weight": weight, ending: scale}
    case(name, config, weight.astype(np.float32) * spread, module, **parts)


def mxfp4(name, exponents, blocks=True, shape=(ROWS, COLS), module=MODULE):
    codes = random.integers(0, 16, shape).astype(np.uint8)
    exponent = random.integers(*exponents, (*shape[:-1], shape[-1] // 32)).astype(np.uint8)
    golden = FP4[codes] * np.exp2(np.repeat(exponent, 32, -1).astype(np.float32) - 127)
    # The even value is in the lower half.
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    if blocks:
        packed = packed.reshape(*shape[:-1], shape[-1] // 32, 16)
        case(name, {"quant_method": "mxfp4"}, golden, module, _blocks=packed, _scales=exponent)
    else:
        config = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
        case(name, config, golden, module, weight_packed=packed, weight_scale=exponent)


def nvfp4(name, is_modelopt):
    codes = random.integers(0, 16, (ROWS, COLS)).astype(np.uint8)
    scale = random.uniform(1, 400, (ROWS, COLS // 16)).astype(ml_dtypes.float8_e4m3fn)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    # A power of two, so that it does not matter in which order one multiplies or divides.
    each = np.repeat(scale.astype(np.float32), 16, 1)
    golden = FP4[codes] * (each * np.float32(2**-12))
    if is_modelopt:
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        case(name, config, golden, weight=packed, weight_scale=scale, weight_scale_2=np.float32(2**-12))
    else:
        config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
        total = np.array([2**12], np.float32)
        case(name, config, golden, weight_packed=packed, weight_scale=scale, weight_global_scale=total)


def bitsandbytes(name, quant_type, nested):
    """Blocks of 32 values; scales in blocks of 8. The code book comes with the file."""
    book = np.sort(random.uniform(-1, 1, 16)).astype(np.float32)
    codes = random.integers(0, 16, ROWS * COLS).astype(np.uint8)
    num_blocks = ROWS * COLS // 32
    state = {"quant_type": quant_type, "blocksize": 32, "dtype": "bfloat16", "shape": [ROWS, COLS]}
    parts = {"weight.quant_map": book}
    if nested:
        scale_book = np.sort(random.uniform(-1, 1, 256)).astype(np.float32)
        scale_codes = random.integers(0, 256, num_blocks).astype(np.uint8)
        scale_scales = random.uniform(0.005, 0.01, num_blocks // 8).astype(np.float32)
        offset = np.float32(0.0371)
        scale = scale_book[scale_codes] * np.repeat(scale_scales, 8) + offset
        state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": float(offset)}
        parts |= {"weight.absmax": scale_codes, "weight.nested_absmax": scale_scales}
        parts["weight.nested_quant_map"] = scale_book
    else:
        scale = random.uniform(0.02, 0.06, num_blocks).astype(np.float32)
        parts["weight.absmax"] = scale
    golden = (book[codes] * np.repeat(scale, 32)).reshape(ROWS, COLS)
    # The even value is in the upper half.
    parts["weight"] = (codes[0::2] << 4 | codes[1::2]).reshape(-1, 1)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    parts[f"weight.quant_state.bitsandbytes__{quant_type}"] = text
    case(name, {"quant_method": "bitsandbytes", "load_in_4bit": True}, golden, **parts)


def bitsandbytes_int8(name):
    codes = random.integers(-127, 128, (ROWS, COLS)).astype(np.int8)
    largest = random.uniform(0.1, 0.4, ROWS).astype(np.float32)
    golden = codes.astype(np.float32) * (largest * np.float32(1 / 127))[:, None]
    parts = {"weight": codes, "SCB": largest, "weight_format": np.uint8(0)}
    case(name, {"quant_method": "bitsandbytes", "load_in_8bit": True}, golden, **parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    out = parser.parse_args().out

    gptq("gptq", 4, 8, 32, sym=True, listed=True)
    gptq("gptq_zeros", 4, None, 32, sym=False)
    gptq("gptq_v2", 4, None, 32, v2=True, sym=False)
    gptq("gptq_without_zeros", 4, 8, 64, stored_zeros=False, sym=True)
    gptq("gptq_ordered", 4, 8, 32, order=True, sym=True)
    gptq("gptq_small_groups", 4, 8, 16, sym=True)
    gptq("gptq_2_bits", 2, 2, 32, sym=True)
    gptq("gptq_3_bits", 3, None, 32, sym=False)
    gptq("gptq_8_bits", 8, 128, 32, sym=True)
    gptq("gptq_8_bits_zeros", 8, None, 32, sym=False)
    awq("awq", None, 32)
    awq("awq_one_group", 8, 64)
    compressed("w4a16", 4, 8, 2, np.float16, strategy="group", group_size=32)
    compressed("w4a16_bf16", 4, 8, 2, ml_dtypes.bfloat16, strategy="group", group_size=32)
    compressed("w4a16_f32", 4, 8, 1, np.float32, strategy="channel")
    compressed("w4a16_zeros", 4, None, 2, np.float16, strategy="group", group_size=32)
    compressed("w4a16_ordered", 4, 8, 2, np.float16, order=True, strategy="group", group_size=32)
    compressed("w8a16", 8, 128, 1, np.float16, strategy="channel")
    compressed("w6a16", 6, 32, 2, np.float16, strategy="group", group_size=32)
    int8("w8a8", np.float32)
    int8("w8a8_one_scale", np.float16, per_channel=False)
    half = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 32]}
    fp8("fp8", np.array([0.0123], np.float32), "weight_scale", half)
    fp8("fp8_scalar", np.array(0.0123, ml_dtypes.bfloat16), "weight_scale", half)
    fp8("fp8_rows", np.abs(scales(ROWS, 1, dtype=np.float32)), "weight_scale", half)
    fp8("fp8_blocks", np.abs(scales(2, 2, dtype=np.float32)), "weight_scale_inv", blocks)
    fp8("fp8_e5m2", np.array([0.0123], np.float32), "weight_scale", half, dtype=ml_dtypes.float8_e5m2)
    fp8("fp8_without_scale", None, "weight", {"quant_method": "fp8"})
    mxfp4("mxfp4", (118, 125))
    mxfp4("mxfp4_far", (90, 160))
    mxfp4("mxfp4_packed", (118, 125), blocks=False)
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    mxfp4("mxfp4_experts", (118, 125), shape=(2, 8, COLS), module=experts)
    nvfp4("nvfp4", False)
    nvfp4("nvfp4_modelopt", True)
    bitsandbytes("nf4", "nf4", False)
    bitsandbytes("nf4_nested", "nf4", True)
    bitsandbytes("fp4", "fp4", False)
    bitsandbytes_int8("int8")
    metadata = {name: json.dumps(config) for name, config in configs.items()}
    save_file(tensors, out, metadata)
    print(f"{len(configs)} cases, {sum(tensor.nbytes for tensor in tensors.values())} bytes")


if __name__ == "__main__":
    main()
