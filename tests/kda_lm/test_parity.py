"""One answer whichever way it is computed: every kind gives it, and every way is seen to find a model that does not."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import KINDS, compose_config, small_options, tiny_lm, tokens
from torch import Tensor

from kda_lm.decoding import Decoder
from kda_lm.errors import UserError
from kda_lm.evaluation import parity
from kda_lm.mixers import RecurrentMixer, SoftmaxMixer
from kda_lm.model import LM
from scripts import evaluate
from scripts.evaluating.parity import BrokenParity, run_parity

Run = Callable[..., tuple[dict[str, Any], Path]]

SPLITS = parity.places(40, 2)


def compare(model: LM, precision: Any = "32-true") -> parity.Parity:
    return parity.compare(model, tokens(4, 40), SPLITS, 4, precision)


def test_places() -> None:
    assert parity.places(256, 3) == [1, 2, 3, 63, 64, 65, 128, 192, 255]
    assert parity.places(3, 1) == [1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_one_answer(kind: str) -> None:
    model = tiny_lm(KINDS[kind], layers=2)
    for precision, share in (("32-true", 0.2), ("bf16-mixed", 1.0)):
        found = compare(model, precision)
        assert max(map(found.share, found.differences)) <= share


def lost_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments lose what the convolution saw."""
    right = RecurrentMixer.forward

    def forward(self: Any, x: Tensor, state: Any = None, *rest: Any) -> Any:
        return right(self, x, None if state is None else state._replace(conv=torch.zeros_like(state.conv)), *rest)

    monkeypatch.setattr(RecurrentMixer, "forward", forward)


def wrong_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes the token after its own."""
    right = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, ids: right(self, (ids + 1) % 29))


def wrong_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tokens at once are all in the first one's place."""
    right = SoftmaxMixer.decode

    def decode(self: Any, x: Tensor, cache: Any, positions: Tensor) -> Tensor:
        return right(self, x, cache, positions[:, :1].expand_as(positions))

    monkeypatch.setattr(SoftmaxMixer, "decode", decode)


def wrong_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row depends on how many there are."""
    right = LM.embed
    some = 0.1 * torch.arange(16)
    monkeypatch.setattr(LM, "embed", lambda self, ids: right(self, ids) + some * (len(ids) < 4))


def lost_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are packed run into each other in one kind of layer."""
    right = RecurrentMixer.forward

    def forward(self: Any, x: Tensor, state: Any = None, cu_seqlens: Tensor | None = None) -> Any:
        y, after = right(self, x, state, cu_seqlens)
        return (y if cu_seqlens is None else right(self, x)[0]), after

    monkeypatch.setattr(RecurrentMixer, "forward", forward)


@pytest.mark.parametrize(
    ("fault", "ways"),
    [
        (lost_state, {"segments"}),
        (wrong_step, {"stepped", "unequal"}),
        (wrong_piece, {"appended"}),
        (wrong_batch, {"alone", "unequal"}),  # packed, the prompts are one row
        (lost_boundaries, {"unequal"}),
    ],
)
def test_what_each_way_finds(fault: Any, ways: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_lm(small_options("kda"), small_options("softmax"))
    fault(monkeypatch)
    for precision in ("32-true", "bf16-mixed"):
        found = compare(model, precision)
        names = {way.way: function.__name__ for way, function in zip(found.differences, parity.WAYS, strict=True)}
        assert {names[way.way] for way in found.broken} == ways, found.differences


def test_what_is_no_number_is_beyond_any_bound() -> None:
    found = parity.Difference("some way")
    found.add(torch.tensor([[1.0, float("nan")]]), torch.ones(1, 2), "here")
    found.add(torch.ones(1, 2), torch.ones(1, 2), "there")
    assert found.where == "here"
    assert parity.Parity("32-true", None, 1.0, [found]).broken == [found]


def test_a_way_may_have_a_bound_of_its_own() -> None:
    same, near = parity.Difference("to the bit", bound=0.0), parity.Difference("near")
    for found in (same, near):
        found.add(torch.tensor([[1.0, 1.0], [1.0, 1.1]]), torch.ones(2, 2), "here")
    assert near.where == "row 1, here"
    assert near.error == pytest.approx(0.1 / 2**0.5) and near.rms == pytest.approx(0.05)
    assert parity.Parity("bf16-mixed", 0.03, 0.08, [near]).broken == []
    assert parity.Parity("bf16-mixed", 0.02, 0.08, [near]).broken == [near]
    assert parity.Parity("bf16-mixed", 0.03, 0.06, [near]).broken == [near]
    assert parity.Parity("32-true", None, 0.06, [near]).broken == [near]
    assert parity.Parity("32-true", None, 1.0, [same, near]).broken == [same]


def words_for(folder: Path) -> tuple[str, ...]:
    return f"ckpt={folder / 'checkpoints' / 'last.ckpt'}", "accelerator=cpu", "length=40", "steps=3", "splits=2"


def test_of_a_checkpoint(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command: what it prints, writes and refuses."""
    _, folder = run("trained")
    words = words_for(folder)
    for precision, arithmetics in (("auto", ["32-true"]), ("bf16-mixed", ["bf16-mixed"])):
        written = tmp_path / f"{precision}.json"
        found = run_parity(compose_config("parity", *words, f"precision={precision}", f"json={written}"))
        assert [x.precision for x in found] == arithmetics and not found[0].broken
        content = json.loads(written.read_text())
        assert len(content["parity"][0]["differences"]) == len(parity.WAYS)
    printed = capsys.readouterr().out
    assert "a row without the batch" in printed and "twice the distance of bf16 from float32" in printed
    for word, said in (
        ("length=2", "length is 2; it takes at least 3"),
        ("length=99999", "shorter than 4 windows of 99999 tok"),
    ):
        with pytest.raises(UserError, match=said):
            run_parity(compose_config("parity", *words, word))


def test_a_broken_model_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = run("trained")
    wrong_step(monkeypatch)
    said = "not one answer whichever way it is computed: 32-true, prefill, then token by"
    with pytest.raises(BrokenParity, match=said) as stopped:
        run_parity(compose_config("parity", *words_for(folder)))
    assert stopped.value.exit_status == 1


def test_unknown_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "party", "ckpt=x"])
    with pytest.raises(SystemExit) as stopped:
        evaluate.main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: unknown command 'party'; commands are evaluate, context, ") and "parity" in error
    assert error.count("\n") == 1
