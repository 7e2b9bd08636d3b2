"""Root-mean-square norms on a GPU, with or without a gate, of a sum or of x itself: each row is read once.

    x ← x + r                                                                    r: what is added, or nothing
    x̂ = x / sqrt(mean(x²) + eps),   y = x̂ ⊙ w ⊙ a(z)                             a: sigmoid or SiLU, or no gate
    dz = dy ⊙ x̂ ⊙ w ⊙ a'(z),   dw = Σ_rows dy ⊙ a(z) ⊙ x̂,   e = dy ⊙ a(z) ⊙ w
    dx = (e − x̂ · mean(e ⊙ x̂)) / sqrt(mean(x²) + eps) + ds                      ds: the sum's own gradient

dx is the gradient of both summands, written once where they have one dtype, else once for each.

A program takes as many whole rows at a time as have about 2,048 numbers. The forward keeps one float32 a row, the
inverse root, and the backward computes the rest again; a program of the backward goes on through the rows with its sum
for dw, and torch adds up the programs' sums: the same bits in every run.
"""

# mypy: disable-error-code="no-untyped-def"
# The reason: @triton.jit functions take constexprs, pointers and blocks, none of which has a type to annotate with.

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.gpu.common import load_rows, opening, store_rows
from kernels.gpu.launch import Launcher, as_rows, launcher, numbers, traced, types
from kernels.gpu.limits import multiprocessors

TILE = 2048  # numbers of a program at a time, unless a row has more
PER_WARP = 512  # of them: 16 a thread, of each tensor
NARROWEST = 16
RESIDENT_WARPS = 16  # of the backward on a multiprocessor, of which as many programs are started


@triton.jit
def _weight(weight, columns, N: tl.constexpr):
    """[1, columns] in float32."""
    return tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=("eps", "M"))
def norm_kernel(
    x,
    added,
    gate,
    weight,
    y,
    total,
    inverse,
    x_stride,
    added_stride,
    gate_stride,
    eps,
    M,
    N: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    SILU: tl.constexpr,
):
    columns = tl.arange(0, BN)
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    live = rows < M
    value = load_rows(x, x_stride, rows, columns, live, N, BN).to(tl.float32)
    if added is not None:
        value += load_rows(added, added_stride, rows, columns, live, N, BN).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        store_rows(total, N, rows, columns, live, rounded, N, BN)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / N + eps)
    value *= scale[:, None]
    if weight is not None:
        value *= _weight(weight, columns, N)
    if gate is not None:
        openness, _ = opening(load_rows(gate, gate_stride, rows, columns, live, N, BN).to(tl.float32), SILU)
        value *= openness
    store_rows(y, N, rows, columns, live, value, N, BN)
    if inverse is not None:
        tl.store(inverse + rows, scale, mask=live)


@triton.jit(do_not_specialize=("M",))
def norm_gradients_kernel(
    d_y,
    d_total,
    x,
    gate,
    weight,
    inverse,
    d_x,
    d_added,
    d_gate,
    partial,
    d_y_stride,
    d_total_stride,
    x_stride,
    gate_stride,
    M,
    N: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    SILU: tl.constexpr,
):
    """x is what was normalised, a sum or not; `partial` [programs, N], with a weight."""
    columns = tl.arange(0, BN)
    sums = tl.zeros([BR, BN], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M, BR), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * BR + tl.arange(0, BR)
        live = rows < M
        error = load_rows(d_y, d_y_stride, rows, columns, live, N, BN).to(tl.float32)
        unit = load_rows(x, x_stride, rows, columns, live, N, BN).to(tl.float32)
        scale = tl.load(inverse + rows, mask=live, other=0.0)[:, None]
        unit *= scale
        if gate is not None:
            openness, slope = opening(load_rows(gate, gate_stride, rows, columns, live, N, BN).to(tl.float32), SILU)
            slope *= error * unit
            if weight is not None:
                slope *= _weight(weight, columns, N)
            store_rows(d_gate, N, rows, columns, live, slope, N, BN)
            error *= openness
        if weight is not None:
            sums += error * unit
            error *= _weight(weight, columns, N)
        along = tl.sum(error * unit, axis=1) / N
        gradient = (error - unit * along[:, None]) * scale
        if d_total is not None:
            gradient += load_rows(d_total, d_total_stride, rows, columns, live, N, BN).to(tl.float32)
        store_rows(d_x, N, rows, columns, live, gradient, N, BN)
        if d_added is not None:
            store_rows(d_added, N, rows, columns, live, gradient, N, BN)
    if weight is not None:
        total = tl.sum(sums, axis=0)
        tl.store(partial + tl.program_id(0).to(tl.int64) * N + columns, total, mask=columns < N)


