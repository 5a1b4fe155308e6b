"""Tiny checkpoints as publishers quantize them: written from the documented layouts, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
"""What is stored of a weight, by the last part of each name, and what it stands for."""
GROUP = 32
_NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def publish(directory: Path, kind: str) -> dict[str, Tensor]:
    """Makes the tiny checkpoint in `directory` one of this kind of `KINDS`; returns what its weights stand for.

    Quantized are the linear weights of its layers; of the kind "mxfp4" those of gpt_oss' fused experts.
    """
    from safetensors.torch import load_file, save_file

    write, settings = KINDS[kind]
    weights, stands_for = load_file(directory / "model.safetensors"), {}
    for name in [name for name in weights if _is_quantized(name, kind)]:
        stem = name.removesuffix("weight")
        stored, stands_for[name] = write(weights.pop(name).float())
        weights |= {f"{stem}{last}": tensor.contiguous().clone() for last, tensor in stored.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    key = "quantization" if kind.startswith("mlx") else "quantization_config"
    (directory / "config.json").write_text(json.dumps({**config, key: settings}), encoding="utf-8")
    return stands_for


def _is_quantized(name: str, kind: str) -> bool:
    if kind == "mxfp4":
        return name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return ".layers." in name and name.endswith("proj.weight")


def words(values: Tensor, bits: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Integers [rows, columns] -> int32 [rows, columns * bits / 32]: a word's i-th bits are of its column order[i]."""
    per_word = 32 // bits
    grouped = values.long().view(len(values), -1, per_word)
    shifted = [grouped[..., order[place]] << bits * place for place in range(per_word)]
    word = torch.stack(shifted).sum(0)
    return (word - ((word >> 31) << 32)).int()


