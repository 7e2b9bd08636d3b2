"""Root-mean-square norms on a GPU, with or without a gate: each row is read once.

    x̂ = x / sqrt(mean(x²) + eps),   y = x̂ ⊙ w ⊙ a(z)                             a: sigmoid or SiLU, or no gate
    dz = dy ⊙ x̂ ⊙ w ⊙ a'(z),   dw = Σ_rows dy ⊙ a(z) ⊙ x̂,   e = dy ⊙ a(z) ⊙ w
    dx = (e − x̂ · mean(e ⊙ x̂)) / sqrt(mean(x²) + eps)

A program takes as many whole rows at a time as have about 2,048 numbers. The forward keeps one float32 a row, the
inverse root, and the backward computes the rest again; a program of the backward goes on through the rows with its sum
for dw, and torch adds up the programs' sums: the same bits in every run.
"""

# mypy: disable-error-code="no-untyped-def"
# The reason: @triton.jit functions take constexprs, pointers and blocks, none of which has a type to annotate with.

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.gpu.common import LOG2_E, exp2, load_rows, reciprocal, store_rows
from kernels.gpu.launch import Launcher, launcher, numbers, traced, types

TILE = 2048  # numbers of a program at a time, unless a row has more
PER_WARP = 512  # of them: 16 a thread, of each tensor
NARROWEST = 16
RESIDENT_WARPS = 16  # of the backward on a multiprocessor, of which as many programs are started


@triton.jit
def _opening(z, SILU: tl.constexpr):
    """a(z) and a'(z)."""
    sigmoid = reciprocal(1.0 + exp2(z * -LOG2_E))
    if SILU:
        return z * sigmoid, sigmoid * (1.0 + z * (1.0 - sigmoid))
    else:
        return sigmoid, sigmoid * (1.0 - sigmoid)


@triton.jit
def _weight(weight, columns, N: tl.constexpr):
    """[1, columns] in float32."""
    return tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=("eps", "M"))
def norm_kernel(
    x,
    gate,
    weight,
    y,
    inverse,
    x_stride,
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
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / N + eps)
    value *= scale[:, None]
    if weight is not None:
        value *= _weight(weight, columns, N)
    if gate is not None:
        opening, _ = _opening(load_rows(gate, gate_stride, rows, columns, live, N, BN).to(tl.float32), SILU)
        value *= opening
    store_rows(y, N, rows, columns, live, value, N, BN)
    if inverse is not None:
        tl.store(inverse + rows, scale, mask=live)


@triton.jit(do_not_specialize=("M",))
def norm_gradients_kernel(
    d_y,
    x,
    gate,
    weight,
    inverse,
    d_x,
    d_gate,
    partial,
    d_y_stride,
    x_stride,
    gate_stride,
    M,
    N: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    SILU: tl.constexpr,
):
    """`partial` [programs, N], with a weight."""
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
            opening, slope = _opening(load_rows(gate, gate_stride, rows, columns, live, N, BN).to(tl.float32), SILU)
            slope *= error * unit
            if weight is not None:
                slope *= _weight(weight, columns, N)
            store_rows(d_gate, N, rows, columns, live, slope, N, BN)
            error *= opening
        if weight is not None:
            sums += error * unit
            error *= _weight(weight, columns, N)
        along = tl.sum(error * unit, axis=1) / N
        store_rows(d_x, N, rows, columns, live, (error - unit * along[:, None]) * scale, N, BN)
    if weight is not None:
        total = tl.sum(sums, axis=0)
        tl.store(partial + tl.program_id(0).to(tl.int64) * N + columns, total, mask=columns < N)


def norm(x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, silu: bool, dtype: torch.dtype) -> Tensor:
    """As `kernels.gated_rms_norm`; without a gate as `kernels.rms_norm`. y is of `dtype`."""
    tensors, eps = (x, gate, weight), float(eps)
    keep = torch.is_grad_enabled() and any(z is not None and z.requires_grad for z in tensors)
    if torch.compiler.is_compiling() or traced(x):
        return norm_forward(*tensors, eps, silu, dtype, keep)[0]
    if keep:
        y: Tensor = _Norm.apply(*tensors, eps, silu, dtype)
        return y
    return _forward(*tensors, eps, silu, dtype, False)[0]


def _rows(x: Tensor) -> Tensor:
    """[M, N] with numbers side by side, a view if it can be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def tile(N: int) -> dict[str, int]:
    """What the kernels are compiled for rows of N numbers."""
    BN = max(NARROWEST, triton.next_power_of_2(N))
    BR = max(1, TILE // BN)
    return {"N": N, "BN": BN, "BR": BR, "num_warps": BN * BR // PER_WARP}


@cache
def _programs(device: torch.device, warps: int) -> int:
    """Of the backward: as many as run at a time."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count * RESIDENT_WARPS // warps


