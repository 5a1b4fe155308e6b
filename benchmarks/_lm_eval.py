"""lm-eval's `local-completions` against the API, held against lm-eval's `hf`: transformers with the same weights.

As a program: `python _lm_eval.py API MODEL GGUF`, with the key in OPENAI_API_KEY. It fails where the two differ.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

TOLERANCE = 0.001
"""How far a continuation's log likelihood may be from that of transformers, in nats."""

QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " Berlin", " a small village"], "answer": 0},
    {"question": "Water freezes at", "choices": [" one hundred degrees", " zero degrees Celsius"], "answer": 1},
    {"question": "The sun rises in the", "choices": [" east", " west", " north"], "answer": 0},
    {"question": "Two and two make", "choices": [" five", " four", " twenty-two"], "answer": 1},
    {"question": "A triangle has three", "choices": [" wheels", " sides"], "answer": 1},
]


def _questions(**_: Any) -> Any:
    from datasets import Dataset, DatasetDict

    return DatasetDict(test=Dataset.from_list(QUESTIONS))


TASK: dict[str, Any] = {
    "task": "small_facts",
    "custom_dataset": _questions,
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "question",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}


def _answers(kind: str, **arguments: Any) -> tuple[list[list[float]], float]:
    """The log likelihood of each question's choices, in nats, and the accuracy."""
    from lm_eval import simple_evaluate

    told = simple_evaluate(model=kind, model_args=arguments, tasks=[TASK], bootstrap_iters=0)
    samples = sorted(told["samples"][TASK["task"]], key=lambda sample: sample["doc_id"])
    likelihoods = [[likelihood for likelihood, _ in sample["filtered_resps"]] for sample in samples]
    return likelihoods, told["results"][TASK["task"]]["acc,none"]


def compare(api: str, model: str, gguf: Path) -> str:
    """What was compared, and how near it is. Raises AssertionError for a difference that is more than rounding."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
        cluster, accuracy = _answers("local-completions", model=model, base_url=f"{api}/completions", tokenizer=folder)
    reference, expected = _answers(
        "hf", pretrained=str(gguf.parent), gguf_file=gguf.name, dtype="float32", device="cpu"
    )
    differences = [
        abs(ours - theirs)
        for question in zip(cluster, reference, strict=True)
        for ours, theirs in zip(*question, strict=True)
    ]
    assert max(differences) <= TOLERANCE, f"{max(differences):.4f} nats from transformers: {cluster}, not {reference}"
    assert accuracy == expected, f"the accuracy is {accuracy}, that of transformers {expected}"
    return (
        f"{len(differences)} log likelihoods within {max(differences):.0e} nats of transformers, "
        f"accuracy {accuracy:g} of both"
    )


if __name__ == "__main__":
    print(compare(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
