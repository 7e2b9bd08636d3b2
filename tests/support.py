"""What several test files import: the configuration as a command line composes it, and error measures."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

if TYPE_CHECKING:
    from kda_lm.model import LM

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # train.py is no package

TINY = [
    "data=text",
    "data.tokenizer=bytes",
    "data.seq_len=16",
    "data.sample_by=paragraph",
    "data.val_fraction=0.1",
    "data.val_batch_size=4",
    "model.dim=16",
    "model.num_layers=2",
    "model.pattern=[kda,softmax]",
    "mixers.kda.num_heads=2",
    "mixers.softmax.num_heads=2",
    "trainer.batch_size=4",
    "trainer.max_steps=8",
    "trainer.val_every=4",
    "trainer.save_every=4",
    "trainer.log_every=1",
    "trainer.accelerator=cpu",
    "optim.warmup_steps=2",
    "samples.prompts=[the]",
    "samples.max_new_tokens=4",
    "wandb=false",
]

TINY_TASK = [
    "data=overwrite",
    "data.seq_len=24",
    "data.vocab_size=16",
    "data.num_pairs=2",
    "data.val_samples=30",
    "data.test_samples=20",
    "data.val_batch_size=8",
    "data.test=[{seq_len: 48}, {num_pairs: 4, rewrites: 0.2}]",
    "model.dim=16",
    "model.num_layers=2",
    "model.pattern=[kda,softmax]",
    "mixers.kda.num_heads=2",
    "mixers.softmax.num_heads=2",
    "trainer.batch_size=8",
    "trainer.max_steps=6",
    "trainer.val_every=3",
    "trainer.save_every=3",
    "trainer.log_every=1",
    "trainer.accelerator=cpu",
    "optim.warmup_steps=2",
    "wandb=false",
]

PUBLISHED = ("softmax", "linear", "delta", "gated_delta", "kda")  # the files in configs/mixer


def compose_config(name: str, *overrides: str) -> DictConfig:
    """A configuration as the command line would compose it."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose(name, overrides=list(overrides), return_hydra_config=False)


_mixer_files: dict[str, dict[str, Any]] = {}


def mixer_options(name: str, **changes: Any) -> dict[str, Any]:
    """The options of configs/mixer/<name>.yaml, changed."""
    if name not in _mixer_files:
        options = OmegaConf.to_container(compose_config(f"mixer/{name}").mixer)
        assert isinstance(options, dict)
        _mixer_files[name] = {str(key): value for key, value in options.items()}
    return {**_mixer_files[name], **changes}


def small_options(name: str, **changes: Any) -> dict[str, Any]:
    """A published layer with two heads."""
    return mixer_options(name, **{"num_heads": 2, **changes})


# Every published layer, and options that change what is carried from token to token.
KINDS: dict[str, dict[str, Any]] = {
    **{name: small_options(name) for name in PUBLISHED},
    "softmax-conv-grouped": small_options("softmax", num_kv_heads=1, conv_width=4, activation="silu"),
    "softmax-nope": small_options("softmax", rope=False, qk_norm="none"),
    "softmax-window": small_options("softmax", window=5),
    "linear-bare": small_options("linear", feature_map="none", normalize=False),
    "linear-conv": small_options("linear", conv_width=3, activation="silu", feature_map="relu"),
    "kda-grouped": small_options("kda", num_value_heads=4, expand_v=2.0, allow_neg_eigval=True),
    "kda-additive": small_options("kda", rule="additive", conv_width=8),
    "kda-conv1": small_options("kda", conv_width=1),
    "gated-additive": small_options("gated_delta", rule="additive", num_value_heads=4),
}


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Token ids of `tiny_lm`'s vocabulary."""
    return torch.randint(29, (batch, length), generator=torch.Generator().manual_seed(seed))


def tiny_lm(
    *mixers: dict[str, Any],
    dim: int = 16,
    layers: int | None = None,
    vocab_size: int = 29,
    seed: int = 0,
    **config: Any,
) -> "LM":
    """A model whose layers have these mixers, tiled over `layers`, in evaluation mode."""
    from kda_lm.model import LM, LMConfig

    torch.manual_seed(seed)
    names = tuple(f"m{i}" for i in range(len(mixers)))
    sizes = LMConfig(names, vocab_size, len(mixers) if layers is None else layers, dim, **config)
    return LM(sizes, dict(zip(names, mixers, strict=True))).eval()


def error(out: Tensor, ref: Tensor) -> float:
    """‖out − ref‖ / ‖ref‖, and 0 where both are the same, such as nothing at all."""
    out, ref = out.detach().double(), ref.detach().double()
    difference = float((out - ref).norm())
    return difference and difference / float(ref.norm())
