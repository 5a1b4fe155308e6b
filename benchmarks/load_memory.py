"""What a node takes while it loads a third of a model: the peak of its memory, and the bytes that it reads.

The checkpoint is made up, of llama's shape, and lies in a temporary directory. Each figure is that of a process of its
own, which loads in the way a node does. Peak memory is the kernel's high-water mark (Linux).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import torch
from _measure import machine, spread, verdict

from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.plugins import PluginHost
from core.runtime.model import Model, Precision

MB = 1e6
LAYERS = 12
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, CONTEXT = 2048, 5632, 32, 8, 1024, 4096
SHARDS = 4
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
}
SHARD_MARGIN, READ_MARGIN = 1.15, 1.05


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes: resident before the load, at its peak and after it, the shard's and a layer's size, and what was read."""

    before: int
    peak: int
    after: int
    shard: int
    layer: int
    read: int
    whole: int

    @property
    def transient(self) -> int:
        """What the peak holds beside what was there before and the shard."""
        return self.peak - self.before - self.shard

    @property
    def within_goal(self) -> bool:
        return self.peak <= self.before + SHARD_MARGIN * self.shard + self.layer

    @property
    def reads_its_part(self) -> bool:
        return self.read <= READ_MARGIN * self.whole / 3


def load(path: Path, dtype: DType) -> Figures:
    """In a fresh process: loads the middle third of the layers."""
    layers = range(LAYERS // 3, 2 * LAYERS // 3)
    plugins = PluginHost.installed()
    precision = Precision(plugins.quantizers.get("fp16"), dtype, dtype)
    before, read_before = memory("VmRSS"), bytes_read()
    with Model.open(Source(str(path)), plugins) as model:
        model.fetch_stage(layers)
        stage, _ = model.load_stage(layers, precision, torch.device("cpu"))
        layer = model.layer_bytes(layers.start, precision)
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return Figures(
        before=before,
        peak=memory("VmHWM"),
        after=memory("VmRSS"),
        shard=stage.nbytes,
        layer=layer,
        read=bytes_read() - read_before,
        whole=sum(file.stat().st_size for file in files),
    )


def memory(field: str) -> int:
    return 1024 * int(_proc("status", field).split()[0])


def bytes_read() -> int:
    """By read calls; pages of mapped files are not among them."""
    return int(_proc("io", "rchar"))


def _proc(file: str, field: str) -> str:
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return line.split(":")[1].strip()
    raise LookupError(f"/proc/self/{file} has no {field}")


def tensor_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    kv = KV_HEADS * HIDDEN // HEADS
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", (kv, HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", (kv, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, INNER)
    yield "model.norm.weight", (HIDDEN,)


def write_safetensors(directory: Path, shards: int) -> Path:
    """All tensors hold the same random bytes, so that writing is all the work there is."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    data = np.random.default_rng(0).standard_normal(INNER * HIDDEN, np.float32).astype(np.float16).tobytes()
    shapes = list(tensor_shapes())
    per_file = -(-len(shapes) // shards)
    weight_map = {}
    for number in range(shards):
        held = shapes[number * per_file : (number + 1) * per_file]
        name = "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        weight_map |= {tensor: name for tensor, _ in held}
        with (directory / name).open("wb") as file:
            file.write(_header(held))
            for _, shape in held:
                file.write(memoryview(data)[: 2 * int(np.prod(shape))])
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def _header(held: list[tuple[str, tuple[int, ...]]]) -> bytes:
    entries, end = {}, 0
    for name, shape in held:
        start, end = end, end + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    packed: dict[tuple[int, ...], np.ndarray] = {}
    for name, shape in tensor_shapes():
        stored = kind if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        if shape not in packed:
            values = np.random.default_rng(0).standard_normal(shape, np.float32)
            packed[shape] = gguf.quants.quantize(values, stored)
        writer.add_tensor(names.get_name(name, (".weight",)), packed[shape], raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def measured(path: Path, dtype: DType) -> Figures:
    command = [sys.executable, __file__, "--load", str(path), "--dtype", dtype]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=100)
    return Figures(**json.loads(done.stdout))


def report(name: str, runs: list[Figures]) -> None:
    one = runs[0]
    peaks = [run.peak / MB for run in runs]
    print(f"\n{name}: {LAYERS // 3} of {LAYERS} layers, {one.shard / MB:.0f} MB of {one.whole / MB:.0f} MB stored")
    print(f"before      {one.before / MB:.0f} MB: the interpreter, torch and core")
    print(f"peak        {spread(peaks, 'MB', 0)}")
    print(
        f"predicted   {(one.before + one.shard + one.layer) / MB:.0f} MB: that, the shard and a layer of "
        f"{one.layer / MB:.0f} MB"
    )
    print(f"transient   {spread([run.transient / MB for run in runs], 'MB', 0)}")
    print(f"after       {one.after / MB:.0f} MB")
    print(f"read        {one.read / MB:.0f} MB by read calls, {one.read / one.whole:.1%} of the files")
    print(verdict(f"peak <= before + {SHARD_MARGIN} x shard + a layer", all(run.within_goal for run in runs)))
    print(verdict("read <= 1/3 + 5%", all(run.reads_its_part for run in runs)))


def main(rounds: int) -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        cases = {
            "safetensors, one file, fp16": (partial(write_safetensors, directory / "single", 1), DType.FP16),
            "safetensors, 4 files, fp16": (partial(write_safetensors, directory / "sharded", SHARDS), DType.FP16),
            "safetensors of fp16, loaded as bf16": (lambda: directory / "single", DType.BF16),
            "GGUF of F16, fp16": (
                partial(write_gguf, directory / "f16.gguf", gguf.GGMLQuantizationType.F16),
                DType.FP16,
            ),
            "GGUF of Q8_0, loaded as fp16": (
                partial(write_gguf, directory / "q8.gguf", gguf.GGMLQuantizationType.Q8_0),
                DType.FP16,
            ),
        }
        for name, (write, dtype) in cases.items():
            path = write()
            report(name, [measured(path, dtype) for _ in range(rounds)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", type=DType, default=DType.FP16, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(asdict(load(options.load, options.dtype))))
    else:
        main(options.rounds)
