"""The recurrence token by token with batched products: the decoding path, where T is 1 or small."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kernels.reference import compute_dtype, sequence_by_sequence


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The function of `reference.recurrence`, with its arguments and results.

    A step is rows [B, HV, 1, D] against the states [B, HV, K, V] of all sequences and heads. Packed sequences of
    one common length are a batch; others run one after another.
    """
    if cu_seqlens is not None:
        if len({end - start for start, end in pairwise(cu_seqlens)}) > 1:
            return sequence_by_sequence(recurrent, q, k, v, g, beta, scale, initial_state, cu_seqlens)
        N = len(cu_seqlens) - 1
        q, k, v = (x[0].unflatten(0, (N, -1)) for x in (q, k, v))
        g, beta = (None if x is None else x[0].unflatten(0, (N, -1)) for x in (g, beta))
        o, state = recurrent(q, k, v, g, beta, scale, initial_state)
        return o.flatten(0, 1).unsqueeze(0), state

    (B, T, H, K), (HV, V), dtype = q.shape, v.shape[2:], compute_dtype(q, k, v)
    if HV != H:
        q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    queries, keys, values = (x.to(dtype).unsqueeze(3) for x in (q, k, v))  # [B, T, HV, 1, K or V]
    if g is not None:
        decay = (g if g.dim() == 4 else g.unsqueeze(3)).to(dtype).exp().unsqueeze(4)  # [B, T, HV, K or 1, 1]
    if beta is not None:
        strength = beta.to(dtype)[..., None, None]  # [B, T, HV, 1, 1]

    state = queries.new_zeros(B, HV, K, V) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(T):
        if g is not None:
            state = state * decay[:, t]
        write = values[:, t] if beta is None else (values[:, t] - keys[:, t] @ state) * strength[:, t]
        state = torch.addcmul(state, keys[:, t].mT, write)
        outputs.append(queries[:, t] @ state)
    return (torch.stack(outputs, dim=1).squeeze(3) * scale if outputs else v).to(v.dtype), state