def norm(
    x: Tensor,
    added: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    silu: bool,
    dtype: torch.dtype,
) -> Sequence[Tensor]:
    """As `kernels.gated_rms_norm`; without a gate as `kernels.rms_norm`, or `kernels.add_rms_norm` where something is
    added: y in `dtype` and then the sum, too.
    """
    tensors, eps = (x, added, gate, weight), float(eps)
    keep = torch.is_grad_enabled() and any(z is not None and z.requires_grad for z in tensors)
    if torch.compiler.is_compiling() or traced(x):
        results = norm_forward(*tensors, eps, silu, dtype, keep)
        return results[:-1] if keep else results
    if keep:
        outputs: tuple[Tensor, ...] = _Norm.apply(*tensors, eps, silu, dtype)
        return outputs
    return _forward(*tensors, eps, silu, dtype, False)


def tile(N: int) -> dict[str, int]:
    """What the kernels are compiled for rows of N numbers."""
    BN = max(NARROWEST, triton.next_power_of_2(N))
    BR = max(1, TILE // BN)
    return {"N": N, "BN": BN, "BR": BR, "num_warps": BN * BR // PER_WARP}


def _programs(device: torch.device, warps: int) -> int:
    """Of the backward: as many as run at a time."""
    return multiprocessors(device) * RESIDENT_WARPS // warps if device.type == "cuda" else 2


def _start(tensors: Sequence[Tensor | None], silu: bool, *key: Any) -> tuple[Launcher, dict[str, Any]]:
    """For tensors as the kernel takes them, [M, N] and others; and its constants."""
    x = tensors[0]
    assert x is not None
    constants = {**tile(x.shape[1]), "SILU": silu}
    sizes = numbers(*(z.stride(0) for z in tensors if z is not None and z.dim() == 2))
    wide = x.shape[0] >= 2**31
    return launcher("norm", x.device, wide, key, *constants.values(), types(*tensors), sizes), constants


def _rows(*tensors: Tensor | None) -> list[Any]:
    return [None if x is None else as_rows(x) for x in tensors]


def _strides(*tensors: Tensor | None) -> list[int]:
    return [0 if x is None else x.stride(0) for x in tensors]


def _forward(
    x: Tensor,
    added: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    silu: bool,
    dtype: torch.dtype,
    keep: bool,
) -> list[Tensor]:
    """y in `dtype`; the sum, if something is added; with `keep`, each row's inverse root."""
    results = _results(x, added, dtype, keep)
    total = None if added is None else results[1]
    inverse = results[-1] if keep else None
    x, added, gate = _rows(x, added, gate)
    weight = None if weight is None else weight.contiguous()
    start, constants = _start((x, added, gate, weight), silu, dtype, keep)
    M = x.shape[0]
    with torch.cuda.device_of(x):  # where Triton launches
        arguments = (x, added, gate, weight, results[0], total, inverse, *_strides(x, added, gate), eps, M)
        start(norm_kernel, (triton.cdiv(M, constants["BR"]),), arguments, constants)
    return results


def _results(x: Tensor, added: Tensor | None, dtype: torch.dtype, keep: bool) -> list[Tensor]:
    results = [x.new_empty(x.shape, dtype=dtype)]
    if added is not None:
        results.append(x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, added.dtype)))
    if keep:
        results.append(x.new_empty(x.shape[:-1], dtype=torch.float32))
    return results


def _backward(
    d_y: Tensor,
    d_total: Tensor | None,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    inverse: Tensor,
    silu: bool,
    x_dtype: torch.dtype,
    added_dtype: torch.dtype | None,
) -> list[Tensor | None]:
    """Gradients of x, in `x_dtype`; of what was added to it, if `added_dtype` is another; of gate; of weight. What is
    given as x is what was normalised, a sum or not.
    """
    results = _gradients(x, gate, x_dtype, added_dtype)
    d_y, d_total, x, gate = _rows(d_y, d_total, x, gate)
    scale = None if weight is None else weight.contiguous()
    start, constants = _start((d_y, d_total, x, gate, scale, inverse.view(-1)), silu, x_dtype, added_dtype)
    M, N = x.shape
    programs = min(triton.cdiv(M, constants["BR"]), _programs(x.device, constants["num_warps"]))
    partial = None if weight is None else x.new_empty((programs, N), dtype=torch.float32)
    with torch.cuda.device_of(x):
        strides = _strides(d_y, d_total, x, gate)
        arguments = (d_y, d_total, x, gate, scale, inverse, *results, partial, *strides, M)
        start(norm_gradients_kernel, (programs,), arguments, constants)
    return [*results, None if weight is None or partial is None else partial.sum(0).to(weight.dtype)]


