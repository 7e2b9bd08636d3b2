"""The language model: embedding → blocks → norm → head, each block a mixer and an MLP around a residual stream.

    x ← x + mixer(RMSNorm(x));   x ← x + SwiGLU(RMSNorm(x))

What is added to the stream waits for the next norm, which adds it in the same pass.

Which mixer a layer has is read off `pattern`, tiled over depth: `[kda, kda, kda, softmax]` over 8 layers is twice three
KDA layers and a softmax layer. The names are the keys of the `mixers` that the model is built with (configs/mixer).

Initialisation (`init: fan_in`, the default): every matrix is normal with deviation 1/√fan-in; the two matrices of a
block that write to the residual stream are divided by √(2 · layers) on top; convolutions have deviation 1/√width; the
embedding is normal with deviation 1/√dim and its rows are multiplied by √dim on the way in, so that the stream starts
at unit scale and a tied head gives logits of unit scale. `init: normal` draws every matrix and the embedding from
normal(0, 0.02) instead, as GPT-2 did; at small widths it leaves the low-rank gates all but dead. Decay parameters
(A_log, dt_bias) and norms have their own start, see mixers/gates.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kernels
from kda_lm.config import read_config
from kda_lm.errors import UserError
from kda_lm.layers import RMSNorm, SwiGLU
from kda_lm.mixers import Mixer, MixerState, build_mixer

LMState = Sequence[MixerState]


@dataclass(frozen=True)
class LMConfig:
    """Sizes of the model. `vocab_size` comes from the tokenizer, never from a file."""

    pattern: tuple[str, ...]  # mixer names, tiled over depth
    vocab_size: int
    num_layers: int = 4
    dim: int = 128
    mlp_hidden: int | None = None  # null: 8/3 · dim, rounded up to a multiple of 16; 0: no MLP
    tie_embeddings: bool = True
    init: Literal["fan_in", "normal"] = "fan_in"

    def __post_init__(self) -> None:
        if not self.pattern:
            raise ValueError("pattern is empty; it takes a list of mixer names, such as [kda, kda, kda, softmax]")
        for name in ("vocab_size", "num_layers", "dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes at least 1")
        if self.mlp_hidden is not None and self.mlp_hidden < 0:
            raise ValueError(f"mlp_hidden is {self.mlp_hidden}; it takes 0 (no MLP) or more, or null")

    @property
    def pattern_name(self) -> str:
        """The pattern in a word of at most 60 characters: [kda, kda, kda, softmax] is kda3-softmax."""
        runs = [(kind, len(list(group))) for kind, group in groupby(self.pattern)]
        return "-".join(kind if count == 1 else f"{kind}{count}" for kind, count in runs)[:60]

    @property
    def hidden(self) -> int:
        return math.ceil(self.dim * 8 / 3 / 16) * 16 if self.mlp_hidden is None else self.mlp_hidden


class Block(nn.Module):
    """Pre-norm residual block: the stream x and its norm, [B, T, dim] each → the stream, what is still to be added to
    it, and the mixer's state, if it is kept.

    The model calls `mixer_norm`, which adds what the block below has left: at the bottom there is nothing to add, and a
    compiler would make a second block of that.
    """

    def __init__(self, dim: int, hidden: int, mixer: Mixer) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(dim)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(dim) if hidden else None
        self.mlp = SwiGLU(dim, hidden) if hidden else None

    def forward(
        self, x: Tensor, normed: Tensor, state: MixerState | None, cu_seqlens: Tensor | None, keep_state: bool
    ) -> tuple[Tensor, Tensor, MixerState | None]:
        y, state = self.mixer(normed, state, cu_seqlens)
        return *self._feed_forward(x, y), state if keep_state else None

    def decode(self, x: Tensor, normed: Tensor, cache: MixerState, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As the mixer's `decode`."""
        return self._feed_forward(x, self.mixer.decode(normed, cache, positions))

    def _feed_forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.mlp is None or self.mlp_norm is None:
            return x, y
        x, normed = self.mlp_norm.add(x, y)
        return x, self.mlp(normed)


