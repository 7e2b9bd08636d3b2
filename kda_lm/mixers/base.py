"""What all mixers share: projections to q, k, v with an optional short convolution, and the account of their cost."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda_lm.layers import JointLinear, ShortConvolution


class Projected(NamedTuple):
    """A mixer's inputs, heads not yet split off: [B, T, heads · channels] each."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: tuple[Tensor, ...]  # what each gate's first layer makes of x
    conv_state: Tensor | None  # the convolution's last inputs, [B, width − 1, channels of q, k and v together]


class Mixer(nn.Module):
    """q, k, v = act(conv(W x)); subclasses mix tokens with them.

    `sizes` are the channels of q, k and v over all heads, `conv_width` the convolution's taps (0: none), `activation`
    is "silu" or "none". A subclass sets `in_proj`: q_proj, k_proj and v_proj, and the first layers of its gates, of
    `gate_sizes` channels.

    `forward` is functional: any number of tokens chunkwise, from a state to a new one. `decode` goes on in place, in a
    cache of fixed size that `new_cache` makes and `fill_cache` fills with what a prompt left.
    """

    config: Any  # the subclass's dataclass of options; has `backend`
    in_proj: JointLinear
    gate_sizes: Sequence[int] = ()
    grows: bool  # whether what is carried grows with the number of tokens

    def __init__(self, dim: int, sizes: tuple[int, int, int], conv_width: int, activation: str) -> None:
        super().__init__()
        self.sizes, self.conv_width, self.activation = sizes, conv_width, activation
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, size, bias=False) for size in sizes)
        fused = None if activation == "none" else activation
        self.conv = ShortConvolution(sizes, conv_width, fused) if conv_width else None

    def project(
        self, x: Tensor, conv_state: Tensor | None, cu_seqlens: Tensor | None = None, inplace_state: bool = False
    ) -> Projected:
        """x [B, T, dim] → q, k, v and gates; `conv_state` continues an earlier call's, and is written over with
        `inplace_state`.
        """
        qkv, *rest = self.in_proj(x)
        gates = rest[0].split(list(self.gate_sizes), dim=-1) if rest else ()
        if self.conv is not None:
            (q, k, v), conv_state = self.conv(qkv, conv_state, cu_seqlens, self.config.backend, inplace_state)
        else:
            qkv = F.silu(qkv) if self.activation == "silu" else qkv
            q, k, v = qkv.split(list(self.sizes), dim=-1)
        return Projected(q, k, v, gates, conv_state)

    def new_cache(self, state: Any, batch: int, capacity: int) -> Any:
        """Room for decoding `batch` sequences of up to `capacity` tokens, of the dtypes of `state`, a prompt's."""
        raise NotImplementedError

    def fill_cache(self, cache: Any, state: Any, rows: Tensor, positions: Tensor) -> None:
        """Take over what `forward` left of prompts, one a row of the cache: `rows` and `positions` are of all their
        tokens, in the order in which these were packed.
        """
        raise NotImplementedError

    def decode(self, x: Tensor, cache: Any, positions: Tensor) -> Tensor:
        """T more tokens of every row, in place: x [B, T, dim] → y [B, T, dim]; `positions` [B, T] are the tokens'."""
        raise NotImplementedError

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations a token of a forward pass over `length` tokens: 2 a weight of every matrix and
        convolution, and what mixing takes.
        """
        weights = sum(parameter.numel() for parameter in self.parameters() if parameter.dim() > 1)
        return 2 * weights + self.mixing_flops_per_token(length)

    def mixing_flops_per_token(self, length: int) -> int:
        raise NotImplementedError

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Bytes that decoding a sequence carries after `length` tokens, activations and caches in `dtype`."""
        taps = max(self.conv_width - 1, 0)
        return taps * sum(self.sizes) * dtype.itemsize + self.memory_bytes(length, dtype)

    def memory_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Those of the memory of earlier tokens, without the convolution's."""
        raise NotImplementedError
