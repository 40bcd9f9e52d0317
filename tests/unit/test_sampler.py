"""What the sampler promises: exact meanings of its settings, right frequencies, and noise that travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.tiny_models import new_row

from slipstream.engine.plan import NewRow
from slipstream.run.sampler import NO_TOKEN, Sampler, mix64, uniforms
from slipstream.types import SamplingParams

VOCAB = 50
CPU = torch.device("cpu")


def sampler_with(*rows: NewRow, vocab: int = VOCAB) -> Sampler:
    sampler = Sampler(16, vocab, CPU)
    for row in rows:
        sampler.add(row)
    return sampler


def draws(logits: torch.Tensor, params: SamplingParams, count: int = 4000, **changes: Any) -> np.ndarray:
    """The tokens at positions 0 to count."""
    sampler = sampler_with(new_row(0, params, **changes), vocab=logits.shape[-1])
    rows = np.zeros(count, dtype=np.int64)
    ids, _ = sampler.sample(logits.repeat(count, 1), rows, np.arange(count))
    return ids


def shares(ids: np.ndarray, vocab: int) -> torch.Tensor:
    return torch.from_numpy(np.bincount(ids, minlength=vocab) / len(ids))


def assert_distributed(ids: np.ndarray, probabilities: torch.Tensor) -> None:
    """Every share within five standard deviations, and nothing that has probability 0."""
    probabilities = probabilities.double()
    spread = (probabilities * (1 - probabilities) / len(ids)).sqrt()
    assert ((shares(ids, len(probabilities)) - probabilities).abs() <= 5 * spread).all()


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2


def test_the_generator_is_splitmix64():
    # first outputs for seed 1234567: https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    states = np.array([1234567], dtype=np.uint64) + np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_noise_is_uniform_and_differs_between_seeds_and_positions():
    positions = np.arange(200_000)
    noise = uniforms(np.zeros(len(positions), dtype=np.uint64), positions)
    assert 0 < noise.min() < noise.max() < 1
    counts = np.histogram(noise, bins=64, range=(0, 1))[0]
    assert abs(counts - len(noise) / 64).max() < 5 * (len(noise) / 64) ** 0.5
    neighbours = uniforms(np.ones(len(positions), dtype=np.uint64), positions)
    for other in (neighbours, np.roll(noise, 1)):
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.02
    assert len(np.unique(uniforms(np.arange(1000, dtype=np.uint64), np.full(1000, 7)))) == 1000


def test_greedy_takes_the_most_likely_token(logits: torch.Tensor):
    ids = draws(logits, SamplingParams(temperature=0.0), 5)
    assert ids.tolist() == [int(logits.argmax())] * 5


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_scales_the_logits(logits: torch.Tensor, temperature: float):
    assert_distributed(draws(logits, SamplingParams(temperature=temperature)), (logits / temperature).softmax(-1))


def test_a_tiny_temperature_is_nearly_greedy(logits: torch.Tensor):
    assert set(draws(logits, SamplingParams(temperature=1e-30), 50)) == {int(logits.argmax())}


def test_top_k_keeps_k_tokens(logits: torch.Tensor):
    probabilities = logits.softmax(-1)
    probabilities[probabilities < probabilities.topk(4).values[-1]] = 0
    assert_distributed(draws(logits, SamplingParams(top_k=4)), probabilities / probabilities.sum())
    assert_distributed(draws(logits, SamplingParams(top_k=VOCAB + 9)), logits.softmax(-1))


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    order = probabilities.argsort(descending=True)
    before = probabilities[order].cumsum(-1) - probabilities[order]
    kept = torch.zeros_like(probabilities)
    kept[order[before < top_p]] = probabilities[order[before < top_p]]
    return kept / kept.sum()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_the_share(logits: torch.Tensor, top_p: float):
    assert_distributed(draws(logits, SamplingParams(top_p=top_p)), nucleus(logits.softmax(-1), top_p))


def test_a_nucleus_wider_than_the_first_guess_is_found():
    flat = torch.randn(1200, generator=torch.Generator().manual_seed(1)) * 0.1
    ids = draws(flat, SamplingParams(top_p=0.8), 2000)
    kept = nucleus(flat.softmax(-1), 0.8) > 0
    assert kept.sum() > 800
    assert kept[ids].all()
    assert len(np.unique(ids)) > 600


def test_min_p_is_relative_to_the_most_likely(logits: torch.Tensor):
    probabilities = logits.softmax(-1)
    probabilities[probabilities < 0.2 * probabilities.max()] = 0
    assert_distributed(draws(logits, SamplingParams(min_p=0.2)), probabilities / probabilities.sum())


def test_top_k_comes_before_top_p_and_after_temperature(logits: torch.Tensor):
    probabilities = (logits / 1.7).softmax(-1)
    probabilities[probabilities < probabilities.topk(6).values[-1]] = 0
    wanted = nucleus(probabilities / probabilities.sum(), 0.7)
    assert_distributed(draws(logits, SamplingParams(temperature=1.7, top_k=6, top_p=0.7)), wanted)


def test_settings_of_one_batch_do_not_mix(logits: torch.Tensor):
    settings = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3),
        SamplingParams(seed=3, top_k=2),
        SamplingParams(seed=3, top_p=0.4),
        SamplingParams(seed=3, min_p=0.5),
        SamplingParams(temperature=0.0, logit_bias={7: 100.0}),
        SamplingParams(seed=9, repetition_penalty=1.5),
        SamplingParams(seed=3, top_k=20, top_p=0.6, temperature=0.5),
    ]
    rows = [new_row(index, params, prompt_ids=[3, 4]) for index, params in enumerate(settings)]
    for position in range(30):
        together, _ = sampler_with(*rows).sample(
            logits.repeat(len(rows), 1), np.arange(len(rows)), np.full(len(rows), position)
        )
        alone = [
            sampler_with(row).sample(logits[None].clone(), np.array([row.row]), np.array([position]))[0][0]
            for row in rows
        ]
        assert together.tolist() == alone


def test_the_same_seed_and_position_give_the_same_token_after_a_move(logits: torch.Tensor):
    params = SamplingParams(seed=77, frequency_penalty=0.4, repetition_penalty=1.2)
    first = sampler_with(new_row(0, params, prompt_ids=[1, 2]))
    answer = [int(first.sample(logits[None].clone(), np.array([0]), np.array([2 + n]))[0][0]) for n in range(20)]
    moved = sampler_with(new_row(5, params, prompt_ids=[1, 2], output_ids=answer[:8], outputs=8))
    rest = [int(moved.sample(logits[None].clone(), np.array([5]), np.array([10 + n]))[0][0]) for n in range(12)]
    assert rest == answer[8:]


def penalized(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The logits that a sampler works with, seen through a bias-free greedy draw of each token's rank."""
    sampler = sampler_with(new_row(0, params, prompt_ids=prompt, output_ids=output, outputs=len(output)))
    values = logits[None].clone()
    sampler.sample(values, np.array([0]), np.array([5]))
    return values[0]