def _start(tensors: Sequence[Tensor | None], silu: bool, *key: Any) -> tuple[Launcher, dict[str, Any]]:
    """For tensors as the kernel takes them, [M, N] and others; and its constants."""
    x = tensors[0]
    assert x is not None
    constants = {**tile(x.shape[1]), "SILU": silu}
    sizes = numbers(*(z.stride(0) for z in tensors if z is not None and z.dim() == 2))
    wide = x.shape[0] >= 2**31
    return launcher("norm", x.device, wide, key, *constants.values(), types(*tensors), sizes), constants


def _forward(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, silu: bool, dtype: torch.dtype, keep: bool
) -> list[Tensor]:
    """y in `dtype` and, with `keep`, each row's inverse root."""
    results = _results(x, dtype, keep)
    x, gate = _rows(x), None if gate is None else _rows(gate)
    weight = None if weight is None else weight.contiguous()
    start, constants = _start((x, gate, weight), silu, dtype, keep)
    M, rows = x.shape[0], constants["BR"]
    gate_stride = 0 if gate is None else gate.stride(0)
    with torch.cuda.device_of(x):  # where Triton launches
        inverse = results[1] if keep else None
        arguments = (x, gate, weight, results[0], inverse, x.stride(0), gate_stride, eps, M)
        start(norm_kernel, (triton.cdiv(M, rows),), arguments, constants)
    return results


def _results(x: Tensor, dtype: torch.dtype, keep: bool) -> list[Tensor]:
    kept = [x.new_empty(x.shape[:-1], dtype=torch.float32)] if keep else []
    return [x.new_empty(x.shape, dtype=dtype), *kept]


def _backward(
    d_y: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor | None, inverse: Tensor, silu: bool
) -> list[Tensor | None]:
    """Gradients of x, gate, weight."""
    d_x = x.new_empty(x.shape)
    d_gate = None if gate is None else gate.new_empty(gate.shape)
    d_y, x, gate = _rows(d_y), _rows(x), None if gate is None else _rows(gate)
    scale = None if weight is None else weight.contiguous()
    start, constants = _start((d_y, x, gate, scale, inverse.view(-1)), silu)
    M, N = x.shape
    programs = min(triton.cdiv(M, constants["BR"]), _programs(x.device, constants["num_warps"]))
    partial = None if weight is None else x.new_empty((programs, N), dtype=torch.float32)
    gate_stride = 0 if gate is None else gate.stride(0)
    with torch.cuda.device_of(x):
        arguments = (d_y, x, gate, scale, inverse, d_x, d_gate, partial, d_y.stride(0), x.stride(0), gate_stride, M)
        start(norm_gradients_kernel, (programs,), arguments, constants)
    d_weight = None if weight is None or partial is None else partial.sum(0).to(weight.dtype)
    return [d_x, d_gate, d_weight]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, silu: bool, dtype: torch.dtype
    ) -> Tensor:
        y, inverse = _forward(x, gate, weight, eps, silu, dtype, True)
        ctx.save_for_backward(x, gate, weight, inverse)
        ctx.silu = silu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _backward(d_y, *ctx.saved_tensors, ctx.silu)  # type: ignore[call-arg]
        return *gradients, None, None, None


norm_forward = torch.library.custom_op("kda_lm::norm_forward", _forward, mutates_args=())


@torch.library.custom_op("kda_lm::norm_backward", mutates_args=())
def norm_backward(
    d_y: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor | None, inverse: Tensor, silu: bool
) -> list[Tensor]:
    """`_backward` with an empty tensor where there is no gradient: operators return no None."""
    return [x.new_empty(0) if z is None else z for z in _backward(d_y, x, gate, weight, inverse, silu)]


@norm_forward.register_fake
def _(x: Tensor, gate: Any, weight: Any, eps: float, silu: bool, dtype: torch.dtype, keep: bool) -> list[Tensor]:
    return _results(x, dtype, keep)


@norm_backward.register_fake
def _(d_y: Tensor, x: Tensor, gate: Any, weight: Any, inverse: Tensor, silu: bool) -> list[Tensor]:
    return [x.new_empty(0 if z is None else z.shape, dtype=(x if z is None else z).dtype) for z in (x, gate, weight)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, gate, weight, _, silu, _, keep = inputs
    if not keep:
        raise RuntimeError("kda_lm::norm_forward: got keep=False and inputs that require gradients")
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, gate, weight, output[1])
    ctx.silu = silu


def _operator_backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    x, gate, weight, inverse = ctx.saved_tensors
    d_x, d_gate, d_weight = norm_backward(grads[0], x, gate, weight, inverse, ctx.silu)
    return d_x, None if gate is None else d_gate, None if weight is None else d_weight, None, None, None, None


norm_forward.register_autograd(_operator_backward, setup_context=_setup_context)
