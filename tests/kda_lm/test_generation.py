"""Sampling: cached decoding draws what recomputation would, and each knob keeps what it says.

What is guaranteed: the same model, prompt, options and number of samples give the same texts. The first of several
samples is not the text of a single one, because all samples draw from one stream of random numbers.
"""

from typing import Any

import pytest
import torch
from support import PUBLISHED, small_options, tiny_lm
from torch import Tensor

from kda_lm.config import read_config
from kda_lm.errors import UserError
from kda_lm.generation import SampleConfig, SamplingConfig, draw, generate
from kda_lm.model import LM


def texts(model: LM, prompt: list[int], num_samples: int = 1, stop_id: int | None = None, **options: Any) -> Tensor:
    """[samples, tokens]."""
    return torch.stack(list(generate(model, prompt, num_samples, SamplingConfig(**options), stop_id)), dim=1)


def lm(*kinds: str, dtype: torch.dtype = torch.float64) -> LM:
    return tiny_lm(*(small_options(kind) for kind in kinds)).to(dtype)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kinds", [*((kind,) for kind in PUBLISHED), PUBLISHED], ids="-".join)
@torch.inference_mode()
def test_greedy_decoding_is_recomputation(kinds: tuple[str, ...]) -> None:
    """Thirty tokens after prompts of one token and of more than a chunk (C7)."""
    model = lm(*kinds)
    for prompt in ([5], list(range(29)) * 3):
        ids = list(prompt)
        for _ in range(30):
            ids.append(int(model(torch.tensor([ids]))[0][0, -1].argmax()))
        assert texts(model, prompt, temperature=0, max_new_tokens=30)[0].tolist() == ids[len(prompt) :]


@torch.inference_mode()
def test_drawn_decoding_is_recomputation() -> None:
    model, config = lm(*PUBLISHED), SamplingConfig(max_new_tokens=20, temperature=1.3, top_k=9, top_p=0.9, seed=4)
    ids, random = torch.tensor([[3, 4, 5]] * 2), generator(4)
    for _ in range(20):
        ids = torch.cat([ids, draw(model(ids)[0][:, -1], config, random)[:, None]], dim=1)
    assert torch.equal(torch.stack(list(generate(model, [3, 4, 5], 2, config)), dim=1), ids[:, 3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_generates(dtype: torch.dtype) -> None:
    found = texts(lm(*PUBLISHED, dtype=dtype), [1, 2], 3, max_new_tokens=5)
    assert found.shape == (3, 5) and found.dtype == torch.int64 and found.min() >= 0 and found.max() < 29


def test_the_seed_decides() -> None:
    model = lm("kda", "softmax")
    one, again = (texts(model, [1], 2, temperature=1.5, seed=3) for _ in range(2))
    assert torch.equal(one, again)
    assert not torch.equal(one, texts(model, [1], 2, temperature=1.5, seed=4))
    assert not torch.equal(one[0], one[1])
    torch.manual_seed(99)  # the global stream has no part in it
    before = torch.get_rng_state()
    assert torch.equal(one, texts(model, [1], 2, temperature=1.5, seed=3))
    assert torch.equal(torch.get_rng_state(), before)


def test_temperature_zero_is_the_likeliest_whatever_else_is_set() -> None:
    logits = torch.randn(50, 29, generator=generator())
    for options in ({}, {"top_k": 3}, {"top_p": 0.1}, {"seed": 7}):
        found = draw(logits, SamplingConfig(temperature=0, **options), generator())
        assert torch.equal(found, logits.argmax(-1))
    assert torch.equal(texts(lm("kda"), [1], 3, temperature=0)[0], texts(lm("kda"), [1], temperature=0)[0])


def counts(probabilities: list[float], **options: Any) -> Tensor:
    """How often each token is drawn, as a part of 40,000 draws."""
    logits = torch.tensor(probabilities).log().expand(40_000, -1)
    found = draw(logits, SamplingConfig(**{"temperature": 1.0, "top_p": 1.0, **options}), generator())
    return found.bincount(minlength=len(probabilities)) / 40_000


FIVE = [0.05, 0.4, 0.25, 0.1, 0.2]  # by likelihood: 1, 2, 4, 3, 0


@pytest.mark.parametrize(
    "options, kept",
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 2, 4}),
        ({"top_k": 5}, {0, 1, 2, 3, 4}),
        ({"top_k": 1000}, {0, 1, 2, 3, 4}),  # C11
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 2}),
        ({"top_p": 0.64}, {1, 2}),
        ({"top_p": 0.66}, {1, 2, 4}),
        ({"top_p": 0.96}, {0, 1, 2, 3, 4}),
        ({"top_k": 3, "top_p": 0.5}, {1, 2}),  # of the three, 0.4 / 0.85 = 0.47 is not enough
        ({"top_k": 2, "top_p": 0.6}, {1}),  # of the two, 0.4 / 0.65 = 0.62 is
        ({"top_k": 1000, "top_p": 1.0}, {0, 1, 2, 3, 4}),
    ],
    ids=str,
)
def test_top_k_and_top_p_keep_the_smallest_set(options: dict[str, Any], kept: set[int]) -> None:
    """And what is kept is drawn in proportion."""
    found = counts(FIVE, **options)
    assert set(found.nonzero()[:, 0].tolist()) == kept
    total = sum(FIVE[i] for i in kept)
    for i in kept:
        assert float(found[i]) == pytest.approx(FIVE[i] / total, abs=0.012)  # five standard errors


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_temperature_divides_logits(temperature: float) -> None:
    expected = torch.tensor(FIVE) ** (1 / temperature)
    assert (counts(FIVE, temperature=temperature) - expected / expected.sum()).abs().max() < 0.012