def test_the_repetition_penalty_shrinks_logits_of_prompt_and_output(logits: torch.Tensor):
    found = penalized(logits, SamplingParams(temperature=0.0, repetition_penalty=1.3), [1, 2, 2], [3, 3])
    wanted = logits.clone()
    for token in (1, 2, 3):
        wanted[token] = wanted[token] / 1.3 if wanted[token] > 0 else wanted[token] * 1.3
    assert torch.allclose(found, wanted)
    assert {bool(logits[token] > 0) for token in (1, 2, 3)} == {True, False}


def test_presence_and_frequency_penalties_count_the_output_alone(logits: torch.Tensor):
    params = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    found = penalized(logits, params, [1, 2, 2], [3, 3, 4])
    wanted = logits.clone()
    wanted[3] -= 0.5 + 2 * 0.25
    wanted[4] -= 0.5 + 0.25
    assert torch.allclose(found, wanted)


def test_penalties_see_tokens_as_they_are_chosen():
    flat = torch.zeros(VOCAB)
    sampler = sampler_with(new_row(0, SamplingParams(temperature=0.0, frequency_penalty=1.0)))
    chosen = [int(sampler.sample(flat[None].clone(), np.array([0]), np.array([n]))[0][0]) for n in range(VOCAB)]
    assert sorted(chosen) == list(range(VOCAB))


def test_a_freed_row_forgets_its_counts(logits: torch.Tensor):
    sampler = sampler_with(new_row(0, SamplingParams(temperature=0.0, presence_penalty=100.0)))
    first = int(sampler.sample(logits[None].clone(), np.array([0]), np.array([0]))[0][0])
    sampler.free(0)
    sampler.add(new_row(0, SamplingParams(temperature=0.0, presence_penalty=100.0)))
    assert int(sampler.sample(logits[None].clone(), np.array([0]), np.array([0]))[0][0]) == first
    sampler.free(0)
    with pytest.raises(IndexError, match="row 0 is free"):
        sampler.sample(logits[None].clone(), np.array([0]), np.array([0]))


def test_logit_bias_moves_tokens_and_unknown_ids_have_no_effect(logits: torch.Tensor):
    assert set(draws(logits, SamplingParams(logit_bias={11: 100.0, VOCAB + 3: 100.0}), 20)) == {11}
    best = int(logits.argmax())
    assert best not in draws(logits, SamplingParams(logit_bias={best: -100.0}))


