# mypy: disable-error-code="no-untyped-def"
"""Softmax attention of new tokens over a cache of keys and values, for decoding.

A program takes a part of a sequence's cache and the rows that read the same key head, heads of the group times new
tokens, as one tile: every key and value is read once, 4 D bytes a position and key head in bf16, which is what a step
takes. Each part leaves m, l and the unnormalised o in float32; a second, small kernel combines them:

    m = max_p m_p        l = Σ_p 2^(m_p − m) l_p        o = Σ_p 2^(m_p − m) o_p / l

How many positions a part has follows from the cache's size and the window alone, not from the lengths, so that a CUDA
graph may replay a step at other ones, nor from the batch: a row has the same bits in any.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention.blocks import FLOOR, exp2
from kernels.gpu.attention.forward import attend
from kernels.gpu.attention.operators import FLOAT16_SHIFT, LOG2_E, products, promoted, stride_types, strided
from kernels.gpu.attention.tiles import DECODE_KEYS, DECODE_ROWS, MAX_SPLITS, SPLIT_KEYS
from kernels.gpu.launch import launcher, traced, types
from kernels.gpu.limits import padded


@triton.jit(do_not_specialize=("scale", "T", "S", "window", "splits", "size"))
def attention_decode_kernel(
    q,  # [B, T, HQ, D]
    k,  # [B, S, HKV, D]
    v,
    lengths,  # [B]
    o,  # [B, T, HQ, D], written if nothing is split; else what follows
    parts,  # [B·T·HQ, splits, D] float32: unnormalised o
    peaks,  # [B·T·HQ, splits]
    totals,
    q_b,  # strides
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    scale,
    T,
    S,
    window,
    splits,
    size,  # positions of a part
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    NEGATIVE: tl.constexpr,
    SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    GROUP: tl.constexpr = HQ // HKV
    split = tl.program_id(0) % splits
    key_head = tl.program_id(0) // splits % HKV
    tiles = tl.cdiv(T * GROUP, BM)
    tile = tl.program_id(0) // (splits * HKV) % tiles
    batch = (tl.program_id(0) // (splits * HKV * tiles)).to(tl.int64)

    length = tl.minimum(tl.load(lengths + batch).to(tl.int32), S)
    low = length * 0
    if WINDOW:
        low = tl.maximum(length - T - window + 1, 0)
    begin = low + split * size
    end = tl.minimum(begin + size, length)

    row = tile * BM + tl.arange(0, BM)  # tokens of the tile, the heads of the group inside
    token = row // GROUP
    head = key_head * GROUP + row % GROUP
    there = token < T
    position = tl.where(there, length - T + token, -1)  # −1 sees nothing
    c = tl.arange(0, DP)
    mask = there[:, None] & (c < D)[None, :]
    at_q = token.to(tl.int64) * q_t + head.to(tl.int64) * q_h
    b_q = tl.load(q + batch * q_b + at_q[:, None] + c[None, :], mask=mask, other=0.0)
    key_at = key_head.to(tl.int64)
    acc = tl.zeros((BM, DP), tl.float32)
    peak = tl.full((BM,), FLOOR, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc, peak, total = attend(
        acc, peak, total, b_q, k + batch * k_b + key_at * k_h, v + batch * v_b + key_at * v_h, k_t, v_t, begin, end,
        position, end, scale, window, D, DP, BN, WINDOW, NEGATIVE, SHIFT, PRECISION, True, STAGES,
    )  # fmt: skip

    at = (batch * T + token) * HQ + head
    if SPLIT:
        slot = at * splits + split
        tl.store(peaks + slot, peak, mask=there)
        tl.store(totals + slot, total, mask=there)
        tl.store(parts + slot[:, None] * D + c[None, :], acc, mask=mask & (total > 0.0)[:, None])
    else:
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(o + at[:, None] * D + c[None, :], acc.to(o.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("splits",))
def attention_combine_kernel(
    parts,  # as in attention_decode_kernel
    peaks,
    totals,
    o,  # [B, T, HQ, D], written
    splits,
    D: tl.constexpr,
    DP: tl.constexpr,
    SP: tl.constexpr,
):
    """One row of o."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SP)
    c = tl.arange(0, DP)
    total = tl.load(totals + row * splits + s, mask=s < splits, other=0.0)
    some = total > 0.0
    peak = tl.load(peaks + row * splits + s, mask=some, other=FLOOR)
    weight = tl.where(some, exp2(peak - tl.max(peak, 0)), 0.0)
    x = tl.load(parts + (row * splits + s)[:, None] * D + c[None, :], mask=some[:, None] & (c < D)[None, :], other=0.0)
    total = tl.sum(weight * total, 0)
    x = tl.sum(weight[:, None] * x, 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(o + row * D + c, x.to(o.dtype.element_ty), mask=c < D)


def part_of(positions: int) -> int:
    """How many of so many positions a part has."""
    return max(SPLIT_KEYS, triton.cdiv(triton.cdiv(positions, MAX_SPLITS), DECODE_KEYS) * DECODE_KEYS)


def launch(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, window: int | None, size: int | None = None
) -> Tensor:
    """`decode` of three tensors of one dtype; the `size` of a part is chosen unless given."""
    (B, T, HQ, D), (S, HKV) = q.shape, k.shape[1:3]
    (q, k, v), strides = strided(q, k, v)
    lengths = lengths.contiguous()
    rows = T * (HQ // HKV)
    BM = min(DECODE_ROWS, max(16, triton.next_power_of_2(rows)))
    programs = B * HKV * triton.cdiv(rows, BM)
    window = None if window is None or window >= S else window
    seen = S if window is None else min(S, window + T - 1)
    size = size or part_of(seen)
    splits = triton.cdiv(seen, size)
    wide = padded(D) > 128 or q.dtype == torch.float32
    sizes = {"D": D, "DP": padded(D)}
    constants = {"HQ": HQ, "HKV": HKV, **sizes, "BM": BM, "BN": 32 if wide else DECODE_KEYS, "SPLIT": splits > 1}
    constants |= {"WINDOW": window is not None, "NEGATIVE": scale < 0} | products(q.dtype)
    constants |= {"SHIFT": FLOAT16_SHIFT if q.dtype == torch.float16 else 0.0, "STAGES": 1 if wide else 2}
    constants |= {"num_warps": 4, "num_stages": 1}

    o = q.new_empty(q.shape)
    many = B * T * HQ if splits > 1 else 0
    parts = q.new_empty((many, splits, D), dtype=torch.float32)
    peaks, totals = (q.new_empty((many, splits), dtype=torch.float32) for _ in range(2))
    start = launcher("decode", q.device, *constants.values(), types(q, k, v, lengths), stride_types(strides))
    with torch.cuda.device_of(q):  # where Triton launches
        arguments = (
            q,
            k,
            v,
            lengths,
            o,
            parts,
            peaks,
            totals,
            *strides,
            abs(scale) * LOG2_E,
            T,
            S,
            window or 0,
            splits,
            size,
        )
        start(attention_decode_kernel, (programs * splits,), arguments, constants)
        if splits > 1:
            combine = sizes | {"SP": triton.next_power_of_2(splits), "num_warps": 4}
            start = launcher("combine", q.device, *combine.values(), types(o))
            start(attention_combine_kernel, (many,), (parts, peaks, totals, o, splits), combine)
    return o


@torch.library.custom_op("kda_lm::attention_decode", mutates_args=())
def attention_decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, window: int | None) -> Tensor:
    return launch(q, k, v, lengths, scale, window)


@attention_decode.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape)


def decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, window: int | None) -> Tensor:
    """o [B, T, HQ, D] in v's dtype; arguments as in `kernels.softmax_decode`, `lengths` on the device."""
    dtype = v.dtype
    q, k, v = promoted(q, k, v)
    operator = torch.compiler.is_compiling() or traced(q)
    return (attention_decode if operator else launch)(q, k, v, lengths, scale, window).to(dtype)
