"""The small layers around the mixers: RMSNorm, SwiGLU, rotary positions, the short convolution.

All take and return [B, T, ...] and keep the dtype of their input; norms and rotations compute in float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang & Sennrich 2019); weight starts at 1."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, backend: str = "auto") -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps, backend)


class SwiGLU(nn.Module):
    """y = W_down (SiLU(W_gate x) ⊙ W_up x) (Shazeer 2020)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.out_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time, weight [D, width], then SiLU if `activation` says so.

    The state is the last width − 1 inputs, [B, width − 1, D].
    """

    def __init__(self, dim: int, width: int, activation: str | None) -> None:
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.randn(dim, width) * width**-0.5)

    def forward(
        self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None, backend: str = "auto"
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, T, D] → y [B, T, D] and the state after the last token."""
        return kernels.short_convolution(
            x,
            self.weight,
            activation=self.activation,
            initial_state=state,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            backend=backend,
        )


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding (Su et al. 2021): channel pairs (i, i + D/2) turned by positions · theta^(−2i/D).

    x [B, T, H, D] with D even, positions [T].
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.to(torch.float32)[:, None, None] * frequencies  # [T, 1, D/2]
    cos, sin = angles.cos(), angles.sin()
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
