"""A model as it is published in MXFP4, kept so in one process with one thread, beside transformers in bf16.

It has gpt-oss' proportions and random weights: layers of the same width, with fewer experts. transformers has what
these weights stand for. Rounds alternate, and ratios are taken within a round, of this thread's time alone, so that
others on the machine count less. Bytes are those of the layers, in memory and in the file. Needs about 5 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from _measure import generated, machine, spread, verdict
from mixtures import ours

from core.interfaces.checkpoint import Source
from core.plugins import PluginHost
from core.runtime.bench import Round, WholeModel, made_up_prompt
from core.runtime.model import Model
from core.runtime.precision_choice import choose_precision
from core.testing.checkpoints import tiny_checkpoint

CPU = torch.device("cpu")
WIDTH, EXPERTS, CHOSEN, LAYERS, PROMPT = 2880, 8, 4, 2, 128
DECODE_GOAL, MEMORY_GOAL = 1.5, 1.05


@contextmanager
def made_up_checkpoint() -> Iterator[Path]:
    """First with one expert, then with random blocks for all of them: unquantized they would take minutes to write."""
    from safetensors.torch import load_file, save_file

    with TemporaryDirectory() as directory:
        path = tiny_checkpoint(
            Path(directory),
            model_type="gpt_oss",
            layers=LAYERS,
            hidden_size=WIDTH,
            intermediate=WIDTH,
            heads=64,
            kv_heads=8,
            head_dim=64,
            vocab=16_384,
            tied=False,
            dtype=torch.bfloat16,
            max_position_embeddings=4096,
            fused_experts=True,
            config={"num_local_experts": 1, "num_experts_per_tok": 1, "sliding_window": 128},
        )
        weights, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(0)
        for name in list(weights):
            part = name.partition(".mlp.")[2]
            if part in ("experts.gate_up_proj", "experts.down_proj"):
                _, columns, rows = weights.pop(name).shape
                shape = EXPERTS, rows, columns // 32
                weights[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
                weights[f"{name}_scales"] = torch.randint(118, 121, shape, dtype=torch.uint8, generator=generator)
            elif part:
                weights[name] = torch.cat([weights[name]] * EXPERTS)
                if part == "router.weight":
                    weights[name] = torch.randn(EXPERTS, WIDTH, generator=generator).bfloat16()
        save_file(weights, path / "model.safetensors")
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        more = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "experts_per_token": CHOSEN}
        config |= {**more, "quantization_config": {"quant_method": "mxfp4"}}
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield path


def load_oracle(model: Model) -> Any:
    """transformers', of the weights that the checkpoint's stand for."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in model.checkpoint.config.items() if key != "quantization_config"}
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        oracle = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = {name: model.checkpoint.read(name).bfloat16() for name in model.checkpoint.tensors}
    oracle.load_state_dict(state, assign=True)
    oracle.model.rotary_emb = type(oracle.model.rotary_emb)(config)
    return oracle.eval()


def main(rounds: int, tokens: int) -> None:
    torch.set_num_threads(1)
    print(machine())
    plugins = PluginHost.installed()
    with made_up_checkpoint() as path, Model.open(Source(str(path)), plugins) as model:
        precision = choose_precision(model, plugins.quantizers, CPU)
        layers = range(model.spec.layers)
        held = sum(model.layer_bytes(layer, precision) for layer in layers)
        names = tuple(f"model.layers.{layer}." for layer in layers)
        stored = sum(info.nbytes for name, info in _header(path).items() if name.startswith(names))
        print(
            f"quant {precision.quantizer.name}, dtype {precision.compute}; held {held / stored:.3f} of the file's bytes"
        )
        print(verdict(f"memory <= {MEMORY_GOAL} x", held <= MEMORY_GOAL * stored))
        compare(model, WholeModel(model, precision, CPU), load_oracle(model), rounds, tokens)


def _header(path: Path) -> Any:
    from core_plugin_safetensors.header import read_local_header

    return read_local_header(path / "model.safetensors")


def compare(model: Model, whole: WholeModel, oracle: Any, rounds: int, tokens: int) -> None:
    prompt = made_up_prompt(model, PROMPT, tokens + 1)
    own: list[Round] = []
    theirs: list[Round] = []
    for _ in range(rounds + 1):
        own.append(ours(whole, prompt, tokens))
        theirs.append(generated(oracle, prompt, tokens, time.thread_time))
    pairs = list(zip(own[1:], theirs[1:], strict=True))
    decode = [other.decode / mine.decode for mine, other in pairs]
    print(f"transformers bf16    {spread([tokens / other.decode for _, other in pairs], 'tok/s', 1)}")
    print(f"kept, decode         {spread([tokens / mine.decode for mine, _ in pairs], 'tok/s', 1)}")
    print(f"  of transformers'   {spread(decode)}")
    print(f"  {PROMPT} rows, of theirs {spread([other.prefill / mine.prefill for mine, other in pairs])}")
    print(verdict(f"decode >= {DECODE_GOAL} x", statistics.median(decode) >= DECODE_GOAL))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    main(options.rounds, options.tokens)
