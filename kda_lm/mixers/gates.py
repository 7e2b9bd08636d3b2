"""The learned gates of a recurrent mixer: decay, write strength, output gate.

They are small, and what they learn is a time scale or an opening, not a feature: `Gate` marks them, and the optimizer
gives what it marks no weight decay. The first layer of each reads the mixer's input, like q_proj; the mixer computes
all of these as one product, and a gate's `forward` goes on from there. `A_log` and `dt_bias` stay float32 whatever the
model's dtype: in bf16 a difference of 1 % in a time scale would be rounded away.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Gate(nn.Module):
    """Base of all gates; a marker for the optimizer (no weight decay inside)."""

    @property
    def first(self) -> nn.Linear:
        """The layer that reads the mixer's input x [B, T, dim]; what it makes of it goes into `forward`."""
        raise NotImplementedError


class DecayParameters(nn.Module):
    """A_log [HV] and dt_bias [HV] or [HV·K] of the log-decay g = −exp(A_log) · softplus(raw + dt_bias).

    As published: softplus(dt_bias) ~ log U(1e-3, 1e-1), and exp(A_log) ~ U(slowest, 16), `slowest` being 1 for KDA
    (Kimi Linear) and 0 for Gated DeltaNet, where 1e-3 keeps the logarithm finite.
    """

    def __init__(self, num_heads: int, num_biases: int, slowest: float) -> None:
        super().__init__()
        rate = torch.empty(num_heads, dtype=torch.float32).uniform_(slowest, 16)
        step = torch.empty(num_biases, dtype=torch.float32).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.A_log = nn.Parameter(rate.log())
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DecayParameters":
        # `.to(dtype)`, `.half()` and the like move these parameters but leave their dtype.
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)


class ScalarDecay(Gate):
    """Gated DeltaNet's gate: one raw value a head, W x → [B, T, HV]."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, num_heads, bias=False)
        self.timescale = DecayParameters(num_heads, num_heads, slowest=1e-3)

    @property
    def first(self) -> nn.Linear:
        return self.proj

    def forward(self, projected: Tensor) -> Tensor:
        return projected


class ChannelDecay(Gate):
    """KDA's gate: one raw value a key channel through a low rank, W_up W_down x → [B, T, HV, K]."""

    def __init__(self, dim: int, num_heads: int, head_dim: int, rank: int) -> None:
        super().__init__()
        self.down_proj = nn.Linear(dim, rank, bias=False)
        self.up_proj = nn.Linear(rank, num_heads * head_dim, bias=False)
        self.timescale = DecayParameters(num_heads, num_heads * head_dim, slowest=1.0)
        self.num_heads = num_heads

    @property
    def first(self) -> nn.Linear:
        return self.down_proj

    def forward(self, projected: Tensor) -> Tensor:
        return self.up_proj(projected).unflatten(-1, (self.num_heads, -1))


class WriteStrength(Gate):
    """The logit of β, W x → [B, T, HV]; the kernel applies the sigmoid."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, num_heads, bias=False)

    @property
    def first(self) -> nn.Linear:
        return self.proj

    def forward(self, projected: Tensor) -> Tensor:
        return projected


class OutputGate(Gate):
    """act(W x) with a full matrix (rank None), or act(W_up W_down x + b) through a low rank (Kimi Linear), which opens
    the output: W x → [B, T, HV, V], before its activation.
    """

    def __init__(self, dim: int, num_heads: int, head_dim: int, rank: int | None, activation: str) -> None:
        super().__init__()
        self.proj: nn.Linear | nn.Sequential
        value_dim = num_heads * head_dim
        if rank is None:
            self.proj = nn.Linear(dim, value_dim, bias=False)
        else:
            self.proj = nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, value_dim, bias=True))
        self.num_heads, self.activation = num_heads, activation

    @property
    def first(self) -> nn.Linear:
        return self.proj if isinstance(self.proj, nn.Linear) else cast(nn.Linear, self.proj[0])

    def forward(self, projected: Tensor) -> Tensor:
        gate = projected if isinstance(self.proj, nn.Linear) else self.proj[1](projected)
        return gate.unflatten(-1, (self.num_heads, -1))

    def activate(self, gate: Tensor) -> Tensor:
        return F.silu(gate) if self.activation == "silu" else gate.sigmoid()
