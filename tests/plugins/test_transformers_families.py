"""Families that only transformers knows: any split has transformers' own logits, or says why it can't be had."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from torch import Tensor

from core import CheckpointError, ConfigError, DType, Source
from core.errors import StageError
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime.layer_cache import capacity
from core.runtime.model import Model, Precision
from core.testing.cluster_in_memory import memory_cluster
from core.testing.families import LAYERS, tiny_family

CPU = torch.device("cpu")
PROMPT, LENGTH = 20, 24
ATTENTION = [
    "gpt2",  # learned positions
    "bloom",  # a norm behind the embedding, biases by distance
    "falcon",  # attention and MLP side by side
    "cohere2",  # scaled logits, windows in some layers
    "gpt_neox",
    "granite",  # multipliers everywhere
    "mixtral",  # one tensor per expert in the checkpoint
    "deepseek_v3",  # a dense layer first, latent attention
    "gpt_oss",  # sinks, windows
]
RECURRENT = ["qwen3_next", "mamba", "lfm2"]


def segment(position: int, rows: int, session: int = 1) -> Segment:
    return Segment(session=session, position=position, rows=rows, outputs=rows)


def random_rows(rows: int, width: int, seed: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


class Pipeline:
    def __init__(self, model: Model, precision: Precision, cuts: tuple[int, ...]) -> None:
        ranges = [range(start, stop) for start, stop in itertools.pairwise(cuts)]
        self.stages = [model.load_stage(layers, precision, CPU)[0] for layers in ranges]
        self.outer = model.load_embed_and_head(precision, CPU)

    @torch.inference_mode()
    def __call__(self, tokens: list[int], position: int, session: int = 1) -> Tensor:
        hidden = self.outer.embed(torch.tensor(tokens))
        for stage in self.stages:
            hidden = stage.run(hidden, [segment(position, len(tokens), session)], outputs_only=False)
        return self.outer.logits(hidden)


@contextmanager
def opened(path: Path, dtype: DType = DType.FP32) -> Iterator[tuple[Model, Precision]]:
    """By transformers' code, also of a family with an architecture of its own."""
    plugins = PluginHost.installed()
    with closing(plugins.open_checkpoint(Source(str(path)))) as checkpoint:
        model = Model(checkpoint, plugins.architectures.get("transformers"))
        yield model, Precision(plugins.quantizers.get("fp16"), dtype, dtype)


def oracle(path: Path) -> tuple[list[int], Tensor]:
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(3, 250, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.inference_mode():
        logits = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(torch.tensor([tokens])).logits[0]
        )
    assert logits.std() > 0.02, "flat logits would agree with anything"
    return tokens, logits / logits.std()


@pytest.fixture(scope="module", params=[*ATTENTION, *RECURRENT])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, tiny_family(tmp_path_factory.mktemp(request.param), request.param)


def test_every_split_has_the_oracles_logits(family: tuple[str, Path]) -> None:
    kind, path = family
    tokens, expected = oracle(path)
    with opened(path) as (model, precision):
        for cuts in ((0, LAYERS), (0, 1, LAYERS), (0, 2, 3, LAYERS)):
            run = Pipeline(model, precision, cuts)
            found = [run(tokens[:PROMPT], 0), *(run([tokens[at]], at) for at in range(PROMPT, LENGTH))]
            chunks = [run(tokens[at : at + 9], at, session=2) for at in range(0, LENGTH, 9)]
            scale = torch.cat(found).std()
            assert (torch.cat(found) / scale - expected).abs().max() < 2e-3, cuts
            assert (torch.cat(chunks) / scale - expected).abs().max() < 2e-3, f"{cuts} in chunks"
            if kind in ATTENTION:
                again = run(tokens[15:18], 15) / scale
                assert (again - expected[15:18]).abs().max() < 2e-3, f"{cuts} after going back"
            elif kind != "lfm2":
                with pytest.raises(StageError, match="can't go back to position 15"):
                    run(tokens[15:18], 15)


