"""The recurrence in chunks of tokens, in plain torch: matrix products inside a chunk, one step per chunk between.

With C tokens, S the state that enters their chunk and G the inclusive cumulative sum of g inside it:

    P_ij = Σ_c q_ic k_jc e^(G_ic − G_jc), i ≥ j         M_ij = β_i Σ_c k_ic k_jc e^(G_ic − G_jc), i > j
    E    = (I + M)⁻¹ diag(β) (V − (K ⊙ e^G) S)          E = V for the additive rule
    O    = scale · ((Q ⊙ e^G) S + P E)
    S    ← e^(G_C) ⊙ S + (K ⊙ e^(G_C − G))ᵀ E

(article, section 6). Everything but the chain of S is computed for all chunks at once, so Python's loop has T/C
steps of three small products.

No cumulative sum is ever subtracted and nothing is clamped, so that any log-decay in [−inf, 0] is exact: see
`_DecayedProducts`. Chunks hold tokens of one sequence only, every sequence starts a chunk of its own, and what
pads the last one (k = v = β = g = 0) leaves the state alone.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from kernels.reference import compute_dtype

# Tokens in a chunk. On two CPU cores 16 and 64 are up to a quarter slower, except 16 for K = 32 with many tokens; the
# states that are kept for the backward take K·V per chunk.
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
    (H, K), (HV, V), dtype = q.shape[2:], v.shape[2:], compute_dtype(q, k, v)
    layout = _Layout(q.shape[0], q.shape[1], HV, cu_seqlens, q.device)
    if HV != H:
        q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    queries, keys, values = (layout.to_chunks(x.to(dtype)) for x in (q, k, v))  # [n, C, K], [n, C, V]
    decay = None
    if g is not None:  # [n, C, 1 or K]
        decay = layout.to_chunks((g if g.dim() == 4 else g.unsqueeze(-1)).to(dtype)).exp()
    rows = [queries]
    if beta is not None:
        strength = layout.to_chunks(beta.to(dtype).unsqueeze(-1))  # [n, C, 1]
        rows.append(keys * strength)

    rows, keys, total, products = _interactions(rows, keys, decay)
    w = None
    if beta is not None:
        inverse = _UnitLowerInverse.apply(products[1])
        values, w = inverse @ (values * strength), inverse @ rows[1]

    state = None if initial_state is None else initial_state.to(dtype)
    state = layout.first_state(state, K, V, values)
    states, last, *errors = _Scan.apply(layout.steps, values, w, keys, total, state)
    o = torch.baddbmm(
        torch.bmm(rows[0], states), products[0], errors[0] if errors else values, beta=scale, alpha=scale
    )
    return layout.from_chunks(o).to(v.dtype), layout.last_state(last)


class _Layout:
    """Where tokens [B, T, H, D] lie among chunks [n, C, D].

    The chunks of one step (the first of every sequence, the second of every sequence, …) lie together, longest
    sequences first: those that still run at a step are the first `running[step]` ones.
    """

    def __init__(self, B: int, T: int, H: int, cu_seqlens: Sequence[int] | None, device: torch.device):
        self.T, self.H = T, H
        lengths = [T] * B
        if cu_seqlens is not None:
            lengths = [end - start for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)]
        self.sequences = len(lengths)
        self.C = C = min(CHUNK, 1 << (max(lengths) - 1).bit_length())  # short inputs fit one small chunk
        chunks = [-(-length // C) for length in lengths]
        self.running = [sum(count > step for count in chunks) for step in range(max(chunks))]
        first = [0, *accumulate(self.running)]  # chunk of each step
        self.steps = [slice(a * H, b * H) for a, b in pairwise(first)]  # [chunks · H]
        self.packed = cu_seqlens is not None
        if self.packed:
            order = torch.tensor(chunks).argsort(descending=True, stable=True)
            rank = order.argsort()  # of each sequence
            sequence = torch.repeat_interleave(torch.tensor(lengths))
            t = torch.arange(T) - torch.tensor(cu_seqlens)[sequence]
            self.slots = ((torch.tensor(first)[t // C] + rank[sequence]) * C + t % C).to(device)  # [T]
            self.order, self.rank = order.to(device), rank.to(device)

    def to_chunks(self, x: Tensor) -> Tensor:
        if self.packed:
            x = x.new_zeros(sum(self.running) * self.C, *x.shape[2:]).index_copy(0, self.slots, x[0])
            return x.unflatten(0, (-1, self.C)).transpose(1, 2).flatten(0, 1)
        padding = len(self.running) * self.C - self.T
        x = F.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x
        return x.unflatten(1, (-1, self.C)).permute(1, 0, 3, 2, 4).flatten(0, 2)

    def from_chunks(self, x: Tensor) -> Tensor:
        if self.packed:
            x = x.unflatten(0, (-1, self.H)).transpose(1, 2).flatten(0, 1)
            return x.index_select(0, self.slots).unsqueeze(0)
        x = x.unflatten(0, (-1, self.sequences, self.H)).permute(1, 0, 3, 2, 4)
        return x.flatten(1, 2)[:, : self.T]

    def first_state(self, state: Tensor | None, K: int, V: int, like: Tensor) -> Tensor:
        """[N · H, K, V] in the order of the sequences, from [N, H, K, V] or nothing."""
        if state is None:
            return like.new_zeros(self.sequences * self.H, K, V)
        return (state.index_select(0, self.order) if self.packed else state).flatten(0, 1)

    def last_state(self, state: Tensor) -> Tensor:
        state = state.unflatten(0, (-1, self.H))
        return state.index_select(0, self.rank) if self.packed else state


def _interactions(
    rows: list[Tensor], keys: Tensor, decay: Tensor | None
) -> tuple[list[Tensor], Tensor, Tensor | None, list[Tensor]]:
    """For every x in `rows` [n, C, K]: x ⊙ e^G and the products Σ_c x_ic k_jc e^(G_ic − G_jc) [n, C, C], i ≥ j.

    `decay` is e^g, [n, C, K] or [n, C, 1] or None. Also returns K ⊙ e^(G_C − G) and e^(G_C) [n, 1, K or 1].
    """
    if decay is None:
        return rows, keys, None, [(x @ keys.mT).tril() for x in rows]
    if decay.shape[-1] == keys.shape[-1]:
        keys, total, *rest = _DecayedProducts.apply(decay, keys, *rows)
        return rest[: len(rows)], keys, total, rest[len(rows) :]
    ones = torch.ones_like(decay)
    to_end, total, from_start, between = _DecayedProducts.apply(decay, ones, ones)
    return [x * from_start for x in rows], keys * to_end, total, [(x @ keys.mT) * between for x in rows]


class _Scan(torch.autograd.Function):
    """The chain over chunks: E = U − W S (E = U without W), S ← e^(G_C) ⊙ S + (K ⊙ e^(G_C − G))ᵀ E.

    Only what a step needs from its neighbour is in the loops, forward and backward; the rest is one product for
    all chunks.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        steps: list[slice],
        u: Tensor,
        w: Tensor | None,
        k: Tensor,
        total: Tensor | None,
        s: Tensor,
    ) -> tuple[Tensor, ...]:
        """u [n, C, V], w and k [n, C, K], total [n, 1, K or 1], s [N · H, K, V]; step t has the chunks steps[t].

        Returns the states [n, K, V] that enter the chunks, the last states [N · H, K, V] and, if there is a w, E.
        """
        last = s.clone()
        states = s.new_empty(len(k), *s.shape[1:])
        errors = u if w is None else torch.empty_like(u)
        for step in steps:
            state = last[: step.stop - step.start]
            states[step] = state
            if w is not None:
                torch.baddbmm(u[step], w[step], state, alpha=-1, out=errors[step])
            if total is not None:
                state.mul_(total[step].mT)
            state.baddbmm_(k[step].mT, errors[step])
        ctx.steps = steps
        ctx.save_for_backward(w, k, total, states, errors)
        return (states, last) if w is None else (states, last, errors)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, d_states: Tensor, d_last: Tensor, *d_errors: Tensor
    ) -> tuple[Tensor | None, ...]:
        w, k, total, states, errors = ctx.saved_tensors
        d_s = d_last.clone()
        d_next = torch.empty_like(states)  # of the states that leave the chunks
        d_e = d_errors[0].clone() if d_errors else torch.zeros_like(errors)
        for step in reversed(ctx.steps):
            d = d_s[: step.stop - step.start]
            d_next[step] = d
            d_e[step].baddbmm_(k[step], d)
            if total is not None:
                d.mul_(total[step].mT)
            d.add_(d_states[step])
            if w is not None:
                d.baddbmm_(w[step].mT, d_e[step], alpha=-1)
        d_w = None if w is None else (d_e @ states.mT).neg_()
        d_total = None
        if total is not None:
            d_total = (states * d_next).sum(-1, keepdim=True).mT.sum_to_size(total.shape)
        return None, d_e, d_w, errors @ d_next.mT, d_total, d_s


