"""The short causal depthwise convolution in front of queries, keys and values, with its state for decoding."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import check_choice, check_tensor, read_cu_seqlens, resolve_backend
from kernels.reference import compute_dtype

MAX_WIDTH = 8


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """y_t = act(Σ_{j<W} w_{W−1−j} ⊙ x_{t−j} + b), channel by channel, in float32 (float64 for float64 inputs).

    Args:
        x: [B, T, D].
        weight: [D, W], 1 ≤ W ≤ 8; weight[:, W − 1] multiplies the current token, as in torch's conv1d.
        bias: [D] or None.
        activation: None or "silu".
        initial_state: [N, W − 1, D] in x's dtype, the inputs before each sequence, latest last; zero unless given.
        output_final_state: return the state that continues each sequence, else None in its place.
        cu_seqlens: int32 or int64 [N + 1], boundaries of N sequences (empty ones allowed) packed along T; B = 1.
        backend: see `resolve_backend`.

    Returns:
        y [B, T, D] in x's dtype and the last W − 1 inputs of each sequence [N, W − 1, D] in x's dtype, in new
        memory (those of the initial state included where a sequence is shorter), or None.
    """
    check_tensor("x", x, "B, T, D", (-1, -1, -1))
    B, T, D = x.shape
    check_tensor("weight", weight, "D, W", (D, -1), x)
    W = weight.shape[1]
    if W > MAX_WIDTH:
        raise ValueError(f"weight: got width {W}, accepted: 1 to {MAX_WIDTH}")
    if bias is not None:
        check_tensor("bias", bias, "D", (D,), x)
    if activation is not None:
        check_choice("activation", activation, ("silu",))
    bounds = read_cu_seqlens(cu_seqlens, B, T)
    N = B if bounds is None else len(bounds) - 1
    if initial_state is not None:
        check_tensor("initial_state", initial_state, "N, W − 1, D", (N, W - 1, D), x, x.dtype)
    resolve_backend(backend, x.device)  # one implementation serves both

    with torch.autocast(x.device.type, enabled=False):
        history = x.new_zeros(N, W - 1, D) if initial_state is None else initial_state
        if bounds is None:
            padded = torch.cat([history, x], dim=1)  # [B, W − 1 + T, D]
            state = padded[:, T:].clone() if output_final_state else None
        else:
            lengths = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
            pieces = [piece for pair in zip(history, x[0].split(lengths), strict=True) for piece in pair]
            padded = torch.cat(pieces).unsqueeze(0)  # [1, Σ (W − 1 + T_n), D]
            ends = [end + (n + 1) * (W - 1) for n, end in enumerate(bounds[1:])]
            state = torch.stack([padded[0, end - W + 1 : end] for end in ends]) if output_final_state else None

        dtype = compute_dtype(x, weight)
        wide, taps = padded.to(dtype), weight.to(dtype).unbind(1)
        length = padded.shape[1] - W + 1
        y = wide[:, :length] * taps[0]
        for j, tap in enumerate(taps[1:], start=1):
            y = torch.addcmul(y, wide[:, j : j + length], tap)
        if bounds is not None:
            rows = [t + n * (W - 1) for n, length in enumerate(lengths) for t in range(bounds[n], bounds[n + 1])]
            y = y.index_select(1, torch.tensor(rows, device=x.device))
        if bias is not None:
            y = y + bias.to(dtype)
        if activation == "silu":
            y = F.silu(y)
        return y.to(x.dtype), state
