"""The mechanisms as the article writes them, token by token: what every other implementation is measured against.

Nothing here is fast and nothing is rearranged. Everything is differentiable by autograd, so the same few lines
are the reference for the gradients too. Run them in float64 to judge a faster form.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Arithmetic and state are float64 as soon as one of the inputs is, and float32 otherwise."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """One state S [K, V] per sequence and value head, updated at every token (article, sections 1 to 4):

        S ← exp(g_t) ⊙ S                           decay: none (g is None), scalar [B,T,HV], channel [B,T,HV,K]
        u = β_t (v_t − Sᵀ k_t)   or   u = v_t       rule: delta, or additive (beta is None)
        S ← S + k_t uᵀ
        o_t = scale · Sᵀ q_t                        read after write

    q, k [B,T,H,K]; v [B,T,HV,V]; beta [B,T,HV]; g is a log-decay in [−inf, 0]; value head i reads key head
    i // (HV // H). With cu_seqlens (N + 1 boundaries, B = 1) each sequence has a state of its own.

    Returns o [B,T,HV,V] in v's dtype and the last state [N,HV,K,V] in `compute_dtype(q, k, v)`.
    """
    if cu_seqlens is not None:
        return sequence_by_sequence(recurrence, q, k, v, g, beta, scale, initial_state, cu_seqlens)

    (B, T, H, K), (HV, V), dtype = q.shape, v.shape[2:], compute_dtype(q, k, v)
    q, k = (x.to(dtype).repeat_interleave(HV // H, dim=2) for x in (q, k))  # [B, T, HV, K]
    values = v.to(dtype)
    if g is not None:
        decay = (g if g.dim() == 4 else g.unsqueeze(3)).to(dtype).exp()  # [B, T, HV, K or 1]
    if beta is not None:
        strength = beta.to(dtype).unsqueeze(3)  # [B, T, HV, 1]

    S = q.new_zeros(B, HV, K, V) if initial_state is None else initial_state.to(dtype)
    o: list[Tensor] = []
    for t in range(T):
        if g is not None:
            S = decay[:, t].unsqueeze(3) * S
        u = values[:, t]
        if beta is not None:
            u = strength[:, t] * (u - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        o.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return (torch.stack(o, dim=1) if o else values).to(v.dtype), S


def sequence_by_sequence(
    form: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """`form` on each of the packed sequences: the outputs joined along T, the last states along N."""
    outputs, states = [], []
    for n, (start, end) in enumerate(pairwise(cu_seqlens)):
        tokens = (None if x is None else x[:, start:end] for x in (q, k, v, g, beta))
        output, state = form(*tokens, scale, None if initial_state is None else initial_state[n : n + 1])
        outputs.append(output)
        states.append(state)
    return torch.cat(outputs, dim=1), torch.cat(states)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    cu_seqlens: Sequence[int] | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal softmax attention with its scores written out (article, section 1).

        o_t = Σ_{s ≤ t} softmax_s(scale · q_t·k_s) v_s

    q [B,T,HQ,D]; k, v [B,S,HKV,D]; query head i reads key head i // (HQ // HKV). The T queries are the last T of
    the S positions. With cu_seqlens (B = 1, T = S) no query sees past its own sequence; with a window it sees that many
    positions, its own included. Returns [B,T,HQ,D] in v's dtype.
    """
    (T, HQ), (S, HKV), dtype = q.shape[1:3], k.shape[1:3], compute_dtype(q, k, v)
    position = torch.arange(S, device=q.device)
    visible = position <= position[S - T :, None]  # [T, S]
    if window is not None:
        visible = visible & (position > position[S - T :, None] - window)
    if cu_seqlens is not None:
        ends = torch.tensor(cu_seqlens[1:], device=q.device)
        sequence = torch.searchsorted(ends, position, right=True)
        visible = visible & (sequence == sequence[:, None])
    k, values = (x.to(dtype).repeat_interleave(HQ // HKV, dim=2) for x in (k, v))
    scores = scale * torch.einsum("bthd,bshd->bhts", q.to(dtype), k)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("bhts,bshd->bthd", weights, values).to(v.dtype)


def softmax_decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, window: int | None = None) -> Tensor:
    """`softmax_attention` of each row's T new tokens over the first lengths[b] positions of its cache k, v [B,S,HKV,D].

    Tokens before the cache's first position, where lengths[b] < T, get zeros.
    """
    o = torch.zeros_like(q, dtype=v.dtype)
    for b, length in enumerate(lengths.tolist()):
        tokens = min(q.shape[1], length)
        if tokens:
            row = (q[b : b + 1, -tokens:], k[b : b + 1, :length], v[b : b + 1, :length])
            o[b, -tokens:] = softmax_attention(*row, scale, window=window)[0]
    return o