class LM(nn.Module):
    """A causal language model over token ids.

    `mixers` maps the names used in `config.pattern` to mixer options (see kda_lm.mixers.build_mixer); only those that
    the pattern uses are built.

    Raises UserError: a name in the pattern that `mixers` lacks (the names are listed), or bad mixer options.
    """

    def __init__(self, config: LMConfig, mixers: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_layers = False  # keep each block's inputs alone, and run the block again in the backward
        names = self.layer_names()
        for name in config.pattern:
            if name not in mixers:
                raise UserError(f"model.pattern: unknown layer kind '{name}'; kinds are {', '.join(mixers)}")
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(
            Block(config.dim, config.hidden, build_mixer(config.dim, mixers[name], f"mixers.{name}")) for name in names
        )
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.mixer_options = {name: dict(mixers[name]) for name in dict.fromkeys(config.pattern)}
        self._initialise()

    def _initialise(self) -> None:
        """See the module's docstring."""
        fan_in = self.config.init == "fan_in"
        nn.init.normal_(self.embedding.weight, std=self.config.dim**-0.5 if fan_in else 0.02)
        for name, module in self.named_modules():
            if not isinstance(module, nn.Linear) or (module is self.head and self.config.tie_embeddings):
                continue
            std = module.in_features**-0.5 if fan_in else 0.02
            if name.endswith("out_proj"):
                std /= math.sqrt(2 * self.config.num_layers)
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def layer_names(self) -> list[str]:
        """The kind of every layer, from the bottom: the pattern, tiled."""
        pattern = self.config.pattern
        return [pattern[i % len(pattern)] for i in range(self.config.num_layers)]

    def layers(self) -> list[Mixer]:
        """The mixer of every layer, from the bottom."""
        return [cast(Block, block).mixer for block in self.blocks]

    def compile_blocks(self, **options: Any) -> None:
        """torch.compile every block, in place: names of parameters stay. Blocks of one kind share what is compiled.

        `options` are torch.compile's. `generate`, whose lengths all differ, runs without.
        """
        # Of each kind with gradients and without, and for one length and for any: beyond the limit blocks run eagerly.
        limit = 4 * len(self.mixer_options)
        torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)
        for block in self.blocks:
            block.compile(**options)

    def backends(self, device: torch.device) -> list[str]:
        """The kernel implementations that the layers use on `device`.

        Raises UserError: one that is not to be had there.
        """
        try:
            return sorted({kernels.resolve_backend(x.config.backend, device) for x in self.layers()})
        except ValueError as error:
            raise UserError(f"mixers: {error}") from None

    def hyperparameters(self) -> dict[str, Any]:
        """Plain values from which `LM.from_hyperparameters` builds the same model."""
        model = asdict(self.config)
        model["pattern"] = list(self.config.pattern)
        return {"model": model, "mixers": self.mixer_options}

    def hidden_states(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        cu_seqlens: Tensor | None = None,
        keep_states: bool = True,
    ) -> tuple[Tensor, list[MixerState]]:
        """tokens [B, T] → the normalised residual stream [B, T, dim] and every layer's state after the last token, or
        none: training has no use for their memory and gradients.

        With `cu_seqlens` [N + 1], boundaries over the B·T flattened tokens, no layer carries anything across a
        boundary. The states are then of the N sequences in the recurrent layers, but keys and values in one row in
        softmax layers: `Decoder` goes on from them, `state` takes none of them.
        """
        batch, length = tokens.shape
        if cu_seqlens is not None:
            tokens = tokens.reshape(1, -1)
        x, y = self.embed(tokens), None
        states: list[MixerState] = []
        for i, block in enumerate(cast(Sequence[Block], self.blocks)):
            x, normed = block.mixer_norm.add(x, y)
            arguments = (x, normed, None if state is None else state[i], cu_seqlens, keep_states)
            if self.checkpoint_layers and torch.is_grad_enabled():
                # Nothing in a block draws random numbers.
                x, y, layer_state = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x, y, layer_state = block(*arguments)
            if keep_states:
                states.append(layer_state)
        _, normed = self.norm.add(x, y)
        return normed.view(batch, length, -1), states

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] → [B, T, dim], the start of the residual stream."""
        x = self.embedding(tokens)
        return x * math.sqrt(self.config.dim) if self.config.init == "fan_in" else x

    def logits(self, x: Tensor) -> Tensor:
        """The normalised residual stream [..., dim] → [..., vocab] in float32 (float64 models: float64)."""
        logits = self.head(x)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def forward(
        self, tokens: Tensor, state: LMState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, list[MixerState]]:
        """tokens [B, T] → logits [B, T, vocab], and the states after the last token; chunkwise.

        `state` is left as it was, so that it can be continued in several ways. kda_lm.decoding works in place.
        """
        x, states = self.hidden_states(tokens, state, cu_seqlens)
        return self.logits(x), states

    def decode(self, tokens: Tensor, caches: LMState, positions: Tensor) -> Tensor:
        """T more tokens of every row, in place: tokens, their positions [B, T] → logits [B, T, vocab]."""
        x, y = self.embed(tokens), None
        for block, cache in zip(cast(Sequence[Block], self.blocks), caches, strict=True):
            x, normed = block.mixer_norm.add(x, y)
            x, y = block.decode(x, normed, cache, positions)
        _, normed = self.norm.add(x, y)
        return self.logits(normed)

    @staticmethod
    def outputs_at(x: Tensor, at: Tensor) -> Tensor:
        """x [B, T, dim] at the positions `at` [B, Q] → [B, Q, dim]."""
        return x.gather(1, at[:, :, None].expand(-1, -1, x.shape[2]))

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        cu_seqlens: Tensor | None = None,
        at: Tensor | None = None,
        z_loss: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Sum of −log p(target), in nats, over the targets that are not −100, and their number.

        Targets are [B, T], or with `at` [B, Q], positions, [B, Q], what comes after those: the head works for no other.

        A sum and a count, not a mean: batches and micro-batches then add up whatever their masks. With `z_loss` each
        target also adds z_loss · (log Σ exp logits)², which no score should have in it.
        """
        x, _ = self.hidden_states(tokens, cu_seqlens=cu_seqlens, keep_states=False)
        if at is not None:
            x = self.outputs_at(x, at)
        nll = kernels.linear_cross_entropy(x, self.head.weight, targets, z_loss=z_loss)
        return nll, (targets != -100).sum()

    def num_parameters(self, embeddings: bool = True) -> int:
        """Parameters, tied ones once; without `embeddings`, those outside the embedding and the head."""
        total = sum(p.numel() for p in self.parameters())
        if embeddings:
            return total
        tables = {id(t): t.numel() for t in (self.embedding.weight, self.head.weight)}
        return total - sum(tables.values())

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations a token of a forward pass over `length` tokens; training is three times that.

        Counts 2 a parameter of every matrix and what the mixers say of themselves; looking up an embedding is free.
        """
        mlp = 2 * 3 * self.config.dim * self.config.hidden
        layers = sum(mixer.flops_per_token(length) + mlp for mixer in self.layers())
        return layers + 2 * self.config.dim * self.config.vocab_size

    def state_bytes(self, length: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes that decoding one sequence carries after `length` tokens, caches and activations in `dtype`."""
        return sum(mixer.state_bytes(length, dtype) for mixer in self.layers())

    @classmethod
    def from_hyperparameters(cls, hyperparameters: Mapping[str, Any]) -> "LM":
        return cls(read_config(LMConfig, hyperparameters["model"], "model"), hyperparameters["mixers"])