def test_a_session_goes_on_from_anothers_prefix_where_it_can_be_cut_back(family: tuple[str, Path]) -> None:
    kind, path = family
    with opened(path) as (model, precision):
        assert model.spec.can_truncate is (kind in ATTENTION)
        stage, _ = model.load_stage(range(LAYERS), precision, CPU)
        hidden = torch.randn(12, model.spec.hidden_size)
        stage.run(hidden, [segment(0, 12)], outputs_only=False)
        if kind in RECURRENT:
            with pytest.raises(StageError, match="can't go back to position 8"):
                stage.caches.copy(1, 2, 8)
            assert len(stage.caches) == 1
            return
        stage.caches.copy(1, 2, 8)
        stage.run(torch.randn(3, model.spec.hidden_size), [segment(12, 3)], outputs_only=False)
        again = stage.run(hidden[8:], [segment(8, 4, session=2)], outputs_only=False)
        expected = stage.run(hidden[8:], [segment(8, 4)], outputs_only=False)
        torch.testing.assert_close(again, expected)


def test_sessions_of_any_length_decode_together_as_alone(family: tuple[str, Path]) -> None:
    _, path = family
    with opened(path) as (model, precision):
        width = model.spec.hidden_size
        for layers in (range(LAYERS), range(2, 3)):
            alone, shared = (model.load_stage(layers, precision, CPU)[0] for _ in range(2))
            prompts = [(1, 20), (2, 3), (3, 9)]
            for stage in (alone, shared):
                for session, rows in prompts:
                    stage.run(random_rows(rows, width, seed=session), [segment(0, rows, session)], outputs_only=False)
            for step in range(3):
                rows = random_rows(5, width, seed=10 + step)
                batch = [segment(length + step, 1, session) for session, length in prompts]
                # A prompt of another session may be among those that decode.
                batch.insert(1, segment(0, 2, session=9))
                together = shared.run(rows, batch, outputs_only=False)
                parts = rows.split([each.rows for each in batch])
                expected = [
                    alone.run(part, [each], outputs_only=False) for part, each in zip(parts, batch, strict=True)
                ]
                torch.testing.assert_close(together, torch.cat(expected), rtol=1e-3, atol=1e-3)
            stack: Any = shared.stack
            assert stack._shares, "they were computed one after another"


def test_sessions_share_no_pass_where_a_familys_code_counts_the_padding_too(tmp_path: Path) -> None:
    with opened(tiny_family(tmp_path, "ctrl")) as (model, precision):
        alone, shared = (model.load_stage(range(LAYERS), precision, CPU)[0] for _ in range(2))
        for session, rows in ((1, 9), (2, 4)):
            for stage in (alone, shared):
                stage.run(random_rows(rows, 64, seed=session), [segment(0, rows, session)], outputs_only=False)
        rows, batch = random_rows(2, 64, seed=3), [segment(9, 1, 1), segment(4, 1, 2)]
        expected = [alone.run(rows[[at]], [each], outputs_only=False) for at, each in enumerate(batch)]
        torch.testing.assert_close(shared.run(rows, batch, outputs_only=False), torch.cat(expected))
        stack: Any = shared.stack
        assert stack._shares is False


def test_sessions_hold_what_was_planned(family: tuple[str, Path]) -> None:
    _, path = family
    with opened(path, DType.BF16) as (model, precision):
        for layers in (range(LAYERS), range(1, 2), range(2, LAYERS)):
            stage, _ = model.load_stage(layers, precision, CPU)
            for session, rows in ((1, 40), (2, 200)):
                stage.run(torch.randn(rows, model.spec.hidden_size), [segment(0, rows, session)], outputs_only=False)
            planned = model.session_cost(layers, precision).of(Counter(map(capacity, (40, 200))))
            assert abs(stage.caches.nbytes - planned) <= 0.03 * planned, layers


def test_what_a_stage_holds_is_what_was_announced(family: tuple[str, Path]) -> None:
    _, path = family
    with opened(path, DType.BF16) as (model, precision):
        for layers in (range(0, 1), range(1, LAYERS)):
            stage, _ = model.load_stage(layers, precision, CPU)
            assert stage.nbytes == sum(model.layer_bytes(layer, precision) for layer in layers)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_family(tmp_path_factory.mktemp("alone"), "gpt2")


def test_a_cache_is_counted_and_ends_with_its_session(gpt2: Path) -> None:
    with opened(gpt2) as (model, precision):
        stage, _ = model.load_stage(range(1, 3), precision, CPU)
        stage.run(torch.randn(10, 64), [segment(0, 10)], outputs_only=False)
        assert stage.caches.nbytes == model.session_cost(range(1, 3), precision)(capacity(10))
        stage.caches.clear([1])
        assert stage.caches.nbytes == 0