class _DecayedProducts(torch.autograd.Function):
    """Every pair of tokens of a chunk, decayed over what lies between, by bisection.

    Blocks double from 1 token to C. Inside a block, a row x_i is kept decayed from the block's start to i and a
    column k_j from j to the block's end; two neighbours then make their lower-left products as they stand, rows of
    the right one against columns of the left one:

        Σ_c (x_ic e^(Σ_{start..i} g_c)) (k_jc e^(Σ_{j+1..end} g_c))

    and grow into one block when the right rows are multiplied by the left block's whole decay and the left columns
    by the right block's. All factors are products of e^g ≤ 1: none overflows, none is divided by, nothing is
    subtracted, an e^g of 0 cuts exactly and its gradient stays finite. One exponential per gate is all there is.

    The backward climbs once more rather than keeping every level: memory is that of the inputs and outputs.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, decay: Tensor, k: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        """decay, k and each of the rows [n, C, K] → K ⊙ e^(G_C − G), e^(G_C), the rows ⊙ e^G, the products."""
        ctx.save_for_backward(decay, k, *rows)
        n, C, _ = k.shape
        products = [k.new_zeros(n, C, C) for _ in rows]
        for x, product in zip(rows, products, strict=True):
            product.diagonal(0, 1, 2).copy_((x * k).sum(-1))
        k, rows = k.clone(), [x * decay for x in rows]
        total = decay
        for h, columns, left, right, rights in _climb(decay, k, rows):
            for x, product in zip(rights, products, strict=True):
                _lower_left(product, h).copy_(x @ columns.mT)
            total = (left * right).flatten(1, 2)
        return k, total, *rows, *products

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_k: Tensor, d_total: Tensor, *d_rest: Tensor) -> tuple[Tensor, ...]:
        decay, k, *rows = ctx.saved_tensors
        d_rows, d_products = [d.clone() for d in d_rest[: len(rows)]], d_rest[len(rows) :]
        d_k, d = d_k.clone(), d_total
        climb = _climb(decay, k.clone(), [x * decay for x in rows])
        levels = [(h, c.clone(), *lr, [x.clone() for x in xs]) for h, c, *lr, xs in climb]
        for h, columns, left, right, rights in reversed(levels):
            d = d.unflatten(1, (-1, 1))
            d_columns = _halves(d_k, h)[0]
            d_left, d_right = d * right, d * left
            d_right += (d_columns * columns).sum(2, keepdim=True)
            d_columns.mul_(right)
            for x, d_row, d_product in zip(rights, d_rows, d_products, strict=True):
                d_x, d_block = _halves(d_row, h)[1], _lower_left(d_product, h)
                d_left += (d_x * x).sum(2, keepdim=True)
                d_x.mul_(left).add_(_matmul(d_block, columns))
                d_columns.add_(_matmul(d_block.mT, x))
            d = torch.cat([d_left, d_right], dim=2).flatten(1, 2)
        for x, d_row, d_product in zip(rows, d_rows, d_products, strict=True):
            diagonal = d_product.diagonal(0, 1, 2).unsqueeze(-1)
            d = d + d_row * x
            d_row.mul_(decay).addcmul_(diagonal, k)
            d_k.addcmul_(diagonal, x)
        return d, d_k, *d_rows


def _climb(
    decay: Tensor, k: Tensor, rows: list[Tensor]
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, list[Tensor]]]:
    """Levels h = 1, 2, …, C/2 with their [n, C/2h, h, K] left columns and right rows and [n, C/2h, 1, K] decays.

    Changes k and the rows in place, after each level.
    """
    h, total = 1, decay
    while h < k.shape[1]:
        left, right = _halves(total, 1)
        columns, rights = _halves(k, h)[0], [_halves(x, h)[1] for x in rows]
        yield h, columns, left, right, rights
        columns.mul_(right)
        for x in rights:
            x.mul_(left)
        h, total = 2 * h, (left * right).flatten(1, 2)


class _UnitLowerInverse(torch.autograd.Function):
    """(I + M)⁻¹ for M [n, C, C], of which only the part under the diagonal is read, by doubling blocks:

    [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹ B A⁻¹, D⁻¹]]

    Products only: LAPACK's triangular solve takes the chunks one by one, which is several times slower.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, m: Tensor) -> Tensor:
        inverse = torch.zeros_like(m)
        inverse.diagonal(0, 1, 2).fill_(1.0)
        h = 1
        while h < m.shape[1]:
            blocks = _diagonal_blocks(inverse, 2 * h)
            a, d = blocks[..., :h, :h], blocks[..., h:, h:]
            blocks[..., h:, :h] = -_matmul(d, _matmul(_lower_left(m, h), a))
            h *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_inverse: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return (inverse.mT @ d_inverse @ inverse.mT).tril_(-1).neg_()


def _halves(x: Tensor, h: int) -> tuple[Tensor, ...]:
    """Views [n, C/2h, h, D] of the left and of the right halves of x's blocks of 2h tokens."""
    return x.unflatten(1, (-1, 2, h)).unbind(2)


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """View [n, C/size, size, size] of x [n, C, C]."""
    return x.unflatten(2, (-1, size)).unflatten(1, (-1, size)).diagonal(0, 1, 3).permute(0, 3, 1, 2)


def _lower_left(x: Tensor, h: int) -> Tensor:
    """View [n, C/2h, h, h]: rows of the right half against columns of the left half of each block of 2h tokens."""
    return _diagonal_blocks(x, 2 * h)[..., h:, :h]


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, by hand over an inner dimension of 1 or 2, for which batched BLAS is slow."""
    inner = a.shape[-1]
    if inner > 2:
        return a @ b
    first = a[..., :1] * b[..., :1, :]
    return first if inner == 1 else torch.addcmul(first, a[..., 1:], b[..., 1:, :])