def steps(weight: Tensor, bits: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Integers from 0 on [rows, columns], and of each group the scale, in fp16, and the integer that stands for 0."""
    grouped = weight.view(len(weight), -1, GROUP)
    most = (1 << bits) - 1
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    if symmetric:
        scale = torch.maximum(-low, high) / (most // 2)
        zero = torch.full_like(scale, (most + 1) // 2)
    else:
        scale = (high - low) / most
        zero = (-low / scale).round().clamp(0, most)
    scale = scale.half()
    values = (grouped / scale.float()[..., None]).round().add(zero[..., None]).clamp(0, most)
    return values.view(weight.shape), scale, zero


def _dequantised(values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    grouped = values.view(len(values), -1, GROUP)
    return ((grouped - zero[..., None]) * scale.float()[..., None]).view(values.shape)


def awq(weight: Tensor) -> Written:
    """AutoAWQ's WQLinear_GEMM."""
    values, scale, zero = steps(weight, 4, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {"qweight": words(values.t(), 4, order), "qzeros": words(zero.t(), 4, order), "scales": scale.t()}
    return stored, _dequantised(values, scale, zero)


def gptq(bits: int, less: int = 1) -> Callable[[Tensor], Written]:
    """AutoGPTQ's QuantLinear; zero points are stored `less` than they are."""

    def write(weight: Tensor) -> Written:
        values, scale, zero = steps(weight, bits, symmetric=False)
        zero = zero.clamp(min=1)
        stored = {
            "qweight": words(values, bits).t(),
            "qzeros": words((zero - less).t(), bits),
            "scales": scale.t(),
            "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
        }
        return stored, _dequantised(values, scale, zero)

    return write


def packed_integers(bits: int, *, symmetric: bool) -> Callable[[Tensor], Written]:
    """compressed-tensors' pack-quantized."""

    def write(weight: Tensor) -> Written:
        values, scale, zero = steps(weight, bits, symmetric=symmetric)
        stored = {
            "weight_packed": words(values, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
            **({} if symmetric else {"weight_zero_point": words(zero.t(), bits).t()}),
        }
        return stored, _dequantised(values, scale, zero)

    return write


def int8(weight: Tensor) -> Written:
    """compressed-tensors' int-quantized."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).half()
    values = (weight / scale.float()).round().clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scale}, values * scale.float()


def llm_int8(weight: Tensor) -> Written:
    """bitsandbytes' Int8Params."""
    most = weight.abs().amax(1)
    values = (weight / most[:, None] * 127).round()
    return {"weight": values.to(torch.int8), "SCB": most}, values * most[:, None] / 127


def nf4(*, nested: bool) -> Callable[[Tensor], Written]:
    """bitsandbytes' Params4bit; scales that are quantized too are so in blocks of 256, here by a linear table."""

    def write(weight: Tensor) -> Written:
        blocks = weight.view(-1, GROUP)
        most = blocks.abs().amax(1)
        state = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "float32", "shape": list(weight.shape)}
        stored = {"weight.absmax": most, "weight.quant_map": _NF4}
        if nested:
            offset, table = float(most.mean()), torch.linspace(-1, 1, 256)
            padded = torch.nn.functional.pad(most - offset, (0, -len(most) % 256)).view(-1, 256)
            outer = padded.abs().amax(1)
            places = (padded / outer[:, None])[..., None].sub(table).abs().argmin(-1)
            most = (table[places] * outer[:, None]).view(-1)[: len(most)] + offset
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
            stored["weight.absmax"] = places.view(-1)[: len(most)].to(torch.uint8)
            stored |= {"weight.nested_absmax": outer, "weight.nested_quant_map": table}
        codes = ((blocks / most[:, None])[..., None] - _NF4).abs().argmin(-1).view(-1)
        said = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        stored["weight"] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
        stored["weight.quant_state.bitsandbytes__nf4"] = said
        return stored, (_NF4[codes].view(blocks.shape) * most[:, None]).view(weight.shape)

    return write


def mlx(bits: int) -> Callable[[Tensor], Written]:
    """mlx.core.quantize, in the mode "affine"."""

    def write(weight: Tensor) -> Written:
        grouped = weight.view(len(weight), -1, GROUP)
        bias = grouped.amin(-1).half()
        scale = ((grouped.amax(-1) - bias.float()) / ((1 << bits) - 1)).half()
        values = ((grouped - bias.float()[..., None]) / scale.float()[..., None]).round().clamp(0, (1 << bits) - 1)
        stands_for = values * scale.float()[..., None] + bias.float()[..., None]
        stored = {"weight": words(values.view(weight.shape), bits).view(torch.uint32), "scales": scale, "biases": bias}
        return stored, stands_for.view(weight.shape)

    return write


def _nearest_e2m1(values: Tensor) -> Tensor:
    """The codes of the floats that are nearest."""
    return (values[..., None] - _E2M1).abs().argmin(-1)


def _pairs(codes: Tensor) -> Tensor:
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def _mx(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales of blocks of 32 [..., blocks, 32], and what they stand for (OCP MX, version 1.0)."""
    grouped = weight.view(*weight.shape[:-1], -1, 32)
    exponent = grouped.abs().amax(-1).clamp(min=1e-9).log2().floor() - 2
    scale = exponent.exp2()[..., None]
    codes = _nearest_e2m1(grouped / scale)
    return codes, (exponent + 127).to(torch.uint8), (_E2M1[codes] * scale).flatten(-2)


def fused_mxfp4(weight: Tensor) -> Written:
    """gpt-oss' experts: `weight` is [experts, in, out]."""
    codes, scales, stands_for = _mx(weight.transpose(1, 2).contiguous())
    return {"_blocks": _pairs(codes), "_scales": scales}, stands_for.transpose(1, 2)


def mxfp4(weight: Tensor) -> Written:
    """compressed-tensors' mxfp4-pack-quantized."""
    codes, scales, stands_for = _mx(weight)
    return {"weight_packed": _pairs(codes.flatten(-2)), "weight_scale": scales}, stands_for


def nvfp4(names: tuple[str, str, str], *, divides: bool) -> Callable[[Tensor], Written]:
    """Blocks of 16 with a scale in E4M3, of which one more is the scale."""

    def write(weight: Tensor) -> Written:
        whole = weight.abs().max() / (6 * 448)
        grouped = weight.view(*weight.shape[:-1], -1, 16)
        scales = (grouped.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        step = (scales.float() * whole)[..., None]
        codes = _nearest_e2m1(grouped / step.clamp(min=1e-9))
        stored = (_pairs(codes.flatten(-2)), scales, (1 / whole if divides else whole).reshape(1))
        return dict(zip(names, stored, strict=True)), (_E2M1[codes] * step).flatten(-2)

    return write


def _compressed(kind: str, **weights: Any) -> Mapping[str, Any]:
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": {"weights": weights}}}


_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False}
_CT_NVFP4 = ("weight_packed", "weight_scale", "weight_global_scale")
_MODELOPT = ("weight", "weight_scale", "weight_scale_2")
KINDS: Mapping[str, tuple[Callable[[Tensor], Written], Mapping[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "gptq": (gptq(4), {**_GPTQ, "bits": 4}),
    "gptq_v2": (gptq(4, less=0), {**_GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}),
    "gptq-8": (gptq(8), {**_GPTQ, "bits": 8}),
    "ints-4": (packed_integers(4, symmetric=True), _compressed("pack-quantized", num_bits=4)),
    "ints-4-zeros": (packed_integers(4, symmetric=False), _compressed("pack-quantized", num_bits=4)),
    "ints-8": (packed_integers(8, symmetric=True), _compressed("pack-quantized", num_bits=8)),
    "int8": (int8, _compressed("int-quantized", num_bits=8)),
    "llm.int8": (llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4": (nf4(nested=False), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "nf4-nested": (nf4(nested=True), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "mlx-4": (mlx(4), {"group_size": GROUP, "bits": 4}),
    "mlx-8": (mlx(8), {"group_size": GROUP, "bits": 8}),
    "mxfp4": (fused_mxfp4, {"quant_method": "mxfp4"}),
    "ct-mxfp4": (mxfp4, _compressed("mxfp4-pack-quantized", num_bits=4)),
    "ct-nvfp4": (nvfp4(_CT_NVFP4, divides=True), _compressed("nvfp4-pack-quantized", num_bits=4)),
    "nvfp4": (nvfp4(_MODELOPT, divides=False), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}
"""Each with what config.json says of it."""
