"""Mixers: the layers that move information between tokens. Two classes, told apart by the key `mixer` of a config.

A mixer is built by `build_mixer(dim, options)`, maps x [B, T, dim] to (y [B, T, dim], state), and tells its cost:
`num_parameters()`, `flops_per_token(length)` and `state_bytes(length, dtype)`.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from kda_lm.config import read_config
from kda_lm.errors import UserError
from kda_lm.mixers.base import Mixer
from kda_lm.mixers.gates import Gate
from kda_lm.mixers.recurrent import RecurrentConfig, RecurrentMixer, RecurrentState
from kda_lm.mixers.softmax import SoftmaxConfig, SoftmaxMixer, SoftmaxState

MixerState: TypeAlias = RecurrentState | SoftmaxState

__all__ = [
    "Gate",
    "Mixer",
    "MixerState",
    "RecurrentConfig",
    "RecurrentMixer",
    "RecurrentState",
    "SoftmaxConfig",
    "SoftmaxMixer",
    "SoftmaxState",
    "build_mixer",
]


def build_mixer(dim: int, options: Mapping[str, Any], where: str) -> Mixer:
    """The mixer that `options` describe: `mixer: recurrent` or `mixer: softmax`, and that class's options.

    Raises UserError, starting with `where`, for an unknown class, option or choice, and for sizes that don't divide.
    """
    if not isinstance(options, Mapping):
        raise UserError(f"{where} is {options!r}; it takes options, as the files in configs/mixer show")
    rest = {name: value for name, value in options.items() if name != "mixer"}
    kind = options.get("mixer")
    try:
        if kind == "recurrent":
            return RecurrentMixer(dim, read_config(RecurrentConfig, rest, where))
        if kind == "softmax":
            return SoftmaxMixer(dim, read_config(SoftmaxConfig, rest, where))
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    raise UserError(f"{where}.mixer is {kind!r}; it takes one of recurrent, softmax")
