"""Needles in haystacks: the oracle finds all of them, at the depth and length that were asked for (G4)."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from data import DataError, Tokenizer
from data.tasks.draws import SPLITS
from data.tasks.needle import FIRST, REPEATED, SECOND, Needle, sentences_of, solve
from data.tokenizers import byte_tokenizer

TEXT = "Fellow citizens! The union is strong.\nIs it not? We must go on,\nby the people. " * 3 + "An end without a mark"
SENTENCES = sentences_of(TEXT)


def in_bytes(text: str) -> int:
    return len(text.encode())


def in_words(text: str) -> int:
    return len(text.split())


def test_sentences() -> None:
    assert SENTENCES[:5] == [
        "Fellow citizens!",
        "The union is strong.",
        "Is it not?",
        "We must go on, by the people.",
        "Fellow citizens!",
    ]
    assert SENTENCES[-1] == "An end without a mark" and sentences_of(" \n ") == []


@pytest.mark.parametrize("kind", ["repeated", "text", "uuid"])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0, None])
@pytest.mark.parametrize(("measure", "length"), [(in_bytes, 400), (in_bytes, 3001), (in_words, 100)])
def test_the_oracle_finds_every_needle(
    kind: str, depth: float | None, measure: Callable[[str], int], length: int
) -> None:
    task = Needle(kind=kind, length=length, depth=depth)  # type: ignore[arg-type]
    prompts = task.prompts(0, "test", np.arange(20), measure, SENTENCES)
    longest = 1 + max(measure(sentence) for sentence in (*SENTENCES, *REPEATED))
    for prompt in prompts:
        assert solve(prompt.text) == prompt.answer
        pattern = r" [0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" if kind == "uuid" else r" [1-9][0-9]{6}"
        assert re.fullmatch(pattern, prompt.answer)
        assert length - longest < measure(prompt.text + prompt.answer) <= length
        assert prompt.text.count("The secret ") == 2 and prompt.text.count(prompt.answer) == 1
        before, _, after = prompt.text.partition("The secret ")
        if depth == 0:
            assert before == "" and prompt.depth == 0
        elif depth == 1:
            assert "The secret" in after.partition(prompt.answer + ". ")[2][:12] and prompt.depth == 1
        elif depth == 0.5:
            assert abs(prompt.depth - 0.5) < 0.2
    depths = {prompt.depth for prompt in prompts}
    assert len({prompt.text for prompt in prompts}) == 20 and (depth is not None or len(depths) > 3)


def test_with_a_tokenizer() -> None:
    tokenizer: Tokenizer = byte_tokenizer()
    (prompt,) = Needle(length=500).prompts(0, "test", np.array([3]), lambda text: len(tokenizer.begin(text)))
    assert 440 < len(tokenizer.begin(prompt.text + prompt.answer)) <= 500


def test_other_needles_mislead_nobody() -> None:
    task = Needle(kind="text", length=2000, num_needles=8, depth=0.25)
    for prompt in task.prompts(1, "val", np.arange(30), in_bytes, SENTENCES):
        assert solve(prompt.text) == prompt.answer and prompt.text.count("The secret ") == 9
        values = re.findall(r"is ([0-9]{7})\.", prompt.text)
        names = re.findall(r"number of the (\w+ \w+) is [0-9]", prompt.text)
        assert len(set(values)) == len(set(names)) == 8
        assert all(first in FIRST and second in SECOND for first, second in map(str.split, names))


def test_a_prompt_is_the_same_in_any_batch() -> None:
    task = Needle(kind="uuid", length=700)
    whole = task.prompts(5, "train", np.arange(10), in_bytes, SENTENCES)
    assert [task.prompts(5, "train", np.array([i]), in_bytes, SENTENCES)[0] for i in range(10)] == whole
    others = [task.prompts(seed, split, np.arange(10), in_bytes, SENTENCES) for seed in (5, 6) for split in SPLITS]
    texts = [prompt.text for prompts in others for prompt in prompts]
    assert len(set(texts)) == len(texts) == 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 1.5}, "depth is 1.5: it takes 0 to 1, or null for any"),
        ({"num_needles": 0}, "num_needles is 0: it takes 1 to 132"),
    ],
)
def test_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(DataError) as refusal:
        Needle(**options)  # type: ignore[arg-type]
    assert str(refusal.value) == message


def test_too_short_for_a_needle() -> None:
    with pytest.raises(DataError, match=r"^length is 50: needles and question take \d+ tokens$"):
        Needle(length=50).prompts(0, "test", np.array([0]), in_bytes)
