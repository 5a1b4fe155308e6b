"""The fastest kernel that is right is chosen, once; timers here are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.runtime import kernel_times
from core.runtime.kernel_choice import ROWS, Chooser, Kernels, Product, timed
from core.runtime.kernel_times import KernelTimes

CPU = torch.device("cpu")
PRODUCT = Product("made up", 1024, 1024, torch.float32, CPU)
Made = Callable[[object, Tensor], Tensor]


class FakeClock:
    """Kernels move it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def kernel(self, name: str, *, fixed: float, per_row: float, value: float = 1.0) -> Made:
        def multiply(linear: object, x: Tensor) -> Tensor:
            self.calls.append(name)
            self.now += fixed + per_row * len(x)
            return torch.full((len(x), 2), value) + torch.arange(2)

        return multiply


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def kernels(clock: FakeClock) -> dict[str, Made]:
    return {
        "many": clock.kernel("many", fixed=20e-6, per_row=1e-6),
        "few": clock.kernel("few", fixed=1e-6, per_row=3e-6),
    }


def test_the_fastest_is_taken_for_each_number_of_rows(clock: FakeClock, kernels: dict[str, Made]) -> None:
    chosen = Chooser(clock=clock).choose(PRODUCT, kernels, lambda outputs: None)
    assert chosen.names == ["few"] * 4 + ["many"] * 4
    assert chosen.summary() == "few up to 8 rows, many from 9 rows on"
    for rows, expected in {0: "few", 1: "few", 3: "few", 8: "few", 9: "many", 16: "many", 5000: "many"}.items():
        chosen(None, torch.ones(rows, 3))
        assert clock.calls[-1] == expected


def test_a_product_is_tried_once_in_a_process(clock: FakeClock, kernels: dict[str, Made]) -> None:
    chooser = Chooser(clock=clock)
    first = chooser.choose(PRODUCT, kernels, lambda outputs: None)
    clock.calls.clear()
    assert chooser.choose(PRODUCT, kernels, lambda outputs: pytest.fail("tried again")).names == first.names
    assert not clock.calls


def raises(linear: object, x: Tensor) -> Tensor:
    raise RuntimeError("not built for this processor")


WRONG: list[Made] = [
    raises,
    lambda linear, x: x.missing,  # type: ignore[attr-defined]
    lambda linear, x: x @ torch.ones(3, 3),
    lambda linear, x: torch.ones(len(x), 3),
    lambda linear, x: torch.ones(len(x), 2),
    lambda linear, x: torch.ones(len(x), 2, dtype=torch.float16),
    lambda linear, x: torch.full((len(x), 2), torch.nan),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_kernel_that_fails_or_is_wrong_is_not_taken(wrong: Made, clock: FakeClock, kernels: dict[str, Made]) -> None:
    offered = {"right": kernels["many"], "wrong": wrong}
    chosen = Chooser(clock=clock).choose(PRODUCT, offered, lambda outputs: None)
    assert set(chosen.names) == {"right"}


def test_a_hopeless_kernel_is_not_tried_with_many_rows(clock: FakeClock) -> None:
    offered = {
        "good": clock.kernel("good", fixed=1e-6, per_row=1e-6),
        "hopeless": clock.kernel("hopeless", fixed=0, per_row=1e-3),
        "late": clock.kernel("late", fixed=60e-6, per_row=0.1e-6),
    }
    chosen = Chooser(clock=clock).choose(PRODUCT, offered, lambda outputs: None)
    assert "hopeless" not in chosen.times[ROWS[-1]]
    assert chosen.names[-1] == "late"


def test_trying_ends_when_it_took_long_enough(clock: FakeClock) -> None:
    timed({"slow": lambda: clock.kernel("slow", fixed=1.0, per_row=0)(None, torch.ones(1, 3))}, clock)
    assert len(clock.calls) == 4


def test_of_a_large_weight_a_part_is_tried(clock: FakeClock, kernels: dict[str, Made]) -> None:
    sizes: list[int] = []
    large = Product("made up", 28672, 4096, torch.float32, CPU)
    Chooser(clock=clock).choose(large, kernels, sizes.append)
    assert all(256 <= size <= 512 and size % 64 == 0 for size in sizes)
    assert [PRODUCT.outputs(rows) for rows in (1, 128)] == [1024, 512]


def test_without_times_the_first_kernel_is_taken(kernels: dict[str, Made]) -> None:
    assert Kernels(kernels).names == ["many"] * len(ROWS)
    assert Kernels(kernels).summary() == "many"


def test_what_was_chosen_can_be_told(clock: FakeClock, kernels: dict[str, Made]) -> None:
    chooser = Chooser(clock=clock)
    chooser.note(PRODUCT, chooser.choose(PRODUCT, kernels, lambda outputs: None))
    [choice] = chooser.choices()
    assert str(choice.product) == "made up 1024x1024 float32"
    assert choice.kernels.times[1] == pytest.approx({"many": 21e-6, "few": 4e-6})


def test_another_process_takes_what_this_one_found(tmp_path: Path, clock: FakeClock, kernels: dict[str, Made]) -> None:
    kept = KernelTimes(tmp_path / "cache" / "kernels.json")
    first = Chooser(kept, clock).choose(PRODUCT, kernels, lambda outputs: None)
    clock.calls.clear()
    second = Chooser(kept, clock).choose(PRODUCT, kernels, lambda outputs: None)
    assert (second.names, second.times) == (first.names, first.times)
    assert not clock.calls
    assert [path.name for path in kept.path.parent.iterdir()] == ["kernels.json"]


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    yield lambda: monkeypatch.setattr(kernel_times, "machine", lambda: "another")


def test_another_machine_tries_for_itself(
    tmp_path: Path, clock: FakeClock, kernels: dict[str, Made], others: Callable[[], None]
) -> None:
    kept = KernelTimes(tmp_path / "kernels.json")
    Chooser(kept, clock).choose(PRODUCT, kernels, lambda outputs: None)
    clock.calls.clear()
    others()
    Chooser(kept, clock).choose(PRODUCT, kernels, lambda outputs: None)
    assert clock.calls


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": {"b": {"1": {"few": "fast"}}}}', b"\xff\x00"])
def test_a_damaged_file_is_as_none(content: bytes, tmp_path: Path, clock: FakeClock, kernels: dict[str, Made]) -> None:
    kept = KernelTimes(tmp_path / "kernels.json")
    kept.path.write_bytes(content)
    assert Chooser(kept, clock).choose(PRODUCT, kernels, lambda outputs: None).names[0] == "few"
    assert kept.recall("another product") is None
    clock.calls.clear()
    Chooser(kept, clock).choose(PRODUCT, kernels, lambda outputs: None)
    assert not clock.calls


def test_what_cant_be_kept_is_found_again(tmp_path: Path, clock: FakeClock, kernels: dict[str, Made]) -> None:
    (tmp_path / "file").touch()
    kept = KernelTimes(tmp_path / "file" / "kernels.json")
    assert Chooser(kept, clock).choose(PRODUCT, kernels, lambda outputs: None).names[0] == "few"
