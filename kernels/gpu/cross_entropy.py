"""The loss of a linear layer's logits on a GPU, a chunk of rows at a time, with its gradients.

    z = W x,  l = log Σ_v exp z_v,  loss = Σ_rows l − z_target + z_loss · l²
    dz = (1 + 2 z_loss · l) · exp(z − l) − [v = target],  dx = Wᵀ dz,  dW = Σ_rows dz xᵀ

The gradient of a sum is known but for a factor before it is asked for: so a chunk's logits serve for its loss and its
gradients, and are never computed again. Matrix products are torch's. Logits are float32: of bf16 ones, rounded to
2⁻⁹ · |z|, each exp(z − l) would be off by 2 % at |z| = 10; dz is rounded to the operands' dtype, for the products that
it goes into. dW is summed in float32 over the chunks.
"""

# mypy: disable-error-code="no-untyped-def"
# The reason: @triton.jit functions take constexprs, pointers and blocks, none of which has a type to annotate with.

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.gpu.common import LN_2, LOG2_E, exp2
from kernels.gpu.launch import launcher, numbers, traced, types

CHUNK_BYTES = 2**28  # of a chunk's logits,
FEWEST_ROWS = 2048  # or as many rows: each chunk reads and writes dW once, which should be little beside its products
BLOCK, PER_WARP = 4096, 512  # logits of a program at a time, and of each of its warps
ALIGNED = 64  # numbers; rows of a chunk start at multiples, which matrix products are fast with for any vocabulary
LOWEST = tl.constexpr(-1e38)  # below every logit, and a number


@triton.jit(do_not_specialize=("ignore_index", "z_loss", "V"))
def cross_entropy_kernel(
    logits,
    targets,
    losses,
    errors,
    stride,
    ignore_index,
    z_loss,
    V,
    BV: tl.constexpr,
):
    """A program's row: its loss, and dz to `errors` unless that is None; it may be `logits` itself.

    Rows are `stride` ≥ V numbers apart, and are read and written up to there: what is behind V does not count, and
    becomes zero. The stride is known to be a multiple of 16 while compiling, for wide loads; V need not be.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BV)
    target = tl.load(targets + row)
    counts = target != ignore_index
    logits += row * stride

    # Before the reductions, whose barriers every warp passes: `errors` may be written over it.
    known = (target >= 0) & (target < V)
    place = tl.where(known, target, 0).to(tl.int32)
    chosen = tl.load(logits + place)

    # Each column of a block has its own maximum and sum: nothing is exchanged before the end of the row.
    highest = tl.full([BV], LOWEST, tl.float32)
    total = tl.zeros([BV], tl.float32)
    for start in range(0, tl.where(counts, V, 0), BV):
        z = tl.load(logits + start + columns, mask=start + columns < stride, other=0.0)
        z = tl.where(start + columns < V, z, float("-inf"))
        higher = tl.maximum(highest, z)
        total = total * exp2((highest - higher) * LOG2_E) + exp2((z - higher) * LOG2_E)
        highest = higher
    top = tl.max(highest, axis=0)
    sums = tl.where(counts, tl.sum(total * exp2((highest - top) * LOG2_E), axis=0), 1.0)
    log_sum = tl.where(counts, top + LN_2 * tl.log2(sums), 0.0)

    loss = log_sum - tl.where(known, chosen, float("nan")) + z_loss * log_sum * log_sum
    tl.store(losses + row, tl.where(counts, loss, 0.0))

    if errors is not None:
        errors += row * stride
        factor = 1.0 + 2.0 * z_loss * log_sum
        for start in range(0, V, BV):
            z = tl.load(logits + start + columns, mask=start + columns < stride, other=0.0)
            error = factor * exp2((z - log_sum) * LOG2_E) - tl.where(start + columns == place, 1.0, 0.0)
            error = tl.where(counts & (start + columns < V), error, 0.0)
            tl.store(errors + start + columns, error.to(errors.dtype.element_ty), mask=start + columns < stride)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, z_loss: float) -> Tensor:
    """x [N, dim], weight [vocab, dim], which is rounded to x's dtype, targets [N] → float32."""
    wanted = [torch.is_grad_enabled() and z.requires_grad for z in (x, weight)]
    if torch.compiler.is_compiling() or traced(x):
        return cross_entropy_forward(x, weight, targets, ignore_index, z_loss, *wanted)[0]
    if any(wanted):
        loss: Tensor = _CrossEntropy.apply(x, weight, targets, ignore_index, z_loss)
        return loss
    return _forward(x, weight, targets, ignore_index, z_loss, False, False)[0]