def test_the_temperature_comes_before_top_p() -> None:
    assert set(counts(FIVE, temperature=0.1, top_p=0.9).nonzero()[:, 0].tolist()) == {1}
    assert len(counts(FIVE, temperature=5.0, top_p=0.9).nonzero()) == 5


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-30, 1e-45])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = 5 * torch.randn(50, 29, generator=generator())
    assert torch.equal(draw(logits, SamplingConfig(temperature=temperature), generator()), logits.argmax(-1))


def test_equal_logits_and_a_bf16_row() -> None:
    flat = torch.zeros(2, 29, dtype=torch.bfloat16)
    for options in ({}, {"top_k": 5}, {"top_p": 0.5}):
        assert draw(flat, SamplingConfig(**options), generator()).shape == (2,)


class Scripted:
    """Stands in for draw: fixed tokens, a row a step."""

    def __init__(self, script: list[list[int]]) -> None:
        self.steps = iter(script)

    def __call__(self, *args: Any) -> Tensor:
        return torch.tensor(next(self.steps))


def test_a_sample_that_ended_stays_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text ends at the stop id; the run ends when all have, and not before."""
    monkeypatch.setattr("kda_lm.generation.draw", Scripted([[1, 2], [7, 3], [4, 5], [6, 7], [8, 9]]))
    found = texts(lm("kda"), [1], 2, stop_id=7, max_new_tokens=50)
    assert found.tolist() == [[1, 7, 7, 7], [2, 3, 5, 7]]
    monkeypatch.setattr("kda_lm.generation.draw", Scripted([[7], [8]]))
    assert texts(lm("kda"), [1], stop_id=7, max_new_tokens=50).tolist() == [[7]]
    monkeypatch.setattr("kda_lm.generation.draw", Scripted([[7], [8]]))
    assert texts(lm("kda"), [1], max_new_tokens=2).tolist() == [[7, 8]]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        texts(lm("kda"), [])


def test_lengths() -> None:
    for length in (1, 2, 7):
        assert texts(lm("kda"), [1], max_new_tokens=length).shape == (1, length)


@pytest.mark.parametrize(
    "cls, options, words",
    [
        (SamplingConfig, {"max_new_tokens": 0}, ["max_new_tokens is 0", "at least 1"]),
        (SamplingConfig, {"temperature": -0.1}, ["temperature is -0.1"]),
        (SamplingConfig, {"temperature": float("nan")}, ["temperature is nan"]),
        (SamplingConfig, {"top_k": 0}, ["top_k is 0", "null"]),
        (SamplingConfig, {"top_k": 2.5}, ["top_k", "2.5", "a whole number or null"]),
        (SamplingConfig, {"top_p": 0.0}, ["top_p is 0.0"]),
        (SamplingConfig, {"top_p": 1.1}, ["top_p is 1.1"]),
        (SamplingConfig, {"top_p": float("nan")}, ["top_p is nan"]),
        (SamplingConfig, {"beams": 4}, ["'beams'", "temperature"]),
        (SampleConfig, {"num_samples": 0}, ["num_samples is 0"]),
        (SampleConfig, {"accelerator": "tpu"}, ["accelerator", "'tpu'", "auto, cpu, gpu"]),
        (SampleConfig, {"precision": "fp8"}, ["precision", "'fp8'", "auto, 32-true, bf16-mixed"]),
    ],
)
def test_refusals(cls: type, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read_config(cls, options, "sample")
    message = str(caught.value)
    assert message.startswith("sample") and "\n" not in message
    assert all(word in message for word in words), message
