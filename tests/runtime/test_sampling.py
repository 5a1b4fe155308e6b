from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from core.errors import StageError
from core.runtime.sampling import Sampler, SamplingParams

VOCAB = 4000


def logits_of(seed: int, spread: float) -> Tensor:
    return spread * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def oracle_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    no_ids = torch.empty(1, 0, dtype=torch.long)
    warped: Tensor = warpers(no_ids, logits[None].double())
    return warped[0].softmax(0)


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.3),
        SamplingParams(top_k=1),
        SamplingParams(top_k=20),
        SamplingParams(top_k=2 * VOCAB),
        SamplingParams(top_p=0.01),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.95),
        SamplingParams(temperature=1.7, top_p=0.9999),
        SamplingParams(temperature=0.7, top_p=0.8, top_k=20),
        SamplingParams(temperature=1.5, top_p=0.9, top_k=2000),
    ],
    ids=str,
)
def test_what_is_kept_and_how_likely_is_as_the_oracles(params: SamplingParams, spread: float) -> None:
    logits = logits_of(0, spread)
    ids, probabilities = Sampler(params).distribution(logits)
    expected = oracle_probabilities(logits, params)
    assert set(ids.tolist()) == set(expected.nonzero().squeeze(1).tolist())
    torch.testing.assert_close(probabilities, expected[ids])


def test_top_k_keeps_what_equals_the_kth_as_the_oracle_does() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    ids, _ = Sampler(SamplingParams(top_k=2)).distribution(logits)
    assert ids.tolist() == oracle_probabilities(logits, SamplingParams(top_k=2)).nonzero().squeeze(1).tolist()
    assert ids.tolist() == [1, 2, 3]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.125, 0.5, 0.25, 0.125]).log()
    sizes = [len(Sampler(SamplingParams(top_p=p)).distribution(logits)[0]) for p in (0.0, 0.4, 0.51, 0.74, 0.76, 0.99)]
    assert sizes == [1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("size", [1, 3, 7, 49, 4000])
def test_top_p_keeps_one_token_even_of_equals(size: int) -> None:
    assert len(Sampler(SamplingParams(top_p=0.0)).distribution(torch.full((size,), 0.3))[0]) == 1


def test_draws_follow_the_distribution() -> None:
    """Pearson's chi-squared test at 7 degrees of freedom: a right sampler exceeds 24.3 once in 1,000 seeds."""
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0, 0.5, 1.5, -9.0, 0.1, 0.2])
    params = SamplingParams(temperature=0.9, top_k=8, seed=0)
    expected = 4000 * oracle_probabilities(logits, params)
    sampler = Sampler(params)
    counts = torch.bincount(torch.tensor([sampler(logits) for _ in range(4000)]), minlength=len(logits))
    drawable = expected > 0
    assert counts[~drawable].sum() == 0
    assert ((counts - expected)[drawable] ** 2 / expected[drawable]).sum() < 24.3


def test_temperature_zero_is_greedy() -> None:
    logits = logits_of(1, 1.0)
    assert Sampler(SamplingParams(temperature=0, top_p=0.1, top_k=3))(logits) == int(logits.argmax())


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 5e-324])
def test_the_smallest_temperatures_are_as_good_as_greedy(temperature: float) -> None:
    logits = 1e4 * logits_of(1, 1.0)
    assert Sampler(SamplingParams(temperature=temperature, top_p=0.9))(logits) == int(logits.argmax())


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63, 2**70])
def test_a_seed_gives_the_same_tokens_whatever_else_draws(seed: int) -> None:
    logits = logits_of(2, 0.5)
    alone = Sampler(SamplingParams(seed=seed))
    expected = [alone(logits) for _ in range(20)]
    among_others, other = Sampler(SamplingParams(seed=seed)), Sampler(SamplingParams(seed=seed + 1))
    drawn = []
    for _ in range(20):
        drawn.append(among_others(logits))
        other(logits)
        torch.rand(3)
    assert drawn == expected
    assert len(set(expected)) > 1


def test_without_a_seed_sessions_differ() -> None:
    logits = logits_of(2, 0.01)
    first, second = Sampler(SamplingParams()), Sampler(SamplingParams())
    assert [first(logits) for _ in range(20)] != [second(logits) for _ in range(20)]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(broken: float, temperature: float) -> None:
    logits = logits_of(3, 1.0)
    logits[5] = broken
    with pytest.raises(StageError, match=f"1 of {VOCAB} are NaN or infinite"):
        Sampler(SamplingParams(temperature=temperature, top_k=3))(logits)
