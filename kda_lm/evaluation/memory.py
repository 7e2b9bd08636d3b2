"""The memory of a recurrent layer while it reads a text, token by token.

retention      exp(g): what a token leaves of each key channel [T, HV(, K)]; 1 without a decay
strength       β of every write [T, HV]; 1 under the additive rule
norm           ‖S‖_F after each token [T, HV]
rank           exp of the entropy of S's singular values, divided by their sum: how many directions it uses
read-back      ‖S_(s+n)ᵀ k_s − v_s‖ / ‖v_s‖, averaged over s: what n more tokens do to a pair that was written
interference   |cos(k_s, k_t)| of the keys of two tokens, averaged: 0 where no key reads what another has written
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import kernels
from kda_lm.errors import UserError
from kda_lm.evaluation.text import TextConfig
from kda_lm.mixers.recurrent import RecurrentMixer
from kda_lm.model import LM

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class MemoryConfig(TextConfig):
    """Options of `scripts/evaluate.py memory`; see configs/memory.yaml."""

    length: int = 256
    plot: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 2:
            raise ValueError(f"length is {self.length}; it takes at least 2")


@dataclass(frozen=True)
class LayerMemory:
    """Of one layer and one text of T tokens; see the module's docstring."""

    layer: int
    name: str
    retention: Floats  # [T, HV, K], or [T, HV, 1] of a scalar decay or none
    strength: Floats  # [T, HV]
    norm: Floats  # [T, HV]
    rank: Floats  # [T, HV]
    gaps: tuple[int, ...]
    read_back: Floats  # [len(gaps), HV]
    cosines: Floats  # [H, T, T] of the keys, absolute

    @property
    def interference(self) -> Floats:
        """Mean of the cosines of two tokens [H]."""
        T = self.cosines.shape[1]
        return np.asarray((self.cosines.sum((1, 2)) - self.cosines.trace(axis1=1, axis2=2)) / (T * (T - 1)))

    def half_lives(self) -> Floats:
        """Tokens after which half of a channel is left, at the text's mean rate [HV, K]; inf where nothing fades."""
        with np.errstate(divide="ignore"):
            rate = -np.log(np.maximum(self.retention, 1e-30)).mean(axis=0)
            return np.asarray(np.log(2) / rate)


@torch.inference_mode()
def watch_memory(model: LM, tokens: Tensor) -> list[LayerMemory]:
    """What each recurrent layer does with the text `tokens` [T], from its start, in float32.

    Raises UserError: the model has no recurrent layer.
    """
    found: list[LayerMemory] = []
    inputs: dict[int, Tensor] = {}

    def keep(number: int) -> object:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            inputs[number] = arguments[0]

        return hook

    mixers = {i: mixer for i, mixer in enumerate(model.layers()) if isinstance(mixer, RecurrentMixer)}
    if not mixers:
        raise UserError("the model has no recurrent layer: softmax attention has no memory of a fixed size")
    hooks = [mixer.register_forward_pre_hook(keep(i)) for i, mixer in mixers.items()]  # type: ignore[arg-type]
    try:
        model.hidden_states(tokens[None], keep_states=False)
    finally:
        for hook in hooks:
            hook.remove()
    names = model.layer_names()
    for i, mixer in mixers.items():
        found.append(_watch(i, names[i], mixer, inputs[i]))
    return found


def _watch(layer: int, name: str, mixer: RecurrentMixer, x: Tensor) -> LayerMemory:
    k, v, g, beta = mixer.memory_inputs(x.float())
    k, v = k.float(), v.float()
    states = _states(mixer, k, v, g, beta)  # [T, HV, K, V]
    T, HV = states.shape[:2]
    keys, values = k[0].repeat_interleave(HV // k.shape[2], dim=1), v[0]  # [T, HV, K], [T, HV, V]
    gaps = [0] + [2**i for i in range(T.bit_length()) if 2**i < T]
    read_back = [_read_back(states[n:], keys[: T - n], values[: T - n]) for n in gaps]
    singular = torch.linalg.svdvals(states)
    shares = singular / singular.sum(-1, keepdim=True).clamp(min=1e-30)
    entropy = -(shares * shares.clamp(min=1e-30).log()).sum(-1)
    unit = torch.nn.functional.normalize(k[0], dim=-1).transpose(0, 1)  # [H, T, K]
    cosines = (unit @ unit.transpose(1, 2)).abs()
    retention = torch.ones(T, HV, 1) if g is None else g[0].exp().view(T, HV, -1)
    return LayerMemory(
        layer,
        name,
        retention.cpu().numpy(),
        (torch.ones(T, HV) if beta is None else beta[0]).cpu().numpy(),
        torch.linalg.matrix_norm(states).cpu().numpy(),
        entropy.exp().cpu().numpy(),
        tuple(gaps),
        torch.stack(read_back).cpu().numpy(),
        cosines.cpu().numpy(),
    )


def _states(mixer: RecurrentMixer, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None) -> Tensor:
    """After each token; without the normaliser, which is a column beside the memory."""
    state, states = None, []
    for t in range(k.shape[1]):
        one = slice(t, t + 1)
        _, state = kernels.fused_recurrent(
            k[:, one],
            k[:, one],
            v[:, one],
            None if g is None else g[:, one],
            None if beta is None else beta[:, one],
            rule=mixer.config.rule,
            decay=mixer.config.decay,
            initial_state=state,
            output_final_state=True,
            backend="torch",
        )
        assert state is not None
        states.append(state[0])
    return torch.stack(states)


def _read_back(states: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Mean error of each head [HV]."""
    read = torch.einsum("thkv,thk->thv", states, keys)
    error = (read - values).norm(dim=-1) / values.norm(dim=-1).clamp(min=1e-12)
    return error.mean(0)


def summary(memory: LayerMemory) -> dict[str, str]:
    """For a table: over all heads."""
    lives = memory.half_lives()
    few, half, most = (float(np.quantile(lives, q, method="nearest")) for q in (0.1, 0.5, 0.9))
    strength = memory.strength
    marks = [i for i, n in enumerate(memory.gaps) if n in (0, 16, memory.gaps[-1])]
    return {
        "half-life": f"{_tokens(half)}; of a tenth of the channels less than {_tokens(few)}, more than {_tokens(most)}",
        "write strength": f"{strength.mean():.3f}, from {strength.min():.3f} to {strength.max():.3f}",
        "norm at the end": _listed(memory.norm[-1]),
        "rank at the end": _listed(memory.rank[-1]),
        "read-back error": ", ".join(f"after {memory.gaps[i]}: {memory.read_back[i].mean():.2f}" for i in marks),
        "interference of keys": _listed(memory.interference),
    }


def _tokens(x: float) -> str:
    return "∞" if not np.isfinite(x) else f"{x:,.1f} tokens"


def _listed(values: Floats | Sequence[float]) -> str:
    return " ".join(f"{x:.2f}" for x in list(values)[:8]) + (" …" if len(values) > 8 else "")
