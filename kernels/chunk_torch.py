"""The recurrence in chunks of tokens, in plain torch: matrix products in a chunk, one short step between chunks.

With C tokens, S the state that enters their chunk and G the inclusive cumulative sum of g inside it:

    P_ij = Σ_c q_ic k_jc e^(G_ic − G_jc), i ≥ j         M_ij = β_i Σ_c k_ic k_jc e^(G_ic − G_jc), i > j
    E    = (I + M)⁻¹ diag(β) (V − (K ⊙ e^G) S)          E = V for the additive rule
    O    = scale · ((Q ⊙ e^G) S + P E)
    S    ← e^(G_C) ⊙ S + (K ⊙ e^(G_C − G))ᵀ E

(article, section 6). All but the chain of S is computed for all chunks at once: Python loops over T/C steps, not
over tokens.

No cumulative sum is ever subtracted and nothing is clamped, so that any log-decay in [−inf, 0] is exact: see
`_DecayedProducts`. A chunk holds tokens of one sequence only, every sequence starts a chunk of its own, and what
fills up its last one (q = k = v = β = g = 0) leaves the state alone.

Below, n counts the chunks of all sequences and value heads.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.reference import compute_dtype

# Tokens in a chunk. Forward and backward on a CPU, K = V = 32 to 64: 16 and 64 cost up to a fifth more, except that
# 16 is faster for K = 32 and many tokens; but 16 also doubles the states kept for the backward, K·V per chunk.
CHUNK = 32


def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The function of `reference.recurrence`, with its arguments and results."""
    (B, T, H, K), (HV, V), dtype = q.shape, v.shape[2:], compute_dtype(q, k, v)
    layout = _Layout(B, T, HV, cu_seqlens, q.device)
    if HV != H:
        q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    queries, keys, values = (layout.to_chunks(x.to(dtype)) for x in (q, k, v))  # [n, C, K], [n, C, K], [n, C, V]
    decay = None
    if g is not None:
        decay = layout.to_chunks((g if g.dim() == 4 else g.unsqueeze(3)).to(dtype)).exp()  # [n, C, K or 1]

    if beta is None:
        queries, arriving, total, p = _interactions(decay, keys, queries)
        errors, w = values, None
    else:
        strength = layout.to_chunks(beta.to(dtype).unsqueeze(3))  # [n, C, 1]
        queries, arriving, total, p, writes, m = _interactions(decay, keys, queries, keys * strength)
        inverse = _UnitLowerInverse.apply(m)
        errors, w = inverse @ (values * strength), inverse @ writes

    if initial_state is None:
        initial_state = values.new_zeros(layout.N, HV, K, V)
    states, last, *rest = _Scan.apply(
        layout.steps, errors, w, arriving, total, layout.to_order(initial_state.to(dtype))
    )
    o = torch.baddbmm(torch.bmm(queries, states), p, rest[0] if rest else errors, beta=scale, alpha=scale)
    return layout.from_chunks(o).to(v.dtype), layout.from_order(last)


