"""The small layers around the mixers: RMSNorm, SwiGLU, rotary positions, the short convolution.

All take and return [B, T, ...]; norms and rotations compute in float32. They keep the dtype of their input, but under
autocast what a norm returns is of autocast's: it goes into products.
"""

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

    def add(self, x: Tensor, y: Tensor | None, backend: str = "auto") -> tuple[Tensor, Tensor]:
        """x + y and the norm of that, in one pass: a residual stream and what a layer adds to it, None: nothing."""
        if y is None:
            return x, self(x, backend)
        return kernels.add_rms_norm(x, y, self.weight, self.eps, backend, autocast_dtype(x))


class JointLinear(nn.Module):
    """Linear layers of one input as one product, whose weights are laid below each other: x [..., dim] → a view
    [..., n] for each layer. The layers keep their parameters, and this module adds no names; but it reads their weights
    alone: hooks on them do not run, and a layer that is put in another's place is not seen.

    `fix` keeps the joint weight, for a model that is not trained any more.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        if any(layer.bias is not None for layer in layers):
            raise ValueError("JointLinear: got a layer with a bias, accepted: none")
        self.layers = layers  # a tuple: their parameters are registered where they belong
        self.sizes = [layer.out_features for layer in layers]
        self.padding = -sum(self.sizes) % ALIGNED
        self.fixed: Tensor | None
        self.register_buffer("fixed", None, persistent=False)

    def forward(self, x: Tensor, together: int = 1) -> tuple[Tensor, ...]:
        """What the first `together` layers make of x comes as one tensor."""
        weight = self._weight() if self.fixed is None else self.fixed
        sizes = [sum(self.sizes[:together]), *self.sizes[together:], self.padding]
        y = F.linear(x, weight)
        # The backward of a split copies: there is none where one tensor is all.
        return (y,) if y.shape[-1] == sizes[0] else y.split(sizes, dim=-1)[:-1]

    def _weight(self) -> Tensor:
        weights = [layer.weight for layer in self.layers]
        return torch.cat([*weights, weights[0].new_zeros(self.padding, weights[0].shape[1])])

    def fix(self, dtype: torch.dtype | None = None) -> None:
        """From here on the weights as they are now, in `dtype`."""
        self.fixed = self._weight().detach().to(dtype)


class SwiGLU(nn.Module):
    """y = W_down (SiLU(W_gate x) ⊙ W_up x) (Shazeer 2020)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.out_proj = nn.Linear(hidden, dim, bias=False)
        self.in_proj = JointLinear(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        (gate_and_up,) = self.in_proj(x, together=2)
        return self.out_proj(kernels.swiglu(gate_and_up))


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time, weight [D, width], then SiLU if `activation` says so.

    The state is the last width − 1 inputs, [B, width − 1, D].
    """

    def __init__(self, dim: int, width: int, activation: str | None) -> None:
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.randn(dim, width) * width**-0.5)

    def forward(
        self,
        parts: Sequence[Tensor],
        state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
    ) -> tuple[list[Tensor], Tensor]:
        """D channels in parts [B, T, d] → y [B, T, d] of each and the state after the last token.

        What is read from may be parts of wider rows; what is written lies without gaps, as the chunkwise kernels read.
        """
        sizes = [part.shape[-1] for part in parts]
        weights = self.weight.split(sizes)
        states = [None] * len(sizes) if state is None else state.split(sizes, dim=-1)
        done = [
            kernels.short_convolution(
                x,
                weight,
                activation=self.activation,
                initial_state=before,
                output_final_state=True,
                cu_seqlens=cu_seqlens,
                backend=backend,
            )
            for x, weight, before in zip(parts, weights, states, strict=True)
        ]
        return [y for y, _ in done], torch.cat([after for _, after in done if after is not None], dim=-1)

    def in_place(self, x: Tensor, state: Tensor, backend: str = "auto") -> Tensor:
        """x [B, T, D] → y [B, T, D]; the state is written over."""
        y, _ = kernels.short_convolution(
            x, self.weight, activation=self.activation, initial_state=state, inplace_state=True, backend=backend
        )
        return y


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
