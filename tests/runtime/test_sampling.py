"""House rules: transformers' logits processors are the oracle; whatever is random is seeded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core.errors import ConfigError, StageError
from core.runtime import sample_cpu, sample_cuda, sampling
from core.runtime.sampling import Sampler, choose, finite_rows, require_finite, uniform
from core.runtime.sampling_params import SamplingParams, advised

VOCAB = 4000
GREEDY = SamplingParams(temperature=0)
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(top_k=1),
    SamplingParams(top_k=20),
    SamplingParams(top_k=2 * VOCAB),
    SamplingParams(top_p=0.01),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.95),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=1.7, top_p=0.9999),
    SamplingParams(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1),
    SamplingParams(temperature=1.5, top_p=0.9, top_k=2000, min_p=0.001),
]


def logits_of(seed: int, spread: float, rows: int = 1) -> Tensor:
    return spread * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def oracle_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    no_ids = torch.empty(len(logits), 0, dtype=torch.long)
    warped: Tensor = warpers(no_ids, logits.double())
    return warped.softmax(1)


Weigh = Callable[[Tensor, SamplingParams], Tensor]


def weigh_on_cpu(logits: Tensor, params: SamplingParams) -> Tensor:
    ids, found = sample_cpu.weigh(logits[0].numpy(), params)
    weights = torch.zeros(logits.shape[1])
    weights[slice(None) if ids is None else torch.from_numpy(ids)] = torch.from_numpy(found)
    return weights


def weigh_on_device(logits: Tensor, params: SamplingParams) -> Tensor:
    return sample_cuda.weigh(logits, [params])[0]


@pytest.fixture(params=[weigh_on_cpu, weigh_on_device])
def weigh(request: pytest.FixtureRequest) -> Weigh:
    """[vocab], from logits [1, vocab]; what is for other devices computes on a CPU as well."""
    return request.param


def kept(weights: Tensor) -> list[int]:
    return weights.nonzero()[:, 0].tolist()


def drawn(logits: Tensor, sampler: Sampler, tokens: int) -> list[int]:
    """`tokens` tokens of one session, each from the same logits [1, vocab]."""
    return [choose(logits, [sampler], [position])[0] for position in range(tokens)]


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_what_is_kept_and_how_likely_is_as_the_oracles(weigh: Weigh, params: SamplingParams, spread: float) -> None:
    logits = logits_of(0, spread)
    weights, expected = weigh(logits, params).double(), oracle_probabilities(logits, params)[0]
    assert weights.max() == 1
    found = weights / weights.sum()
    assert torch.equal(found > 1e-30, expected > 1e-30)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-30)


def test_rows_with_other_parameters_do_not_touch_each_other() -> None:
    logits = logits_of(0, 2.0, rows=len(PARAMS))
    together = sample_cuda.weigh(logits, PARAMS)
    for row, params in enumerate(PARAMS):
        alone = weigh_on_device(logits[row : row + 1], params)
        assert torch.equal(together[row] > 0, alone > 0)
        torch.testing.assert_close(together[row], alone)


def test_top_k_keeps_what_equals_the_kth_as_the_oracle_does(weigh: Weigh) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    params = SamplingParams(top_k=2)
    assert kept(weigh(logits, params)) == kept(oracle_probabilities(logits, params)[0]) == [1, 2, 3]


def test_top_p_keeps_the_smallest_set_that_reaches_it(weigh: Weigh) -> None:
    logits = torch.tensor([[0.125, 0.5, 0.25, 0.125]]).log()
    sizes = [len(kept(weigh(logits, SamplingParams(top_p=p)))) for p in (0.0, 0.4, 0.51, 0.74, 0.76, 0.99)]
    assert sizes == [1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("size", [1, 3, 7, 49, 4000])
def test_of_equals_top_p_keeps_the_first(weigh: Weigh, size: int) -> None:
    logits = torch.full((1, size), 0.3)
    assert kept(weigh(logits, SamplingParams(top_p=0.0))) == [0]
    assert kept(weigh(logits, SamplingParams(top_p=0.5))) == list(range((size + 1) // 2))


def test_top_p_measures_what_top_k_left(weigh: Weigh) -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept(weigh(logits, SamplingParams(top_k=2, top_p=0.6))) == [0, 1]
    assert kept(weigh(logits, SamplingParams(top_p=0.39))) == [0]


def test_what_a_grammar_forbids_is_not_drawn_however_many_top_k_would_keep(weigh: Weigh) -> None:
    logits = torch.full((1, 6), -torch.inf)
    logits[0, [1, 4]] = torch.tensor([0.5, 2.0])
    assert kept(weigh(logits, SamplingParams(top_k=3, top_p=0.999))) == [1, 4]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_cpu_and_a_device_draw_the_same(params: SamplingParams) -> None:
    """At a border between two tokens rounding may decide: these seeds are far from any."""
    logits = logits_of(4, 2.0, rows=50)
    uniforms = [uniform(5, i) for i in range(50)]
    on_device = sample_cuda.draw(logits, [params] * 50, uniforms)
    assert [sample_cpu.draw(row.numpy(), params, each) for row, each in zip(logits, uniforms, strict=True)] == on_device


@pytest.mark.parametrize("share", [0.0, 0.5, 1 - 2.0**-52])
def test_the_ends_of_the_scale_draw_what_can_be_drawn(share: float) -> None:
    logits = torch.full((VOCAB,), -torch.inf)
    logits[[700, 701, 3990]] = 0.0
    assert sample_cpu.draw(logits.numpy(), SamplingParams(), share) == {0.0: 700, 0.5: 701}.get(share, 3990)
    assert sample_cuda.draw(logits[None], [SamplingParams()], [share]) == [{0.0: 700, 0.5: 701}.get(share, 3990)]


def test_an_even_spread_of_uniforms_gives_each_token_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "uniform", lambda _, position: position / 5000)
    logits = torch.tensor([[0.0, 2.0, -1.0, 1.0, 0.5, 1.5, -9.0, 0.1, 0.2]])
    for params in (SamplingParams(), SamplingParams(temperature=0.9, top_k=8), SamplingParams(top_p=0.7, min_p=0.2)):
        tokens = choose(logits.expand(5000, -1), [Sampler(params)] * 5000, range(5000))
        counts = torch.bincount(torch.tensor(tokens), minlength=logits.shape[1])
        assert ((counts - 5000 * oracle_probabilities(logits, params)[0]).abs() <= 1).all()


def test_uniforms_are_spread_evenly_over_positions_and_over_seeds() -> None:
    for numbers in ([uniform(7, i) for i in range(10_000)], [uniform(i, 7) for i in range(10_000)]):
        empirical = torch.tensor(sorted(numbers), dtype=torch.float64)
        assert 0 <= empirical[0] <= empirical[-1] < 1
        # Kolmogorov and Smirnov's distance: beyond 0.0195 once in 1,000 sets of 10,000.
        assert (empirical - torch.arange(10_000) / 10_000).abs().max() < 0.0195


def test_temperature_zero_is_greedy() -> None:
    logits = logits_of(1, 1.0)
    assert choose(logits, [Sampler(SamplingParams(temperature=0, top_p=0.1, top_k=3))], [0]) == [int(logits.argmax())]


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 5e-324])
def test_the_smallest_temperatures_are_as_good_as_greedy(temperature: float) -> None:
    logits = 1e4 * logits_of(1, 1.0)
    for params in (SamplingParams(temperature=temperature), SamplingParams(temperature=temperature, top_p=0.9)):
        assert choose(logits, [Sampler(params)], [0]) == [int(logits.argmax())]


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63, 2**70])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9)], ids=str)
def test_a_seed_gives_the_same_tokens_whatever_else_draws(seed: int, params: SamplingParams) -> None:
    logits = logits_of(2, 0.5)
    alone = drawn(logits, Sampler(replace(params, seed=seed)), 20)
    others = [Sampler(each) for each in (GREEDY, SamplingParams(seed=seed + 1), SamplingParams(top_k=5))]
    among = Sampler(replace(params, seed=seed))
    batches = [
        choose(torch.cat((logits_of(i, 1.0, rows=3), logits)), [*others, among], [0, i, i, i]) for i in range(20)
    ]
    assert [batch[-1] for batch in batches] == alone
    assert len(set(alone)) > 1


def test_a_position_alone_decides_what_is_drawn() -> None:
    logits, sampler = logits_of(2, 0.5), Sampler(SamplingParams(seed=3))
    forward = drawn(logits, sampler, 10)
    assert [choose(logits, [sampler], [position])[0] for position in reversed(range(10))] == forward[::-1]


def test_without_a_seed_sessions_differ() -> None:
    logits = logits_of(2, 0.01)
    assert drawn(logits, Sampler(SamplingParams()), 20) != drawn(logits, Sampler(SamplingParams()), 20)


@pytest.mark.parametrize("choose", [choose, sampling._choose_together])
def test_a_batch_of_all_kinds_gives_each_session_its_own(choose: Callable[..., list[int]]) -> None:
    params = [GREEDY, SamplingParams(seed=1), SamplingParams(seed=2, top_k=9), GREEDY, SamplingParams(seed=1)]
    params += [replace(GREEDY, logit_bias={17: 1e3}), SamplingParams(seed=4, top_p=0.5, presence_penalty=1.0)]
    logits, samplers = logits_of(5, 1.0, rows=len(params)), [Sampler(each) for each in params]
    before = logits.clone()
    tokens = choose(logits, samplers, range(len(params)))
    assert torch.equal(logits, before)
    assert tokens == [choose(logits[i : i + 1], [sampler], [i])[0] for i, sampler in enumerate(samplers)]
    assert tokens[5] == 17
    assert choose(logits[:0], [], []) == []


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_the_repetition_penalty_is_the_oracles(penalty: float) -> None:
    logits, prompt, generated = logits_of(6, 2.0), [5, 5, 9, 3000], [9, 7, 7, 12]
    sampler = Sampler(replace(GREEDY, repetition_penalty=penalty), prompt=prompt)
    for token in generated:
        sampler.accept(token)
    adjusted = logits.clone()
    sampler.adjust(adjusted[0])
    oracle = RepetitionPenaltyLogitsProcessor(penalty)
    assert torch.equal(adjusted, oracle(torch.tensor([[*prompt, *generated]]), logits))


def test_presence_and_frequency_penalties_count_what_was_generated_alone() -> None:
    sampler = Sampler(replace(GREEDY, presence_penalty=0.5, frequency_penalty=0.25), prompt=[0, 1])
    for token in (1, 3, 3, 3):
        sampler.accept(token)
    logits = torch.zeros(5)
    sampler.adjust(logits)
    assert logits.tolist() == [0, -0.75, 0, -1.25, 0]


def test_bias_comes_before_penalties_and_these_before_the_grammar() -> None:
    params = replace(GREEDY, logit_bias={0: 3.0, 1: -3.0}, repetition_penalty=2.0, frequency_penalty=0.5)
    sampler = Sampler(params, prompt=[1], constraint=NoOddTokens())
    for token in (0, 0):
        sampler.accept(token)
    logits = torch.ones(4)
    sampler.adjust(logits)
    assert logits.tolist() == [(1 + 3) / 2 - 2 * 0.5, -torch.inf, 1, -torch.inf]


class NoOddTokens:
    def __init__(self) -> None:
        self.accepted: list[int] = []

    def forbid(self, logits: Tensor) -> None:
        logits[1::2] = -torch.inf

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=0), SamplingParams(seed=0, top_k=3)], ids=str)
def test_a_constraint_is_kept_and_told_what_was_accepted(params: SamplingParams) -> None:
    constraint = NoOddTokens()
    sampler = Sampler(params, constraint=constraint)
    tokens = []
    for position in range(20):
        [token] = choose(logits_of(position, 1.0), [sampler], [position])
        sampler.accept(token)
        tokens.append(token)
    assert constraint.accepted == tokens
    assert all(token % 2 == 0 for token in tokens)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_told_row_by_row(broken: float) -> None:
    logits = logits_of(3, 1.0, rows=3)
    require_finite(logits)
    assert finite_rows(logits) == [True] * 3
    logits[1, 5] = broken
    assert finite_rows(logits) == [True, False, True]
    with pytest.raises(StageError, match=f"1 of {3 * VOCAB} are NaN or infinite"):
        require_finite(logits)


def test_finite_logits_whose_sum_overflows_are_finite() -> None:
    assert finite_rows(torch.full((1, 4), 3e38)) == [True]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 10.0])
def test_a_penalty_beyond_all_numbers_leaves_something_to_draw(penalty: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, frequency_penalty=-2.0, seed=1)
    sampler = Sampler(params, prompt=[0, 1, 2, 3])
    logits = torch.tensor([[0.0, 3.0, -3.0, 1e-30, 1.0]])
    assert 0 <= choose(logits, [sampler], [0])[0] < 5
    sampler.accept(1)
    assert 0 <= choose(logits, [sampler], [1])[0] < 5


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"temperature": 0.6, "top_k": 20, "top_p": None, "pad_token_id": 3}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": False}, {"temperature": 0.0}),
    ],
)
def test_what_the_makers_advise(said: dict[str, object], meant: dict[str, float]) -> None:
    assert advised(said) == meant


@pytest.mark.parametrize("value", ["0.6", True, [1]])
def test_advice_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        advised({"temperature": value})
