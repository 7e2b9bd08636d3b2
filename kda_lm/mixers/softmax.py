"""Causal softmax attention, the mechanism that the others are measured against.

    o_t = Σ_{s ≤ t} softmax_s(D^(−1/2) q_tᵀ k_s) v_s

over all earlier tokens or the last `window`, with rotary positions or none, RMS-normalised q and k, grouped-query
heads, and the recurrent mixers' short convolution as an option: without it, comparisons of recall measure the
convolution.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

import kernels
from kda_lm.layers import JointLinear, RMSNorm, Rotary
from kda_lm.mixers.base import Mixer, Projected


@dataclass(frozen=True)
class SoftmaxConfig:
    """Options of a softmax mixer."""

    num_heads: int = 4  # heads of q; each has dim / num_heads channels
    num_kv_heads: int | None = None  # heads of k and v, a divisor of num_heads (grouped queries); null: num_heads
    rope: bool = True  # rotary positions; false: none (NoPE)
    rope_theta: float = 10000.0
    window: int | None = None  # positions that a token sees, its own included; null: all
    qk_norm: Literal["rms", "none"] = "rms"  # of each head's q and k, with a learned scale
    conv_width: int = 0  # taps of a short convolution on q, k and v; 0: none
    activation: Literal["silu", "none"] = "none"  # on q, k and v, after the convolution
    backend: Literal["auto", "triton", "torch", "reference"] = "auto"  # which kernel implementation runs

    def __post_init__(self) -> None:
        if self.num_heads < 1:
            raise ValueError(f"num_heads is {self.num_heads}; it takes at least 1")
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}; it takes a divisor of num_heads = {self.num_heads}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it takes a positive number, or null for all positions")
        if not 0 <= self.conv_width <= 8:
            raise ValueError(f"conv_width is {self.conv_width}; it takes 0 (none) to 8")
        if self.rope_theta <= 0:
            raise ValueError(f"rope_theta is {self.rope_theta}; it takes a positive number")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


class SoftmaxState(NamedTuple):
    """The keys and values of every earlier token: it grows by one row a token. As a cache it has room for more."""

    keys: Tensor  # [B, S, HKV, D], rotated
    values: Tensor  # [B, S, HKV, D]
    conv: Tensor | None  # the convolution's last inputs, [B, width − 1, (H + 2·HKV)·D]


class SoftmaxMixer(Mixer):
    """See the module's docstring; x [B, T, dim] → y [B, T, dim] and the state after the last token."""

    grows = True

    def __init__(self, dim: int, config: SoftmaxConfig) -> None:
        if dim % config.num_heads:
            raise ValueError(f"dim = {dim} must be a multiple of num_heads = {config.num_heads}")
        head_dim = dim // config.num_heads
        if config.rope and head_dim % 2:
            raise ValueError(f"rope needs an even head size; dim / num_heads is {head_dim}")
        kv_dim = config.kv_heads * head_dim
        super().__init__(dim, (dim, kv_dim, kv_dim), config.conv_width, config.activation)
        self.in_proj = JointLinear((self.q_proj, self.k_proj, self.v_proj))
        self.config = config
        self.head_dim = head_dim
        self.q_norm = RMSNorm(head_dim) if config.qk_norm == "rms" else None
        self.k_norm = RMSNorm(head_dim) if config.qk_norm == "rms" else None
        self.rotary = Rotary(head_dim, config.rope_theta) if config.rope else None
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(
        self, x: Tensor, state: SoftmaxState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, SoftmaxState]:
        config = self.config
        projected = self.project(x, None if state is None else state.conv, cu_seqlens)
        positions = _positions(x.shape[1], 0 if state is None else state.keys.shape[1], cu_seqlens, x.device)
        q, k, v = self._heads(projected, positions)
        if state is not None:
            k, v = torch.cat([state.keys, k], dim=1), torch.cat([state.values, v], dim=1)
        o = kernels.softmax_attention(q, k, v, cu_seqlens=cu_seqlens, window=config.window, backend=config.backend)
        return self.out_proj(o.flatten(-2)), SoftmaxState(k, v, projected.conv_state)

    def new_cache(self, state: SoftmaxState, batch: int, capacity: int) -> SoftmaxState:
        keys, values = (z.new_empty(batch, capacity, *z.shape[2:]) for z in (state.keys, state.values))
        conv = None if state.conv is None else state.conv.new_empty(batch, *state.conv.shape[1:])
        return SoftmaxState(keys, values, conv)

    def fill_cache(self, cache: SoftmaxState, state: SoftmaxState, rows: Tensor, positions: Tensor) -> None:
        cache.keys[rows, positions] = state.keys.flatten(0, 1)
        cache.values[rows, positions] = state.values.flatten(0, 1)
        if cache.conv is not None and state.conv is not None:
            cache.conv.copy_(state.conv)

    def decode(self, x: Tensor, cache: SoftmaxState, positions: Tensor) -> Tensor:
        config = self.config
        q, k, v = self._heads(self.project(x, cache.conv, inplace_state=True), positions)
        rows = torch.arange(len(x), device=x.device)[:, None]
        cache.keys[rows, positions] = k
        cache.values[rows, positions] = v
        lengths = positions[:, -1] + 1
        o = kernels.softmax_decode(q, cache.keys, cache.values, lengths, window=config.window, backend=config.backend)
        return self.out_proj(o.flatten(-2))

    def _heads(self, projected: Projected, positions: Tensor) -> list[Tensor]:
        """q, k, v [B, T, heads, D], q and k normalised and rotated."""
        q, k, v = (z.unflatten(-1, (-1, self.head_dim)) for z in (projected.q, projected.k, projected.v))
        backend = self.config.backend
        if self.rotary is not None:
            q, k = (self.rotary(x, positions, norm, backend) for x, norm in ((q, self.q_norm), (k, self.k_norm)))
        elif self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, backend), self.k_norm(k, backend)
        return [q, k, v]

    def mixing_flops_per_token(self, length: int) -> int:
        """4 · dim a pair of tokens, for scores and values. Without a window a token sees half of the length on average,
        with a window the whole of it, but for the first tokens.
        """
        width = 4 * self.config.num_heads * self.head_dim
        seen = min(self.config.window or length, length)
        return width * seen * (2 * length - seen) // (2 * length)

    def memory_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Keys and values of `length` tokens; of the window's, were the others dropped: decoding keeps them for now."""
        length = min(self.config.window or length, length)
        return 2 * length * self.config.kv_heads * self.head_dim * dtype.itemsize


def _positions(length: int, offset: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Each token's place in its own sequence, [T]."""
    positions = torch.arange(offset, offset + length, device=device)
    if cu_seqlens is None:
        return positions
    sequence = torch.searchsorted(cu_seqlens, positions.to(cu_seqlens.dtype), right=True) - 1
    return positions - cu_seqlens[sequence]
