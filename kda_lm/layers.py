"""The small layers around the mixers: RMSNorm, SwiGLU, rotary positions, the short convolution.

All take and return [B, T, ...]; norms and rotations compute in float32. They keep the dtype of their input, but under
autocast what a norm returns is of autocast's: it goes into products.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels

ALIGNED = 16  # rows that a joint weight is padded to: tensor cores read 16 bytes at a time


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast makes of x in a product; None where it leaves it alone: outside, and in float64."""
    device = x.device.type
    # Not torch.amp.is_autocast_available: torch 2.11's compiler stops at it.
    if x.dtype == torch.float64 or x.is_meta or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang & Sennrich 2019); weight starts at 1."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, backend: str = "auto") -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps, backend, autocast_dtype(x))

    def add(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + y and the norm of that, in one pass: a residual stream and what a layer adds to it, None: nothing."""
        if y is None:
            return x, self(x)
        return kernels.add_rms_norm(x, y, self.weight, self.eps, dtype=autocast_dtype(x))


class JointLinear(nn.Module):
    """Linear layers of one input, in groups: x [..., dim] → a tensor [..., n] for each group, the outputs of its layers
    side by side; a group without layers is none. A group is one product, with weights that are laid below each other,
    so its output and the gradient of that are whole. The layers keep their parameters, and this module adds no names;
    but it reads their weights alone: hooks on them do not run, and a layer that is put in another's place is not seen.

    `fix` keeps the joint weight, for a model that is not trained any more: then all groups are one product, and what
    is returned are parts of its rows.
    """

    def __init__(self, *groups: Sequence[nn.Linear]) -> None:
        super().__init__()
        # Not as modules: their parameters are registered where they belong.
        self.groups = tuple(group for group in groups if group)
        if any(layer.bias is not None for layer in self.layers):
            raise ValueError("JointLinear: got a layer with a bias, accepted: none")
        self.sizes = [sum(layer.out_features for layer in group) for group in self.groups]
        self.rows = [math.ceil(size / ALIGNED) * ALIGNED for size in self.sizes]  # of a group's weight
        self.fixed: Tensor | None
        self.register_buffer("fixed", None, persistent=False)

    @property
    def layers(self) -> list[nn.Linear]:
        return [layer for group in self.groups for layer in group]

    def forward(self, x: Tensor) -> list[Tensor]:
        products: Sequence[Tensor]
        if self.fixed is None:
            products = [F.linear(x, weight) for weight in self._weights()]
        else:
            products = F.linear(x, self.fixed).split(self.rows, dim=-1)
        return [y if y.shape[-1] == size else y[..., :size] for y, size in zip(products, self.sizes, strict=True)]

    def _weights(self) -> list[Tensor]:
        """Of each group, padded."""
        found = []
        for group, size, rows in zip(self.groups, self.sizes, self.rows, strict=True):
            weights = [layer.weight for layer in group]
            found.append(torch.cat([*weights, weights[0].new_zeros(rows - size, weights[0].shape[1])]))
        return found

    def fix(self, dtype: torch.dtype | None = None) -> None:
        """From here on the weights as they are now, in `dtype`."""
        self.fixed = torch.cat(self._weights()).detach().to(dtype)


class SwiGLU(nn.Module):
    """y = W_down (SiLU(W_gate x) ⊙ W_up x) (Shazeer 2020)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.out_proj = nn.Linear(hidden, dim, bias=False)
        self.in_proj = JointLinear((self.gate_proj, self.up_proj))

    def forward(self, x: Tensor) -> Tensor:
        (gate_and_up,) = self.in_proj(x)
        return self.out_proj(kernels.swiglu(gate_and_up))


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time, weight [D, width], then SiLU if `activation` says so; `sizes`, of which D
    is the sum, are those of the parts that its output is given in.

    The state is the last width − 1 inputs, [B, width − 1, D].
    """

    def __init__(self, sizes: Sequence[int], width: int, activation: str | None) -> None:
        super().__init__()
        self.sizes, self.activation = tuple(sizes), activation
        self.weight = nn.Parameter(torch.randn(sum(sizes), width) * width**-0.5)

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
        inplace_state: bool = False,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """x [B, T, D] → y [B, T, size] for each part, contiguous, and the state after the last token, which is written
        over the one that came if `inplace_state` says so.
        """
        parts, state = kernels.short_convolution(
            x,
            self.weight,
            activation=self.activation,
            initial_state=state,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            backend=backend,
            inplace_state=inplace_state,
            sizes=self.sizes,
        )
        assert state is not None
        return parts, state


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021) of heads of D channels, D even, behind an RMS norm if there is one:
    channel pairs (i, i + D/2) are turned by position · theta^(−2i/D). Bfloat16 angles would be off by whole turns.
    """

    def __init__(self, dim: int, theta: float) -> None:
        super().__init__()
        self.dim, self.theta = dim, theta

    def frequencies(self, device: torch.device) -> Tensor:
        """float32 [D/2]. Made anew every time: a buffer would be cast with a model, and averaged with its weights. By
        way of float64, so that compilers round alike: at position 10⁵ the last bit of a frequency is 0.006 rad."""
        exponents = torch.arange(self.dim // 2, dtype=torch.float64, device=device) / (self.dim // 2)
        frequencies: Tensor = self.theta**-exponents
        return frequencies.float()

    def forward(self, x: Tensor, positions: Tensor, norm: RMSNorm | None = None, backend: str = "auto") -> Tensor:
        """x [B, T, H, D], positions [T] or [B, T] → [B, T, H, D]."""
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return kernels.rotary(x, positions, self.frequencies(x.device), weight, eps, backend)
