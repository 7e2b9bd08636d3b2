"""The short causal depthwise convolution in front of queries, keys and values, with its state for decoding."""

import importlib.util
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import (
    check_choice,
    check_cu_seqlens,
    check_in_place,
    check_tensor,
    read_cu_seqlens,
    resolve_backend,
    without_triton,
)
from kernels.gpu.limits import MOST_PARTS
from kernels.reference import compute_dtype

MAX_WIDTH = 8

TRITON: Callable[..., Any]
if importlib.util.find_spec("triton") is not None:
    from kernels.gpu.short_conv import short_conv as TRITON


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    inplace_state: bool = False,
    sizes: Sequence[int] | None = None,
) -> tuple[Any, Tensor | None]:
    """y_t = act(Σ_{j<W} w_{W−1−j} ⊙ x_{t−j} + b), channel by channel, in float32 (float64 for float64 inputs).

    Args:
        x: [B, T, D].
        weight: [D, W], 1 ≤ W ≤ 8; weight[:, W − 1] multiplies the current token, as in torch's conv1d.
        bias: [D] or None.
        activation: None or "silu".
        initial_state: [N, W − 1, D] in x's dtype, the inputs before each sequence, latest last; zero unless given.
        output_final_state: return the state that continues each sequence, else None in its place.
        cu_seqlens: int32 or int64 [N + 1], boundaries of N sequences (empty ones allowed) packed along T; B = 1.
        backend: see `resolve_backend`; "torch" and "reference" are one implementation, "triton" takes 16 and 32 bits.
        inplace_state: write the last state over the initial one. There is no gradient then.
        sizes: of up to 3 parts, in order, that y's channels are to be given in; they add up to D.

    Returns:
        y [B, T, D] in x's dtype, or with `sizes` a tuple of [B, T, size], each contiguous; and the last W − 1 inputs of
        each sequence [N, W − 1, D] in x's dtype or None: in new memory unless in place, and those of the initial state
        included where a sequence is shorter.
    """
    check_tensor("x", x, "B, T, D", (-1, -1, -1))
    B, T, D = x.shape
    check_tensor("weight", weight, "D, W", (D, -1), x)
    history = weight.shape[1] - 1
    if history >= MAX_WIDTH:
        raise ValueError(f"weight: got width {history + 1}, accepted: 1 to {MAX_WIDTH}")
    if bias is not None:
        check_tensor("bias", bias, "D", (D,), x)
    if activation is not None:
        check_choice("activation", activation, ("silu",))
    dtype = compute_dtype(x, weight)
    check_cu_seqlens(cu_seqlens, B)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is not None:
        check_tensor("initial_state", initial_state, "N, W − 1, D", (N, history, D), x, x.dtype)
    if inplace_state:
        check_in_place(initial_state, x, weight, bias)
    parts = [D] if sizes is None else list(sizes)
    if not 1 <= len(parts) <= MOST_PARTS or sum(parts) != D or (sizes is not None and min(parts) < 1):
        raise ValueError(f"sizes: got {parts}, accepted: 1 to {MOST_PARTS} numbers from 1 on that add up to D = {D}")
    chosen = resolve_backend(backend, x.device)
    if chosen == "triton" and dtype != torch.float32:
        chosen = without_triton(backend, f"{dtype}", "16 or 32 bits")
    # A compiled model cannot stop to read values; the kernels only read cu_seqlens on the GPU.
    bounds = None
    if chosen != "triton" or not torch.compiler.is_compiling():
        bounds = read_cu_seqlens(cu_seqlens, B, T)
    silu, keep = activation == "silu", output_final_state or inplace_state
    if chosen == "triton":
        boundaries = None if cu_seqlens is None else cu_seqlens.to(x.device)
        y, state = TRITON(x, weight, bias, initial_state, boundaries, parts, silu, keep, inplace_state)
    else:
        whole, state = _torch(x, weight.to(dtype), bias, initial_state, bounds, silu, keep)
        y = (whole,) if sizes is None else tuple(part.contiguous() for part in whole.split(parts, dim=-1))
    if inplace_state and initial_state is not None and state is not None and state is not initial_state:
        state = initial_state.copy_(state)
    return y[0] if sizes is None else y, state if output_final_state else None


def _torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    bounds: list[int] | None,
    silu: bool,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """y and, with `keep`, the last state; `weight` has the dtype of the arithmetic."""
    T, history = x.shape[1], weight.shape[1] - 1
    if initial_state is None:
        initial_state = x.new_zeros(x.shape[0] if bounds is None else len(bounds) - 1, history, x.shape[2])

    state = None
    if bounds is None:
        inputs = torch.cat([initial_state, x], dim=1)  # [B, W − 1 + T, D]
        if keep:
            state = inputs[:, T:].clone()
    else:  # one row, each sequence behind the inputs that precede it
        sequences = x[0].split([end - start for start, end in pairwise(bounds)])
        inputs = torch.cat([part for pair in zip(initial_state, sequences, strict=True) for part in pair])[None]
        if keep:
            ends = (end + n * history for n, end in enumerate(bounds[1:]))
            state = torch.stack([inputs[0, end : end + history] for end in ends])

    # Shifted multiply-adds: no slower than conv1d with D groups, and several times faster at T = 1.
    inputs, taps = inputs.to(weight.dtype), weight.unbind(1)
    length = inputs.shape[1] - history
    y = inputs[:, :length] * taps[0]
    for j, tap in enumerate(taps[1:], start=1):
        y = torch.addcmul(y, inputs[:, j : j + length], tap)
    if bounds is not None:  # row t of sequence n is row t + n (W − 1) here
        n = torch.repeat_interleave(torch.tensor([end - start for start, end in pairwise(bounds)]))
        y = y.index_select(1, (torch.arange(T) + n * history).to(x.device))
    if bias is not None:
        y = y + bias.to(weight.dtype)
    return (F.silu(y) if silu else y).to(x.dtype), state