class _Layout:
    """Where the tokens [B, T, H, D] of N sequences lie among the chunks [n, C, D].

    The chunks of one step (the first of every sequence, the second of every sequence, …) lie side by side, longest
    sequences first, so that the sequences that still run at a step are the first ones.
    """

    def __init__(self, B: int, T: int, H: int, cu_seqlens: Sequence[int] | None, device: torch.device):
        lengths = [T] * B if cu_seqlens is None else [end - start for start, end in pairwise(cu_seqlens)]
        self.T, self.H, self.N = T, H, len(lengths)
        self.C = C = min(CHUNK, 1 << (max(lengths) - 1).bit_length())  # short sequences take one small chunk
        chunks = [-(-length // C) for length in lengths]
        first = [0, *accumulate(sum(count > step for count in chunks) for step in range(max(chunks)))]
        self.steps = [slice(start * H, end * H) for start, end in pairwise(first)]
        self.packed = cu_seqlens is not None
        if cu_seqlens is not None:
            order = torch.tensor(chunks).argsort(descending=True, stable=True)
            rank = order.argsort()
            sequence = torch.repeat_interleave(torch.tensor(lengths))
            t = torch.arange(T) - torch.tensor(cu_seqlens)[sequence]
            slots = (torch.tensor(first)[t // C] + rank[sequence]) * C + t % C
            self.order, self.rank, self.slots = order.to(device), rank.to(device), slots.to(device)
            self.size = first[-1] * C

    def to_chunks(self, x: Tensor) -> Tensor:
        """[B, T, H, D] → [n, C, D]"""
        if self.packed:
            x = x.new_zeros(self.size, *x.shape[2:]).index_copy(0, self.slots, x[0])
            return x.unflatten(0, (-1, self.C)).transpose(1, 2).flatten(0, 1)
        padding = len(self.steps) * self.C - self.T
        x = F.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x
        return x.unflatten(1, (-1, self.C)).permute(1, 0, 3, 2, 4).flatten(0, 2)

    def from_chunks(self, x: Tensor) -> Tensor:
        """[n, C, D] → [B, T, H, D]"""
        if self.packed:
            x = x.unflatten(0, (-1, self.H)).transpose(1, 2).flatten(0, 1)
            return x.index_select(0, self.slots).unsqueeze(0)
        x = x.unflatten(0, (len(self.steps), -1, self.H)).permute(1, 0, 3, 2, 4)
        return x.flatten(1, 2)[:, : self.T]

    def to_order(self, state: Tensor) -> Tensor:
        """[N, H, K, V] → [N · H, K, V], longest sequence first."""
        return (state.index_select(0, self.order) if self.packed else state).flatten(0, 1)

    def from_order(self, state: Tensor) -> Tensor:
        """[N · H, K, V], longest sequence first → [N, H, K, V]"""
        state = state.unflatten(0, (-1, self.H))
        return state.index_select(0, self.rank) if self.packed else state


def _interactions(decay: Tensor | None, keys: Tensor, *rows: Tensor) -> list[Any]:
    """What a chunk needs of its decay e^g, [n, C, K] or [n, C, 1] or None, for keys and rows X_1, … [n, C, K].

    Returns [X_1 ⊙ e^G, K ⊙ e^(G_C − G), e^(G_C) [n, 1, K or 1] or None, products of X_1, X_2 ⊙ e^G, products of
    X_2, …], where the products of X are Σ_c x_ic k_jc e^(G_ic − G_jc) for i ≥ j and zero elsewhere.
    """
    if decay is None:
        products = [(x @ keys.mT).tril() for x in rows]
        arriving, total, decayed = keys, None, list(rows)
    elif decay.shape[2] == keys.shape[2]:
        arriving, total, *rest = _DecayedProducts.apply(decay, keys, *rows)
        decayed, products = rest[: len(rows)], rest[len(rows) :]
    else:
        ones, row = torch.ones_like(decay), torch.ones_like(decay)  # two tensors: torch.compile refuses one twice
        to_end, total, from_start, between = _DecayedProducts.apply(decay, ones, row)
        arriving, decayed = keys * to_end, [x * from_start for x in rows]
        products = [(x @ keys.mT) * between for x in rows]
    return [decayed[0], arriving, total, products[0], *decayed[1:], *products[1:]]


class _DecayedProducts(torch.autograd.Function):
    """The products of all pairs of tokens of a chunk, each decayed by what lies between the two, by bisection.

    Blocks double from 1 token to C. In a block every row x_i is kept decayed from the block's start to i, every
    column k_j from behind j to the block's end. The right one of two neighbours then meets the left one as it is,

        Σ_c (x_ic e^(Σ_{start ≤ t ≤ i} g_tc)) (k_jc e^(Σ_{j < t ≤ end} g_tc))

    and they become one block when the right rows are multiplied by the left block's whole decay and the left
    columns by the right block's. All factors are products of e^g ≤ 1: nothing overflows, is divided by or is
    subtracted, only pairs i > j are formed, an e^g of 0 cuts exactly, and gradients need no more than these.

    The backward climbs a second time instead of keeping the levels, and so takes no memory from the forward.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """decay, k and the rows [n, C, K] → K ⊙ e^(G_C − G), e^(G_C), the rows ⊙ e^G, the products of the rows."""
        # Not named in the signature: without gradients torch.compile takes ctx away where tensors are as many as the
        # parameters that it counts, and breaks the graph.
        ctx.save_for_backward(*tensors)
        decay, k, *rows = tensors
        products = [k.new_zeros(*k.shape[:2], k.shape[1]) for _ in rows]
        for x, product in zip(rows, products, strict=True):
            product.diagonal(0, 1, 2).copy_((x * k).sum(2))
        arriving, decayed, total = k.clone(), [x * decay for x in rows], decay
        for h, left, right, columns, right_rows in _climb(decay, arriving, decayed):
            for x, product in zip(right_rows, products, strict=True):
                _lower_left(product, h).copy_(x @ columns.mT)
            total = (left * right).flatten(1, 2)
        return arriving, total, *decayed, *products

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_arriving: Tensor, d_total: Tensor, *d_rest: Tensor) -> tuple[Tensor, ...]:
        decay, k, *rows = ctx.saved_tensors
        climb = _climb(decay, k.clone(), [x * decay for x in rows])
        levels = [(h, left, right, k_.clone(), [x.clone() for x in xs]) for h, left, right, k_, xs in climb]
        d_k, d_rows, d_products = d_arriving.clone(), [d.clone() for d in d_rest[: len(rows)]], d_rest[len(rows) :]
        d_decay = d_total
        for h, left, right, columns, right_rows in reversed(levels):
            d_columns, _ = _halves(d_k, h)
            d_both = d_decay.unflatten(1, (-1, 1))
            d_left, d_right = d_both * right, d_both * left
            d_right.add_((d_columns * columns).sum(2, keepdim=True))
            d_columns.mul_(right)
            for x, d_row, d_product in zip(right_rows, d_rows, d_products, strict=True):
                (_, d_x), d_block = _halves(d_row, h), _lower_left(d_product, h)
                d_left.add_((d_x * x).sum(2, keepdim=True))
                d_x.mul_(left).add_(_matmul(d_block, columns))
                d_columns.add_(_matmul(d_block.mT, x))
            d_decay = torch.cat([d_left, d_right], dim=2).flatten(1, 2)
        for x, d_row, d_product in zip(rows, d_rows, d_products, strict=True):
            diagonal = d_product.diagonal(0, 1, 2).unsqueeze(2)
            d_decay = torch.addcmul(d_decay, d_row, x)
            d_row.mul_(decay).addcmul_(diagonal, k)
            d_k.addcmul_(diagonal, x)
        return d_decay, d_k, *d_rows


def _climb(decay: Tensor, k: Tensor, rows: list[Tensor]) -> Iterator[tuple[int, Tensor, Tensor, Tensor, list[Tensor]]]:
    """Levels h = 1, 2, …, C/2: the whole decays [n, C/2h, 1, K] of left and right blocks of h tokens, the columns of
    the left blocks and the rows of the right ones [n, C/2h, h, K], as views. Decays k and rows in place on the way.
    """
    h, total = 1, decay
    while h < k.shape[1]:
        left, right = _halves(total, 1)
        columns, right_rows = _halves(k, h)[0], [_halves(x, h)[1] for x in rows]
        yield h, left, right, columns, right_rows
        columns.mul_(right)
        for x in right_rows:
            x.mul_(left)
        h, total = 2 * h, (left * right).flatten(1, 2)


class _UnitLowerInverse(torch.autograd.Function):
    """(I + M)⁻¹ of M [n, C, C], of which only what lies under the diagonal is read, by doubling blocks:

        [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹ B A⁻¹, D⁻¹]]

    Batched products only. LAPACK's triangular solve takes the chunks one by one, with threads for each: twice as
    slow for the right-hand sides needed here, and far worse where cores are shared.
    """

    @staticmethod
    def forward(ctx: Any, m: Tensor) -> Tensor:
        inverse = torch.zeros_like(m)
        inverse.diagonal(0, 1, 2).fill_(1.0)
        h = 1
        while h < m.shape[1]:
            a, d = (_diagonal_blocks(inverse, h)[:, side::2] for side in (0, 1))
            _lower_left(inverse, h).copy_(_matmul(d, _matmul(_lower_left(m, h), a)).neg_())
            h *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_inverse: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return (inverse.mT @ d_inverse @ inverse.mT).tril_(-1).neg_()


class _Scan(torch.autograd.Function):
    """The chain over chunks: E = U − W S (E = U without W), then S ← e^(G_C) ⊙ S + (K ⊙ e^(G_C − G))ᵀ E.

    The loops, forward and backward, hold only what a step needs of its neighbour; the rest is done for all chunks
    at once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        steps: list[slice],
        u: Tensor,
        w: Tensor | None,
        k: Tensor,
        total: Tensor | None,
        initial: Tensor,
    ) -> tuple[Tensor, ...]:
        """u [n, C, V]; w and k, decayed to the end, [n, C, K]; total [n, 1, K or 1]; initial [N · H, K, V].

        Returns the states that enter the chunks [n, K, V], the last states [N · H, K, V] and, with w, E [n, C, V].
        """
        last = initial.clone()
        states = initial.new_empty(len(k), *initial.shape[1:])
        errors = u if w is None else torch.empty_like(u)
        for at in steps:
            state = last[: at.stop - at.start]
            states[at] = state
            if w is not None:
                torch.baddbmm(u[at], w[at], state, alpha=-1, out=errors[at])
            if total is not None:
                state.mul_(total[at].mT)
            state.baddbmm_(k[at].mT, errors[at])
        ctx.steps = steps
        ctx.save_for_backward(w, k, total, states, errors)
        return (states, last) if w is None else (states, last, errors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: Tensor, d_last: Tensor, *d_errors: Tensor) -> tuple[Tensor | None, ...]:
        w, k, total, states, errors = ctx.saved_tensors
        d_running, d_leaving = d_last.clone(), torch.empty_like(states)  # of the states, of those behind each chunk
        d_u = d_errors[0].clone() if d_errors else torch.zeros_like(errors)
        for at in reversed(ctx.steps):
            d_state = d_running[: at.stop - at.start]
            d_leaving[at] = d_state
            d_u[at].baddbmm_(k[at], d_state)
            if total is not None:
                d_state.mul_(total[at].mT)
            d_state.add_(d_states[at])
            if w is not None:
                d_state.baddbmm_(w[at].mT, d_u[at], alpha=-1)
        d_w = None if w is None else (d_u @ states.mT).neg_()
        d_total = None
        if total is not None:
            d_total = (states * d_leaving).sum(2).unsqueeze(1).sum_to_size(total.shape)
        return None, d_u, d_w, errors @ d_leaving.mT, d_total, d_running


def _halves(x: Tensor, h: int) -> tuple[Tensor, ...]:
    """Views [n, C/2h, h, D] of the left and of the right halves of x's blocks of 2h tokens."""
    return x.unflatten(1, (-1, 2, h)).unbind(2)


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """View [n, C/size, size, size] of x [n, C, C]."""
    return x.unflatten(2, (-1, size)).unflatten(1, (-1, size)).diagonal(0, 1, 3).permute(0, 3, 1, 2)


def _lower_left(x: Tensor, h: int) -> Tensor:
    """View [n, C/2h, h, h]: right rows against left columns of x's diagonal blocks of 2h tokens."""
    return _diagonal_blocks(x, 2 * h)[..., h:, :h]


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, by hand over an inner dimension of 1 or 2, where batched BLAS is slow."""
    if a.shape[-1] > 2:
        return a @ b
    first = a[..., :1] * b[..., :1, :]
    return first if a.shape[-1] == 1 else torch.addcmul(first, a[..., 1:], b[..., 1:, :])
