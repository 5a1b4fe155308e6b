"""Every decoder family of transformers, tiny, split over stages, against transformers' own logits: docs/families.md.

python benchmarks/_families.py            all of them, and the table
python benchmarks/_families.py gpt2 phi   these alone, and what failed
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SECONDS = 120
PROMPT, STEPS, BACK = 24, 8, 5
TOLERANCE = 2e-3
"""In standard deviations of the logits, in fp32."""

WORKS, FORWARD_ONLY = "works", "works, but can't go back"


class Result(NamedTuple):
    """`shares`: sessions that decode share a pass. `planned`: bytes planned for sessions' caches, by those held."""

    outcome: str
    shares: bool = False
    planned: float = 0.0

    @property
    def works(self) -> bool:
        return self.outcome in (WORKS, FORWARD_ONLY)

    def __str__(self) -> str:
        if not self.works:
            return self.outcome
        together = "together" if self.shares else "one after another"
        return f"{self.outcome}; sessions {together}; planned / held {self.planned:.3f}"


def main() -> None:
    from core.testing.families import families

    wanted = sys.argv[1:] or families()
    results: dict[str, Result] = {}
    with ThreadPoolExecutor(4) as pool:
        for kind, result in zip(wanted, pool.map(in_a_process, wanted), strict=True):
            results[kind] = result
            print(f"{kind:28} {result}", flush=True)
    if not sys.argv[1:]:
        page = Path(__file__).parents[1] / "docs/families.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(table(results), encoding="utf-8")


def in_a_process(kind: str) -> Result:
    """A fork, so that torch and transformers are imported once, and nothing that a family does outlives it."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: sender.send(survey(kind)))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(SECONDS) else Result(f"untested: no result within {SECONDS} s")
    except EOFError:
        return Result("untested: the process died")
    finally:
        process.kill()
        process.join()


def survey(kind: str) -> Result:
    import torch

    from core.testing.families import tiny_family

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        try:
            path = tiny_family(Path(directory), kind)
            expected, tokens = oracle(path)
        except Exception as error:
            return Result(f"untested: no tiny model ({one_line(error)})")
        try:
            return compare(path, tokens, expected)
        except Exception as error:
            return Result(one_line(error))


def oracle(path: Path):  # type: ignore[no-untyped-def]
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = torch.randint(3, 250, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0].float()
    if not logits.isfinite().all() or logits.std() < 0.02:
        raise ValueError(f"its logits are flat or not finite ({float(logits.std()):.3f})")
    return logits, tokens


def compare(path: Path, tokens: list[int], expected) -> Result:  # type: ignore[no-untyped-def]
    from core import DType, Source
    from core.errors import StageError
    from core.plugins import PluginHost
    from core.runtime.model import Model, Precision

    bound = TOLERANCE * float(expected.std())
    plugins = PluginHost.installed()
    goes_back = True
    with Model.open(Source(str(path)), plugins) as model:
        if model.architecture.name != "transformers":
            plugins.architectures.get("transformers")
            model = Model(model.checkpoint, plugins.architectures.get("transformers"))
        precision = Precision(plugins.quantizers.get("fp16"), DType.FP32, DType.FP32)
        for cuts in ([0, 4], [0, 1, 4], [0, 2, 3, 4]):
            run = Pipeline(model, precision, cuts)
            off = difference(run(tokens[:PROMPT], 0), expected[:PROMPT])
            if not off < bound:
                return Result(f"wrong logits at {cuts}: off by {off:.2g} in prefill")
            for i in range(PROMPT, PROMPT + STEPS):
                if not difference(run([tokens[i]], i), expected[i : i + 1]) < bound:
                    return Result(f"wrong logits at {cuts}: decode step {i - PROMPT}")
            chunks = [run(tokens[a : a + 10], a, session=2) for a in range(0, len(tokens), 10)]
            import torch

            off = difference(torch.cat(chunks), expected)
            if not off < bound:
                return Result(f"wrong logits at {cuts}: off by {off:.2g} in chunked prefill")
            if (off := run.together(tokens, expected)) >= bound:
                return Result(f"wrong logits at {cuts}: off by {off:.2g} where sessions decode together")
            back = len(tokens) - BACK
            try:
                again = run(tokens[back : back + 3], back)
            except StageError as error:
                if "can't go back" not in str(error):
                    raise
                goes_back = False
                continue
            if not difference(again, expected[back : back + 3]) < bound:
                return Result(f"wrong logits at {cuts} after going back")
        stack = run.stages[0].stack
        return Result(WORKS if goes_back else FORWARD_ONLY, bool(getattr(stack, "_shares", True)), run.planned())


def difference(found, expected) -> float:  # type: ignore[no-untyped-def]
    return float((found - expected).abs().max())


class Pipeline:
    def __init__(self, model, precision, cuts: list[int]) -> None:  # type: ignore[no-untyped-def]
        import torch

        cpu = torch.device("cpu")
        ranges = [range(a, b) for a, b in itertools.pairwise(cuts)]
        self.model, self.precision = model, precision
        self.stages = [model.load_stage(layers, precision, cpu)[0] for layers in ranges]
        self.outer = model.load_embed_and_head(precision, cpu)

    def __call__(self, tokens: list[int], position: int, session: int = 1):  # type: ignore[no-untyped-def]
        from core.protocol.fields import Segment

        return self.run(tokens, [Segment(session=session, position=position, rows=len(tokens), outputs=len(tokens))])

    def run(self, tokens: list[int], segments):  # type: ignore[no-untyped-def]
        import torch

        with torch.inference_mode():
            hidden = self.outer.embed(torch.tensor(tokens))
        for stage in self.stages:
            hidden = stage.run(hidden, segments, outputs_only=False)
        with torch.inference_mode():
            return self.outer.logits(hidden)

    def together(self, tokens: list[int], expected) -> float:  # type: ignore[no-untyped-def]
        """How far off the logits are of three sessions that decode together."""
        from core.protocol.fields import Segment

        lengths = [PROMPT, 3, 11]
        for number, length in enumerate(lengths):
            self(tokens[:length], 0, session=10 + number)
        off = 0.0
        for step in range(STEPS):
            places = [length + step for length in lengths]
            segments = [Segment(10 + number, place, 1, 1) for number, place in enumerate(places)]
            off = max(off, difference(self.run([tokens[place] for place in places], segments), expected[places]))
        return off

    def planned(self) -> float:
        """What is planned for the caches of all sessions that there were, by what is held."""
        from core.runtime.layer_cache import capacity

        rooms = Counter(map(capacity, (PROMPT + STEPS, PROMPT + STEPS, PROMPT + STEPS, 3 + STEPS, 11 + STEPS)))
        planned = self.model.session_cost(range(self.model.spec.layers), self.precision).of(rooms)
        return planned / sum(stage.caches.nbytes for stage in self.stages)


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:220]


def table(results: dict[str, Result]) -> str:
    import transformers

    works = sorted(kind for kind, result in results.items() if result.works)
    failing = {kind: result for kind, result in sorted(results.items()) if not result.works}
    rows = "\n".join(f"| {kind} | {result.outcome.replace('|', '/')} |" for kind, result in failing.items())
    return PAGE.format(
        version=transformers.__version__,
        count=len(works),
        works="\n".join(_row(kind, results[kind]) for kind in works),
        rows=rows,
    )


def _row(kind: str, result: Result) -> str:
    back, shared = (("yes" if said else "no") for said in (result.outcome == WORKS, result.shares))
    return f"| {kind} | {shared} | {back} | {result.planned:.3f} |"


PAGE = """# Model families

