"""The models that are measured in training and decoding: sizes, patterns, and train.py's configuration for them."""

from dataclasses import dataclass
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from kda_lm.config import plain, read_config
from kda_lm.model import LM, LMConfig
from kda_lm.runs import CONFIGS
from scripts.benchmarking.run import UsageError

MIXERS = ("softmax", "kda", "gated_delta", "delta", "linear")
PATTERNS = {
    "softmax": ["softmax"],
    "kda": ["kda"],
    "hybrid": ["kda", "kda", "kda", "softmax"],
    "gated_delta": ["gated_delta"],
    "delta": ["delta"],
    "linear": ["linear"],
}
BYTES = 257  # the byte tokenizer's vocabulary


@dataclass(frozen=True)
class Size:
    """A model: layers and width."""

    layers: int
    dim: int

    def __str__(self) -> str:
        return f"{self.layers}x{self.dim}"

    @classmethod
    def parse(cls, text: str) -> "Size":
        parts = text.split("x")
        if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"got {text!r}, accepted: LAYERSxWIDTH, such as 12x768")
        return cls(*map(int, parts))


def compose_model(size: Size, pattern: str, head_dim: int, vocab: int, words: list[str]) -> dict[str, Any]:
    """The configuration that train.py would compose from further `words`, the vocabulary added to the model's options.

    Every mixer has width / head_dim heads, of keys and of values alike.

    Raises UsageError: sizes that don't divide, or what the words say cannot be.
    """
    if size.dim % head_dim:
        raise UsageError(f"--head-dim: got {head_dim}, accepted: a divisor of the width, {size.dim}")
    ours = [
        f"model.pattern=[{','.join(PATTERNS[pattern])}]",
        f"model.num_layers={size.layers}",
        f"model.dim={size.dim}",
        *(f"mixers.{mixer}.num_heads={size.dim // head_dim}" for mixer in MIXERS),
        *(f"mixers.{mixer}.expand_{of}=1" for mixer in MIXERS if mixer != "softmax" for of in "kv"),
        *(["data=sotu_bytes"] if vocab == BYTES else [f"data.vocab_size={vocab}"]),
    ]
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = plain(compose("train", overrides=[*ours, *words]))
    except HydraException as error:
        raise UsageError(str(error).splitlines()[0]) from None
    composed["model"]["vocab_size"] = vocab
    return composed


def build_lm(options: dict[str, Any]) -> LM:
    return LM(read_config(LMConfig, options["model"], "model"), options["mixers"])