def test_min_tokens_bans_ends_until_they_are_reached():
    logits = torch.zeros(VOCAB)
    logits[[1, 7]] = 50.0
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(7,))
    sampler = sampler_with(new_row(0, params, eos_ids=(1,), outputs=1))
    chosen = [int(sampler.sample(logits[None].clone(), np.array([0]), np.array([n]))[0][0]) for n in range(4)]
    assert chosen[:2] == [0, 0]
    assert set(chosen[2:]) <= {1, 7}


def test_logprobs_are_those_of_the_raw_logits(logits: torch.Tensor):
    params = SamplingParams(temperature=0.5, top_k=1, logit_bias={9: 100.0}, logprobs=3)
    sampler = sampler_with(new_row(0, params), new_row(1, SamplingParams(temperature=0.0)))
    sampler.add(new_row(2, SamplingParams(temperature=0.0, logprobs=0)))
    ids, found = sampler.sample(logits.repeat(3, 1), np.arange(3), np.array([4, 4, 4]))
    raw = logits.log_softmax(-1)
    assert ids.tolist() == [9, int(logits.argmax()), int(logits.argmax())]
    assert found[1] is None
    assert found[0] is not None
    assert found[0].logprob == pytest.approx(float(raw[9]), abs=1e-5)
    assert found[0].top_ids == raw.topk(3).indices.tolist()
    assert found[0].top_logprobs == pytest.approx(raw.topk(3).values.tolist(), abs=1e-5)
    assert found[2] is not None
    assert (found[2].logprob, found[2].top_ids) == (pytest.approx(float(raw.max()), abs=1e-5), [])


NO_NUMBER = float("nan")
EXTREMES = [
    {"temperature": 1e-300},
    {"temperature": 1e-46},
    {"temperature": 1e300},
    {"temperature": NO_NUMBER},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 1e300},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": -1.0},
    {"repetition_penalty": NO_NUMBER},
    {"presence_penalty": 1e300},
    {"frequency_penalty": -1e300},
    {"frequency_penalty": NO_NUMBER},
    {"logit_bias": {3: 1e300, 4: float("inf")}},
    {"logit_bias": {token: float("-inf") for token in range(VOCAB)}},
    {"logit_bias": {3: NO_NUMBER}},
    {"top_p": NO_NUMBER},
    {"top_p": -1.0},
    {"top_p": 1e-300},
    {"min_p": NO_NUMBER},
    {"min_p": 7.0},
    {"min_tokens": 9, "stop_token_ids": tuple(range(VOCAB))},
    {"top_k": 1 << 80},
    {"top_k": -5},
    {"seed": -(1 << 90)},
]


@pytest.mark.parametrize("extreme", EXTREMES, ids=str)
@pytest.mark.parametrize("other", [{}, {"temperature": 1e-300, "repetition_penalty": 1e-300}], ids=str)
def test_no_setting_fails_or_disturbs_the_others(logits: torch.Tensor, extreme: dict[str, Any], other: dict[str, Any]):
    tokens = [1, int(logits.argmax())]
    quiet = SamplingParams(seed=3, min_p=0.01)
    odd = SamplingParams(**{**other, **extreme})
    alone = sampler_with(new_row(1, quiet))
    mixed = sampler_with(new_row(0, odd, prompt_ids=tokens, output_ids=tokens), new_row(1, quiet))
    for position in range(20):
        expected, _ = alone.sample(logits[None].clone(), np.array([1]), np.array([position]))
        ids, _ = mixed.sample(logits.repeat(2, 1), np.array([0, 1]), np.array([position] * 2))
        assert 0 <= ids[0] < VOCAB
        assert ids[1] == expected[0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-6])
def test_a_vanishing_temperature_is_greedy(logits: torch.Tensor, temperature: float):
    logits[7] = logits.max() + 1e-6  # nearly a tie
    params = SamplingParams(temperature=temperature)
    assert set(draws(logits, params, 50)) == set(draws(logits, SamplingParams(temperature=0.0), 50))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_p": 0.5, "presence_penalty": 1.0}, {"min_p": 0.1}])
def test_a_row_whose_logits_are_not_finite_gets_no_token_and_the_others_theirs(
    logits: torch.Tensor, broken: float, how: dict[str, Any]
):
    params = SamplingParams(logprobs=1, **how)
    expected, _ = sampler_with(new_row(1, params)).sample(logits[None].clone(), np.array([1]), np.array([4]))
    both = logits.repeat(2, 1)
    both[0, 3] = broken
    ids, found = sampler_with(new_row(0, params), new_row(1, params)).sample(both, np.array([0, 1]), np.array([4, 4]))
    assert ids.tolist() == [NO_TOKEN, expected[0]]
    assert found[0] is None
    assert found[1] is not None


def test_logits_that_are_all_impossible_are_not_finite(logits: torch.Tensor):
    assert draws(logits.fill_(float("-inf")), SamplingParams(), 1).tolist() == [NO_TOKEN]
