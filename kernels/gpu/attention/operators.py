"""Softmax attention on a GPU: which kernels run, on which memory.

Products at B×T×H×D = 8×4096×16×128, causal, 2 D FLOPs a pair each, of which there are B H T² / 2:

| kernel  | products                  | TFLOP | ms at 790 TFLOP/s |
|---------|---------------------------|-------|-------------------|
| forward | Q Kᵀ, P V                 | 0.55  | 0.70              |
| d_q     | Q Kᵀ, dO Vᵀ, dS K         | 0.82  | 1.04              |
| d_kv    | K Qᵀ, V dOᵀ, Pᵀ dO, dSᵀ Q | 1.10  | 1.39              |

On Hopper hopper_forward.py does the forward of what it serves, at 620 TFLOP/s there and forward.py at 450, and
hopper_backward.py the backward with 5 products for these 7, in 2.8 ms there and backward.py in 3.6.

`kda_lm::attention_forward` and `kda_lm::attention_backward` are the same as torch operators, opaque to torch.compile.
Outside of a compiler an autograd.Function does: the dispatcher would take longer than the GPU.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.gpu.attention import hopper_backward, hopper_forward
from kernels.gpu.attention.backward import attention_d_kv_kernel, attention_d_q_kernel
from kernels.gpu.attention.forward import attention_forward_kernel
from kernels.gpu.attention.tiles import NEAR_BYTES, Blocks, attention_tiles, generation
from kernels.gpu.launch import launcher, traced, types
from kernels.gpu.limits import multiprocessors, padded

LOG2_E = 1.4426950408889634
# float16 weights times 2¹²: a weight of 2⁻²⁶ is still a normal number, and one of 1 far from 65504.
FLOAT16_SHIFT = 12.0
FARTHEST = 2**22  # elements between rows: a block's offsets are int32


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, window: int | None) -> Tensor:
    """o [B, T, HQ, D] in v's dtype; arguments as in `kernels.softmax_attention`, cu_seqlens on the device."""
    dtype = v.dtype
    q, k, v = promoted(q, k, v)
    if torch.compiler.is_compiling() or traced(q):
        o, _ = attention_forward(q, k, v, cu_seqlens, scale, window)
    elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        o = _Attention.apply(q, k, v, cu_seqlens, scale, window)
    else:
        o, _ = _forward(q, k, v, cu_seqlens, scale, window)
    return o.to(dtype)


