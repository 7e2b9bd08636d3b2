"""The memory of recurrent layers, by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import compose_config, small_options, tiny_lm

from kda_lm.errors import UserError
from kda_lm.evaluation.memory import summary, watch_memory
from kda_lm.mixers.recurrent import RecurrentMixer
from scripts.evaluating.memory import run_memory

Run = Callable[..., tuple[dict[str, Any], Path]]
TOKENS = torch.randint(29, (21,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["kda", "gated_delta", "delta", "linear"])
def test_by_hand(kind: str) -> None:
    """The state after the last token is the mixer's own, and all else follows from the states."""
    lm = tiny_lm(small_options(kind), small_options("softmax"))
    (memory,) = watch_memory(lm, TOKENS)
    mixer = lm.layers()[0]
    assert isinstance(mixer, RecurrentMixer) and (memory.layer, memory.name) == (0, "m0")
    with torch.no_grad():
        _, states = lm(TOKENS[None])
        normed = lm.blocks[0].mixer_norm.add(lm.embed(TOKENS[None]), None)[1]  # type: ignore[operator, union-attr]
        k, v, g, beta = mixer.memory_inputs(normed)
    S = states[0].memory[0][..., : v.shape[-1]].double().numpy()  # without the normaliser's column
    heads = S.shape[0]
    assert memory.norm[-1] == pytest.approx(np.sqrt((S**2).sum((1, 2))), rel=1e-4)
    for h in range(heads):
        shares = np.linalg.svd(S[h], compute_uv=False)
        shares = shares[shares > 1e-9] / shares.sum()
        assert memory.rank[-1, h] == pytest.approx(math.exp(-(shares * np.log(shares)).sum()), rel=1e-3)
        key, value = k[0, 4, h * k.shape[2] // heads].double().numpy(), v[0, 4, h].double().numpy()
        last = np.linalg.norm(S[h].T @ key - value) / np.linalg.norm(value)  # of token 4, 16 tokens later
        assert memory.read_back[5, h] * 5 > last  # the average is over tokens 0 to 4
    assert memory.gaps == (0, 1, 2, 4, 8, 16) and memory.read_back.shape == (6, heads)
    assert memory.retention.shape[:2] == memory.strength.shape == (21, heads)
    if g is None:
        assert (memory.retention == 1).all() and np.isinf(memory.half_lives()).all()
    else:
        assert memory.retention == pytest.approx(g[0].exp().view(21, heads, -1).numpy())
        assert memory.half_lives() == pytest.approx((math.log(2) / -g[0].mean(0)).view(heads, -1).numpy(), rel=1e-4)
    assert (memory.strength == 1).all() if beta is None else ((memory.strength > 0) & (memory.strength < 1)).all()
    cosines = []
    for h in range(k.shape[2]):
        unit = (k[0, :, h] / k[0, :, h].norm(dim=-1, keepdim=True)).double().numpy()
        products = np.abs(unit @ unit.T)
        cosines.append((products.sum() - 21) / (21 * 20))
    assert memory.interference == pytest.approx(cosines, rel=1e-4)
    assert set(summary(memory)) >= {"half-life", "write strength", "read-back error"}


def test_read_back_by_hand() -> None:
    """Of a delta rule: the error right after the write is what the write strength left, |1 − β| where keys are new."""
    lm = tiny_lm(small_options("delta"))
    (memory,) = watch_memory(lm, TOKENS[:2])
    mixer = lm.layers()[0]
    assert isinstance(mixer, RecurrentMixer)
    with torch.no_grad():
        normed = lm.blocks[0].mixer_norm.add(lm.embed(TOKENS[None, :2]), None)[1]  # type: ignore[operator, union-attr]
        k, v, _, beta = (x if x is None else x.double() for x in mixer.memory_inputs(normed))
    assert k is not None and v is not None and beta is not None
    for h in range(v.shape[2]):
        S = beta[0, 0, h] * torch.outer(k[0, 0, h], v[0, 0, h])
        errors = [(S.T @ k[0, 0, h] - v[0, 0, h]).norm() / v[0, 0, h].norm()]
        S = S + torch.outer(k[0, 1, h], beta[0, 1, h] * (v[0, 1, h] - S.T @ k[0, 1, h]))
        errors.append((S.T @ k[0, 1, h] - v[0, 1, h]).norm() / v[0, 1, h].norm())
        later = (S.T @ k[0, 0, h] - v[0, 0, h]).norm() / v[0, 0, h].norm()
        assert memory.read_back[:, h] == pytest.approx([float(sum(errors)) / 2, float(later)], rel=1e-3)


def test_layers_without_a_memory() -> None:
    lm = tiny_lm(small_options("softmax"), small_options("kda"))
    assert [memory.layer for memory in watch_memory(lm, TOKENS)] == [1]
    with pytest.raises(UserError, match="no recurrent layer"):
        watch_memory(tiny_lm(small_options("softmax")), TOKENS)
    assert not lm.layers()[1]._forward_pre_hooks


def test_the_command(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["num_heads=2", "expand_k=1", "expand_v=1"]
    words = ["model.pattern=[kda,gated_delta,softmax]", "model.num_layers=3"]
    _, folder = run("trained", *words, *(f"mixers.gated_delta.{size}" for size in sizes))

    def command(*words: str) -> Any:
        ckpt = f"ckpt={folder / 'checkpoints' / 'last.ckpt'}"
        return run_memory(compose_config("memory", ckpt, "accelerator=cpu", *words))

    found = command("length=40", "plot=memory.png", "json=memory.json")
    assert [(memory.layer, memory.name) for memory in found] == [(0, "kda"), (1, "gated_delta")]
    saved = json.loads(Path("memory.json").read_text())["layers"]
    assert [len(layer["strength"]) for layer in saved] == [40, 40]
    assert np.array(saved[0]["half_lives"]).shape == (2, 8) and np.array(saved[1]["half_lives"]).shape == (2, 1)
    assert Path("memory.png").read_bytes()[1:4] == b"PNG"
    assert "layer 1, gated_delta" in capsys.readouterr().out
    for word, said in (("length=1", "length is 1"), ("plot=a.gif", "plot is"), ("length=100000", "lower length=")):
        with pytest.raises(UserError, match=said):
            command(word)