def rows_of_a_chunk(N: int, vocab: int) -> int:
    """Chunks are of one size, but for the last."""
    chunks = triton.cdiv(N, max(FEWEST_ROWS, CHUNK_BYTES // (4 * vocab)))
    return triton.cdiv(N, chunks)


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b, summed in float32, in the dtype of `out`."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in float32."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), out=total)


def _padded(rows: int, width: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, width], the rows at multiples of ALIGNED, of which the kernel also takes what is behind them."""
    return like.new_empty((rows, triton.cdiv(width, ALIGNED) * ALIGNED), dtype=dtype)[:, :width]


def _forward(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, z_loss: float, for_x: bool, for_weight: bool
) -> list[Tensor]:
    """The loss, and its gradients of x and weight, in their dtypes, or empty ones."""
    N, V = x.shape[0], weight.shape[0]
    results = _results(x, weight, for_x, for_weight)
    d_x = results[1]
    d_weight = results[2] if weight.dtype == torch.float32 else x.new_empty(results[2].shape, dtype=torch.float32)
    targets, operand = targets.contiguous(), weight.to(x.dtype)
    rows = rows_of_a_chunk(N, V)
    losses = x.new_empty(N, dtype=torch.float32)
    buffer = _padded(rows, V, x, torch.float32)
    errors = buffer  # float32 ones are written over the logits
    if x.dtype != torch.float32 and (for_x or for_weight):
        errors = _padded(rows, V, x, x.dtype)
    BV = min(BLOCK, max(PER_WARP, triton.next_power_of_2(V)))
    constants = {"BV": BV, "num_warps": BV // PER_WARP}
    # Autocast would round again what was rounded for it.
    with torch.autocast(x.device.type, enabled=False), torch.cuda.device_of(x):
        for first in range(0, N, rows):
            part = slice(first, min(first + rows, N))
            size = part.stop - first
            logits = _multiply(x[part], operand.T, buffer[:size])
            dz = errors[:size] if for_x or for_weight else None
            tensors = (logits, targets[part], losses[part], dz)
            arguments = (*tensors, buffer.stride(0), ignore_index, z_loss, V)
            key = (x.device, BV, types(*tensors), numbers(buffer.stride(0), ignore_index, V))
            launcher("cross_entropy", *key)(cross_entropy_kernel, (size,), arguments, constants)
            if dz is None:
                continue
            if for_x:
                _multiply(dz, operand, d_x[part])
            if for_weight and first == 0:
                _multiply(dz.T, x[part], d_weight)
            elif for_weight:
                _add_product(d_weight, dz.T, x[part])
    if for_weight and d_weight is not results[2]:
        results[2].copy_(d_weight)
    results[0].copy_(losses.sum())
    return results


def _results(x: Tensor, weight: Tensor, for_x: bool, for_weight: bool) -> list[Tensor]:
    gradients = (z.new_empty(z.shape if wanted else 0) for z, wanted in ((x, for_x), (weight, for_weight)))
    return [x.new_empty((), dtype=torch.float32), *gradients]


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    """In float32, for the factor too."""
    return (gradient.float() * factor).to(gradient.dtype)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, z_loss: float) -> Tensor:
        wanted = ctx.needs_input_grad[:2]
        loss, *gradients = _forward(x, weight, targets, ignore_index, z_loss, *wanted)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, ctx.saved_tensors, factor), None, None, None


def _gradients(ctx: Any, saved: Sequence[Tensor], factor: Tensor) -> list[Tensor | None]:
    pairs = zip(saved, ctx.needs_input_grad[:2], strict=True)
    return [_times(gradient, factor) if wanted else None for gradient, wanted in pairs]


cross_entropy_forward = torch.library.custom_op("kda_lm::cross_entropy_forward", _forward, mutates_args=())


@cross_entropy_forward.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, z_loss: float, for_x: bool, for_weight: bool
) -> list[Tensor]:
    return _results(x, weight, for_x, for_weight)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    for tensor, wanted in zip(inputs[:2], inputs[5:], strict=True):
        if tensor.requires_grad and not wanted:
            raise RuntimeError(
                "kda_lm::cross_entropy_forward: got an input that requires a gradient, and no wish for it"
            )
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _operator_backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, ctx.saved_tensors, grads[0]), *[None] * 5


cross_entropy_forward.register_autograd(_operator_backward, setup_context=_setup_context)