def _gradients(
    x: Tensor, gate: Tensor | None, x_dtype: torch.dtype, added_dtype: torch.dtype | None
) -> list[Tensor | None]:
    """Of x, of what was added to it if its gradient is not the same, of gate; not initialised."""
    alike = added_dtype is None or added_dtype == x_dtype
    return [
        x.new_empty(x.shape, dtype=x_dtype),
        None if alike else x.new_empty(x.shape, dtype=added_dtype),
        None if gate is None else gate.new_empty(gate.shape),
    ]


def _keep(ctx: Any, inputs: tuple[Any, ...], results: Sequence[Tensor]) -> None:
    """For the backward, of what `_forward` took and returned."""
    x, added, gate, weight, _, ctx.silu, *_ = inputs
    ctx.dtypes = x.dtype, None if added is None else added.dtype
    ctx.save_for_backward(x if added is None else results[1], gate, weight, results[-1])
    ctx.set_materialize_grads(False)


def _backward_of(ctx: Any, grads: Sequence[Tensor | None], backward: Callable[..., Any]) -> tuple[Tensor | None, ...]:
    """Gradients of x, of what was added, of gate, weight, by `_backward` or its operator."""
    d_y, d_total = grads[0], None if ctx.dtypes[1] is None else grads[1]
    if d_y is None:  # the sum alone was used
        assert d_total is not None
        return *(d_total.to(dtype) for dtype in ctx.dtypes), None, None
    x, gate, weight, inverse = ctx.saved_tensors
    d_x, d_added, d_gate, d_weight = backward(d_y, d_total, x, gate, weight, inverse, ctx.silu, *ctx.dtypes)
    if ctx.dtypes[1] is None:
        d_added = None
    elif ctx.dtypes[0] == ctx.dtypes[1]:
        d_added = d_x  # one tensor for both, as torch's own addition returns: autograd never writes to a shared one
    return d_x, d_added, None if gate is None else d_gate, None if weight is None else d_weight


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        results = _forward(*inputs, True)  # type: ignore[call-arg]
        _keep(ctx, inputs, results)
        return tuple(results[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_backward_of(ctx, grads, _backward), None, None, None


norm_forward = torch.library.custom_op("kda_lm::norm_forward", _forward, mutates_args=())


@torch.library.custom_op("kda_lm::norm_backward", mutates_args=())
def norm_backward(
    d_y: Tensor,
    d_total: Tensor | None,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    inverse: Tensor,
    silu: bool,
    x_dtype: torch.dtype,
    added_dtype: torch.dtype | None,
) -> list[Tensor]:
    """`_backward` with an empty tensor where there is no gradient: operators return no None."""
    gradients = _backward(d_y, d_total, x, gate, weight, inverse, silu, x_dtype, added_dtype)
    return [x.new_empty(0) if z is None else z for z in gradients]


@norm_forward.register_fake
def _(
    x: Tensor, added: Any, gate: Any, weight: Any, eps: float, silu: bool, dtype: torch.dtype, keep: bool
) -> list[Tensor]:
    return _results(x, added, dtype, keep)


@norm_backward.register_fake
def _(d_y: Tensor, d_total: Any, x: Tensor, gate: Any, weight: Any, *rest: Any) -> list[Tensor]:
    _, _, x_dtype, added_dtype = rest
    d_weight = None if weight is None else weight.new_empty(weight.shape)
    return [x.new_empty(0) if z is None else z for z in (*_gradients(x, gate, x_dtype, added_dtype), d_weight)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    if not inputs[-1]:
        raise RuntimeError("kda_lm::norm_forward: got keep=False and inputs that require gradients")
    ctx.mark_non_differentiable(output[-1])
    _keep(ctx, inputs, output)


def _operator_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return *_backward_of(ctx, grads, norm_backward), None, None, None, None


norm_forward.register_autograd(_operator_backward, setup_context=_setup_context)