The families with an architecture of their own are listed by [Models](models.md#what-it-runs), and those of them that
have experts below. Every other decoder that transformers knows is computed by transformers' own code, through the
architecture `transformers`: each node builds the model without weights, loads its layers, and leaves the others out.

`python benchmarks/_families.py` wrote this page with transformers {version}. For each family it makes a tiny model with
random weights, splits its four layers over one, two and three stages, and compares the logits in fp32 with those of
transformers: a prompt, eight decode steps, a prompt in chunks, and going back five tokens. A tiny model says that the
family's code runs split; it does not say that each published checkpoint of the family loads.

{count} families work.

## Experts with an architecture of their own

Each expert is packed by itself, by any `--quant`. Sessions in one batch share all products, and a token goes through
the experts that it chose alone. Going back is possible, `--compile` is not.

| model type | attention | cached by token and layer | experts |
|---|---|---|---|
| qwen2_moe | as qwen2 | keys and values | softmax, and a shared one behind a gate |
| qwen3_moe | as qwen3 | keys and values | softmax |
| mixtral | as mistral | keys and values | softmax |
| gpt_oss | sinks, every other layer with a window | keys and values | softmax, biases, a clamped gate; 16 bits |
| glm4_moe | half of each head rotated | keys and values | corrected sigmoids, a shared one |
| deepseek_v2 | over latents | `kv_lora_rank + qk_rope_head_dim` values | softmax, in groups or not; shared ones |
| deepseek_v3 | over latents | `kv_lora_rank + qk_rope_head_dim` values | corrected sigmoids in groups; shared ones |
| qwen3_next | gated, in every fourth layer; else a gated delta rule | keys and values | as qwen2_moe |
| qwen3_5_moe_text | as qwen3_next | keys and values | as qwen2_moe |

Likewise qwen3_5_text, which has MLPs in the place of experts. Layers of the delta rule keep a matrix per head for each
session, and can't forget a token. So a snapshot is kept of what they held behind the last of a prompt's chunks that
ended at a multiple of 64 tokens: a chat goes on from there, and going back means to there, or to the start. What such
layers keep is planned twice for each session.

Experts may be one tensor each, as they are published, or all in one, as transformers 5 holds them. `kv_b_proj` of
latent attention multiplies from both sides, so it stays in `--dtype`; so do routers, in fp32. Layers that predict
further tokens (`num_nextn_predict_layers`) are not loaded.

## Windows

A layer with a window forgets what slid out of it: it holds the window, up to 319 tokens more, and what rows behind the
prompt's last chunk but one see. So a session goes back 128 tokens at any time, and further to there, or to the start;
one that is not much longer than the window goes back anywhere.

## All of them, by transformers' code

"Together" says that sessions that decode share one pass: before the first is shared, two made-up sessions show that
each gets from it what it gets alone. Prompts' chunks are computed one after another. Going back is what a rejected
draft and a prompt that begins like another need: where it can't be had, both are done without. "Planned" is what is
planned for sessions' caches, by what they hold.

| model type | together | goes back | planned |
|---|---|---|---|
{works}

## Not

A family fails with an error where its layers need more of each other than the hidden state. "untested" is said of those
whose tiny model could not be made, or did not answer in time: they may work.

| model type | why |
|---|---|
{rows}

Encoders, models with an encoder and a decoder, and models that read images or sounds are refused. Where transformers
can run the text part of such a model by itself (qwen3_5, llama4), that part is served. A model's code that
comes with a checkpoint is never run.

## What differs from the families with an architecture of their own

- `--quant` packs linear layers, experts, the embedding and the head. What a family keeps in tensors of another shape
  (the convolutions of GPT-2) stays in `--dtype`, and so do the experts of llama4 and jetmoe, which only the family's
  own code computes.
- Layers that sum up what they have seen have no snapshots, so they go back only to the start.
"""


if __name__ == "__main__":
    main()
