"""The kit's tiny checkpoints are what transformers would have saved."""

from pathlib import Path

import pytest
import torch
import transformers

from core.testing.checkpoints import tiny_checkpoint

TEXTS = ["A token enters.", "Zoë, 你好, мир \n\t  👩‍👩‍👧", "<|im_start|>user\nhi<|im_end|>\n", "\x00\x7f ~"]


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_all_of_it(tmp_path: Path, model_type: str, tied: bool) -> None:
    tiny_checkpoint(tmp_path, model_type=model_type, tied=tied, layers=2)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert model.config.model_type == model_type
    assert not any(report.values())


def test_logits_are_not_flat(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint(tmp_path))
    with torch.inference_mode():
        logits = model(torch.arange(20)[None]).logits
    assert 1 < logits.std(-1).mean() < 10
    assert len(set(logits.argmax(-1)[0].tolist())) > 5


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    files = [
        (tiny_checkpoint(tmp_path / name, seed=seed, layers=1) / "model.safetensors").read_bytes()
        for name, seed in [("a", 1), ("b", 1), ("c", 2)]
    ]
    assert files[0] == files[1]
    assert files[0] != files[2]


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_exactly_as_many_files_as_asked_for(tmp_path: Path, shards: int) -> None:
    tiny_checkpoint(tmp_path, shards=shards)
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    assert not any(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)[1].values())


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_the_tokenizer(tmp_path: Path, text: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint(tmp_path, layers=1))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < 320


def test_the_chat_template_is_chatml(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint(tmp_path, layers=1))
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"