def promoted(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if q.dtype == k.dtype == v.dtype:
        return q, k, v
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def strided(*tensors: Tensor) -> tuple[list[Tensor], list[int]]:
    """The tensors [B, T, H, D], copies where the kernels cannot step through one, and their strides but the last."""
    found = [x if x.stride(3) == 1 and x.stride(1) <= FARTHEST else x.contiguous() for x in tensors]
    return found, [step for x in found for step in x.stride()[:3]]


def stride_types(strides: list[int]) -> tuple[bool | int, ...]:
    """What Triton compiles for: ones, multiples of 16, more than 32 bits."""
    return tuple(1 if x == 1 else (x % 16 == 0) + 2 * (x >= 2**31) + 4 for x in strides)


def products(dtype: torch.dtype) -> dict[str, Any]:
    """float32 stays float32: three TF32 products are as exact."""
    return {"PRECISION": "tf32x3" if dtype == torch.float32 else "tf32"}


class Plan:
    """What one call is compiled for and started with: sizes as in the docstrings, N packed sequences."""

    def __init__(
        self,
        B: int,
        T: int,
        S: int,
        HQ: int,
        HKV: int,
        D: int,
        N: int | None,
        dtype: torch.dtype,
        device: torch.device,
        scale: float,
        window: int | None,
    ):
        tiles = attention_tiles(device, dtype, D)
        packed = N is not None
        # A window that no query reaches the end of is none.
        window = None if window is None or window >= S else window
        common = {"HQ": HQ, "HKV": HKV, "D": D, "DP": padded(D), "WINDOW": window is not None, "PACKED": packed}
        common |= products(dtype)
        shift = FLOAT16_SHIFT if dtype == torch.float16 else 0.0
        self.forward = common | {"NEGATIVE": scale < 0, "SHIFT": shift} | self._options(tiles.forward)
        self.d_q = common | self._options(tiles.d_q)
        self.d_kv = common | {"SHIFT": shift, "EVEN": not packed and T % tiles.d_kv.queries == 0}
        self.d_kv |= {"ROUNDED": tiles.d_kv.rounded} | self._options(tiles.d_kv)

        def sizes(block: int, rows: int, heads: int, near_bytes: int, together: int) -> tuple[tuple[int, ...], int]:
            """What a kernel's programs need to find their place, and how many there are."""
            blocks = rows // block + N if N is not None else -(-rows // block)
            near = min(heads, together * max(1, NEAR_BYTES // near_bytes))
            return (T, S, N or 1, window or 0, blocks, near, heads), blocks * heads

        group = HQ // HKV
        read = 2 * D * dtype.itemsize
        self.forward_sizes, self.forward_programs = sizes(tiles.forward.queries, T, B * HQ, read * S, group)
        self.d_q_sizes, self.d_q_programs = sizes(tiles.d_q.queries, T, B * HQ, read * S, group)
        self.d_kv_sizes, self.d_kv_programs = sizes(tiles.d_kv.keys, S, B * HKV, read * T * group, 1)
        self.factor, self.scale = scale, scale * LOG2_E
        whole = not packed and window is None and T == S and scale > 0 and padded(D) == D
        self.hopper = tiles.hopper if whole else None
        self.heads_at_once = None
        if whole and tiles.hopper_backward:
            self.heads_at_once = hopper_backward.heads_at_once(T, B * HKV, group, multiprocessors(device))

    @staticmethod
    def _options(blocks: Blocks) -> dict[str, Any]:
        """Triton's num_stages would pipeline all loops; each asks for its own."""
        options = {"BM": blocks.queries, "BN": blocks.keys, "STAGES": blocks.stages, "EDGE": blocks.edge}
        options |= {"num_warps": blocks.warps, "num_stages": 1}
        return options | ({"maxnreg": blocks.registers} if blocks.registers else {})


@lru_cache(maxsize=1024)
def _plan(generation: int, *arguments: Any) -> Plan:
    return Plan(*arguments)


def plan_for(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, scale: float, window: int | None) -> Plan:
    B, T, HQ, D = q.shape
    N = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _plan(generation(), B, T, k.shape[1], HQ, k.shape[2], D, N, q.dtype, q.device, scale, window)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """o [B, T, HQ, D] and the base-2 log-sum-exp of the scores [B, HQ, T] in float32, of three tensors of one dtype."""
    p = plan_for(q, k, cu_seqlens, scale, window)
    (q, k, v), strides = strided(q, k, v)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    o, lse = _results(q)
    launch = launcher(p, types(q, k, v, cu_seqlens), stride_types(strides))
    with torch.cuda.device_of(q):  # where Triton launches
        if p.hopper is not None:
            hopper_forward.launch(launch, q, k, v, o, lse, p.scale, p.hopper)
        else:
            arguments = (q, k, v, o, lse, cu_seqlens, *strides, abs(p.scale), *p.forward_sizes)
            launch(attention_forward_kernel, (p.forward_programs,), arguments, p.forward)
    return o, lse


def _results(q: Tensor) -> tuple[Tensor, Tensor]:
    B, T, HQ, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, HQ, T), dtype=torch.float32)


def _backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    p = plan_for(q, k, cu_seqlens, scale, window)
    (q, k, v, d_o), strides = strided(q, k, v, d_o)
    o, cu_seqlens = o.contiguous(), None if cu_seqlens is None else cu_seqlens.contiguous()
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in (q, k, v))
    launch = launcher(p, types(q, k, v, o, d_o, lse, cu_seqlens), stride_types(strides), "backward")
    with torch.cuda.device_of(q):  # where Triton launches
        if p.heads_at_once is not None:
            tensors = (d_o, q, k, v, o, lse, d_q, d_k, d_v)
            hopper_backward.launch(launch, *tensors, p.scale, p.factor, p.heads_at_once)
            return d_q, d_k, d_v
        delta = torch.empty_like(lse)
        arguments: tuple[Any, ...] = (q, k, v, o, d_o, lse, delta, d_q, cu_seqlens, *strides, p.scale, p.factor)
        launch(attention_d_q_kernel, (p.d_q_programs,), (*arguments, *p.d_q_sizes), p.d_q)
        arguments = (q, k, v, d_o, lse, delta, d_k, d_v, cu_seqlens, *strides, p.scale, p.factor)
        launch(attention_d_kv_kernel, (p.d_kv_programs,), (*arguments, *p.d_kv_sizes), p.d_kv)
    return d_q, d_k, d_v


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        q, k, v, cu_seqlens, scale, window = arguments
        o, lse = _forward(q, k, v, cu_seqlens, scale, window)
        ctx.save_for_backward(q, k, v, o, lse, cu_seqlens)
        ctx.options = scale, window
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(d_o, *ctx.saved_tensors, *ctx.options), None, None, None


attention_forward = torch.library.custom_op("kda_lm::attention_forward", _forward, mutates_args=())
attention_backward = torch.library.custom_op("kda_lm::attention_backward", _backward, mutates_args=())


@attention_forward.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _results(q)


@attention_backward.register_fake
def _(d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, scale, window = inputs
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, o, lse, cu_seqlens)
    ctx.options = scale, window


def _operator_backward(ctx: Any, d_o: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *attention_backward(d_o, *ctx.saved_tensors, *ctx.options), None, None, None


attention_forward.register_autograd(_operator_backward, setup_context=_setup_context)
