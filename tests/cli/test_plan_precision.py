"""`core plan` on tiny models: how it says that weights would be packed, computed and judged."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from core.cli import app
from core.errors import PluginError
from core.testing.checkpoints import tiny_checkpoint, write_gguf

AS_STORED = "as the checkpoint is stored: perplexity within 1% of its own where measured"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of 4 bits."""
    folder = tmp_path_factory.mktemp("plan")
    return write_gguf(tiny_checkpoint(folder / "model", layers=2), folder / "tiny.gguf", "Q4_0")


def planned(model: Path, *options: str) -> str:
    arguments = ["plan", "--model", str(model), "--node", "1gb", *options]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()[1].partition("llama, ")[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), f"quant stored, dtype bf16, wire dtype bf16 ({AS_STORED})"),
        (("--quant", "auto", "--dtype", "auto"), f"quant stored, dtype bf16, wire dtype bf16 ({AS_STORED})"),
        (("--quant", "fp16"), f"quant fp16, dtype bf16, wire dtype bf16 ({AS_STORED})"),
        (("--dtype", "fp16"), f"quant stored, dtype fp16, wire dtype fp32 ({AS_STORED})"),
        (("--quant", "fp16", "--dtype", "fp32"), "quant fp16, dtype fp32, wire dtype fp32 (as the checkpoint)"),
    ],
)
def test_it_says_how_weights_are_packed_and_what_that_costs(file: Path, options: tuple[str, ...], said: str) -> None:
    assert planned(file, *options) == said


def test_a_checkpoint_in_no_few_bits_is_left_as_it_is(file: Path) -> None:
    assert planned(file.parent / "model").startswith("quant fp16, dtype bf16, wire dtype bf16")


def test_a_quantizer_that_there_is_not_is_refused(file: Path) -> None:
    with pytest.raises(PluginError, match="no quantizer named 'zip'"):
        planned(file, "--quant", "zip")
