"""The kit's tiny checkpoints are what transformers would have saved."""

from pathlib import Path
from typing import get_args

import gguf
import pytest
import torch
import transformers

from core.testing.checkpoints import ModelType, tiny_checkpoint, write_gguf

TEXTS = ["A token enters.", "Zoë, 你好, мир \n\t  👩‍👩‍👧", "<|im_start|>user\nhi<|im_end|>\n", "\x00\x7f ~"]


@pytest.mark.parametrize("model_type", get_args(ModelType))
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


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_gguf_interleaves_the_halves_of_each_head_for_llama_alone(tmp_path: Path, model_type: str) -> None:
    """Heads are of 16 rows: row 1 in the file is row 8 of the checkpoint, row 17 is row 24."""
    original = tiny_checkpoint(tmp_path, model_type=model_type, layers=1)
    expected = transformers.AutoModelForCausalLM.from_pretrained(original).state_dict()
    reader = gguf.GGUFReader(write_gguf(original, tmp_path / "tiny.gguf", "F32"))
    stored = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    for here, there in [("q", "attn_q"), ("k", "attn_k")]:
        rows = expected[f"model.layers.0.self_attn.{here}_proj.weight"]
        places = {0: 0, 1: 8, 2: 1, 15: 15, 16: 16, 17: 24} if model_type == "llama" else {1: 1, 17: 17}
        for place, row in places.items():
            assert torch.equal(stored[f"blk.0.{there}.weight"][place], rows[row])
    assert torch.equal(stored["blk.0.attn_v.weight"], expected["model.layers.0.self_attn.v_proj.weight"])
    assert stored["blk.0.ffn_down.weight"].shape == (64, 128)


def test_gguf_says_the_llama3_frequencies_as_factors(tmp_path: Path) -> None:
    """From 1 for the fastest to the whole factor for the slowest (transformers' own computation is the oracle)."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 128
    original = tiny_checkpoint(tmp_path, layers=1, head_dim=64, rope_scaling=scaling)
    config = transformers.AutoConfig.from_pretrained(original)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    [factors] = [
        torch.from_numpy(tensor.data.copy())
        for tensor in gguf.GGUFReader(write_gguf(original, tmp_path / "tiny.gguf")).tensors
        if tensor.name == "rope_freqs.weight"
    ]
    assert torch.allclose(plain / factors, scaled, rtol=1e-5)
    assert factors[0] == 1
    assert factors[-1] == 8


@pytest.mark.parametrize("tied", [True, False])
def test_an_endless_one_ends_at_the_bound_alone(tmp_path: Path, tied: bool) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint(tmp_path, tied=tied, endless=True))
    prompts = torch.randint(3, 320, (8, 5), generator=torch.Generator().manual_seed(0))
    assert model.generate(prompts, max_new_tokens=64, do_sample=False).shape == (8, 69)
    assert (model(prompts).logits.max(-1).values > 1).all()