def test_sessions_in_one_batch_are_computed_as_alone(gpt2: Path) -> None:
    with opened(gpt2) as (model, precision):
        stage, _ = model.load_stage(range(1, 3), precision, CPU)
        first, second = torch.randn(5, 64), torch.randn(3, 64)
        alone = [stage.run(rows, [segment(0, len(rows), 9)], outputs_only=False) for rows in (first, second)]
        batch = [segment(0, 5, 1), segment(0, 3, 2)]
        together = stage.run(torch.cat((first, second)), batch, outputs_only=False)
    torch.testing.assert_close(together, torch.cat(alone))


def test_a_stack_that_is_built_changes_nothing_for_one_that_runs(gpt2: Path) -> None:
    """transformers changes torch's default dtype, for all threads, while it makes a model."""
    seen: set[torch.dtype] = set()
    ended = threading.Event()

    def build(model: Model, precision: Precision) -> None:
        try:
            for _ in range(3):
                model.load_layers(range(1, 3), precision, CPU)
        finally:
            ended.set()

    with opened(gpt2) as (model, precision), opened(gpt2, DType.BF16) as other:
        stage, _ = model.load_stage(range(1, 3), precision, CPU)
        stack: Any = stage.stack
        stack._skeleton.layers[1].register_forward_pre_hook(lambda *_: seen.add(torch.get_default_dtype()))
        builder = threading.Thread(target=build, args=other)
        builder.start()
        while not ended.is_set():
            stage.run(torch.randn(1, 64), [segment(0, 1)], outputs_only=False)
        builder.join()
    assert seen == {torch.float32}


def test_what_a_stage_does_not_hold_is_nan_so_that_no_answer_can_depend_on_it(gpt2: Path) -> None:
    with opened(gpt2) as (model, precision):
        stage, _ = model.load_stage(range(1, 3), precision, CPU)
        stack: Any = stage.stack
        outside = stack._skeleton.base.wpe(torch.arange(3))
    assert outside.isnan().all()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("t5", "t5 is an encoder and a decoder"),
        ("bart", "bart is an encoder and a decoder"),
        ("bert", "bert is an encoder"),
        ("clip", "clip reads images"),
        ("vit", "vit is no language model"),
        ("rwkv", "rwkv can't be split: it keeps its state in another way"),
        ("gemma3n", "gemma3n reads more than text"),
        ("llava", "llava reads images"),
    ],
)
def test_what_is_no_decoder_is_refused_with_a_reason(kind: str, reason: str) -> None:
    architecture = PluginHost.installed().architecture_of({"model_type": kind})
    with pytest.raises(ConfigError, match=reason):
        architecture.read_config({"model_type": kind})


def test_a_type_that_transformers_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="no architecture reads model_type 'gpt9'"):
        PluginHost.installed().architecture_of({"model_type": "gpt9"})


def test_more_layers_than_any_model_has_are_refused_before_they_are_made() -> None:
    config = {"model_type": "gpt2", "n_layer": 2**40}
    with pytest.raises(ConfigError, match="more than 10000 layers"):
        PluginHost.installed().architecture_of(config).read_config(config)


def test_a_family_with_an_architecture_of_its_own_keeps_it() -> None:
    assert PluginHost.installed().architecture_of({"model_type": "llama"}).name == "llama"


async def test_a_cluster_serves_layers_that_cache_nothing_per_token(tmp_path: Path) -> None:
    with trio.fail_after(300):
        async with memory_cluster(tiny_family(tmp_path, "mamba"), "a", "b") as cluster:
            assert (await cluster.ready()).kv.tokens > 0
            await cluster.text((1, 2, 3), max_tokens=4)


def test_a_missing_tensor_is_named(gpt2: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(gpt2 / "model.safetensors")
    gone = next(name for name in tensors if "h.2" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((gpt2 / "config.json").read_text())))
    with pytest.raises(CheckpointError, match=gone), opened(tmp_path):
        pass


def test_the_plugin_imports_transformers_only_when_a_model_needs_it() -> None:
    script = (
        "import sys; from core.plugins import PluginHost; h = PluginHost.installed(); "
        "h.architecture_of({'model_type': 'llama'}); assert 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
