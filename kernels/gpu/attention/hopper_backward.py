# mypy: disable-error-code="no-untyped-def"
"""Softmax attention, backward, for Hopper, in Gluon: the gradients of backward.py, of calls that hopper_forward.py
serves, in heads of 128 channels, T a multiple of 64.

backward.py has 7 products, for dS is computed twice; here it is stored, and there are 5:

    delta   δ_i = Σ o_i·dO_i
    d_kv    a block of keys, over the queries of all heads of its group    dK = scale · dSᵀ Q,  dV = Pᵀ dO,  and dS
    d_q     a block of queries, over their keys                            dQ = scale · dS K

dS lies in memory as the triangle of its tiles [64 keys, 64 queries], those of a block of queries side by side: 17 MB a
head at T = 4096 in bfloat16. So some heads take their turn, as many as KEPT_BYTES hold, or one. No program adds to
another's memory: the same inputs give the same bits.

Programs and barriers are as in hopper_forward.py, with two consumers. A program takes its blocks in pairs, a long one
and a short one, which are all as long.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gpu.attention.hopper import (
    GROUP_ROWS,
    PRODUCER_REGISTERS,
    copy_in,
    copy_out,
    described,
    exp2,
    following,
    of_stage,
    readable,
)
from kernels.gpu.attention.tiles import NEAR_BYTES
from kernels.gpu.launch import Launcher
from kernels.gpu.limits import multiprocessors

TILE = GROUP_ROWS  # keys of a consumer, and queries at a time
BLOCK = gl.constexpr(128)  # two consumers'
CONSUMER_REGISTERS = gl.constexpr(240)
QUERY_STAGES, SCORE_STAGES = 2, 4  # of d_kv and of d_q
KEPT_BYTES = 640 * 2**20  # of dS
MOST_KEPT_BYTES = 1152 * 2**20  # of one key head: up to T = 32768 where it has one query head


def tiles_of(T: int) -> int:
    """Of a head's triangle."""
    return (T // TILE.value) * (T // TILE.value + 1) // 2


def heads_at_once(T: int, heads: int, group: int, programs: int) -> int | None:
    """How many of `heads` key heads keep their dS at a time; None where kernels that keep nothing have to do."""
    kept = group * tiles_of(T) * TILE.value**2 * 2
    if T % TILE.value or kept > MOST_KEPT_BYTES:
        return None
    most = min(heads, max(1, KEPT_BYTES // kept))
    pairs = triton.cdiv(triton.cdiv(T, BLOCK.value), 2)

    def rounds(at_once: int) -> int:
        """That the programs take in all: fewest where they divide a turn's pairs evenly."""
        whole, rest = divmod(heads, at_once)
        return whole * triton.cdiv(pairs * at_once, programs) + triton.cdiv(pairs * rest, programs)

    return min(range(most, 0, -1), key=lambda at_once: (rounds(at_once), triton.cdiv(heads, at_once)))


@triton.jit(do_not_specialize=("T",))
def attention_delta_kernel(
    o,  # [B, T, HQ, D]
    d_o,
    delta,  # [B, HQ, T], written
    d_b,  # strides
    d_t,
    d_h,
    T,
    HQ: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // HQ, row % HQ
    r = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    c = tl.arange(0, D)[None, :]
    seen = r < T
    b_o = tl.load(o + ((batch * T + r) * HQ + head)[:, None] * D + c, mask=seen[:, None], other=0.0)
    b_do = tl.load(d_o + (batch * d_b + r * d_t + head * d_h)[:, None] + c, mask=seen[:, None], other=0.0)
    tl.store(delta + row * T + r, tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1), mask=seen)


@gluon.jit
def pair_place(item, pairs, heads, near):
    """Which pair of blocks, and of which head; `near` as in blocks.locate."""
    group = item // (pairs * near)
    inside = item - group * (pairs * near)
    width = gl.minimum(near, heads - group * near)
    return inside // width, group * near + inside % width


@gluon.jit
def pair_blocks(pair, blocks):
    """2, but 1 of the middle block of an odd number."""
    return gl.where(2 * pair + 1 == blocks, 1, 2)


@gluon.jit
def block_of_pair(pair, half, blocks):
    return gl.where(half == 0, pair, blocks - 1 - pair)


@gluon.jit
def triangle(block):
    """Tiles of all blocks of queries before this one."""
    return block * (block + 1) // 2


# Barriers of d_kv: two of the keys and values, then those of each stage.
KV_FULL, KV_EMPTY = gl.constexpr(0), gl.constexpr(1)
Q_FULL, DO_FULL, BOTH_EMPTY = (gl.constexpr(i) for i in range(3))


@gluon.jit
def produce_queries(
    descriptors, ring, kv_smem, barriers, sizes, HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy in what d_kv reads: of each block the keys and values, then its group's queries, from the diagonal on."""
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc = descriptors
    q_smem, do_smem, lse_smem, delta_smem = ring
    k_smem, v_smem = kv_smem
    T, blocks, heads, near, before = sizes
    G: gl.constexpr = HQ // HKV
    stage = 0
    phase = 1  # of empty barriers: nothing has to be read before the first copies
    kv_phase = 1
    pairs = (blocks + 1) // 2
    for item in range(gl.program_id(0), pairs * heads, gl.num_programs(0)):
        pair, head = pair_place(item, pairs, heads, near)
        batch = (before + head) // HKV
        key_head = (before + head) % HKV
        for half in range(pair_blocks(pair, blocks)):
            start = block_of_pair(pair, half, blocks) * BLOCK
            mbarrier.wait(barriers.index(KV_EMPTY), kv_phase)
            mbarrier.expect(barriers.index(KV_FULL), 2 * BLOCK * D * 2)
            for group in gl.static_range(BLOCK // TILE):
                at = start + group * TILE
                copy_in(k_desc, [batch, at, key_head, 0], barriers.index(KV_FULL), k_smem.index(group))
                copy_in(v_desc, [batch, at, key_head, 0], barriers.index(KV_FULL), v_smem.index(group))
            kv_phase ^= 1
            for member in range(G):
                query_head = key_head * G + member
                row = (batch * HQ + query_head) * T
                for at in range(start, T, TILE):
                    mbarrier.wait(of_stage(barriers, BOTH_EMPTY, stage, STAGES), phase)
                    full = of_stage(barriers, Q_FULL, stage, STAGES)
                    mbarrier.expect(full, TILE * (2 * D + 4))
                    copy_in(q_desc, [batch, at, query_head, 0], full, q_smem.index(stage))
                    copy_in(lse_desc, [row + at], full, lse_smem.index(stage))
                    full = of_stage(barriers, DO_FULL, stage, STAGES)
                    mbarrier.expect(full, TILE * (2 * D + 4))
                    copy_in(do_desc, [batch, at, query_head, 0], full, do_smem.index(stage))
                    copy_in(delta_desc, [row + at], full, delta_smem.index(stage))
                    stage, phase = following(stage, phase, STAGES)


@gluon.jit
def add_queries(
    d_k, d_v, b_k, b_v, ring, d_s_desc, d_s_tile, at, barriers, stage, phase, scale, D: gl.constexpr,
    STAGES: gl.constexpr, DIAGONAL: gl.constexpr,
):  # fmt: skip
    """Add to dK and dV what a tile of queries gives, and store their dS."""
    q_smem, do_smem, lse_smem, delta_smem = ring
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    nothing = gl.zeros([TILE, TILE], gl.float32, s_layout)
    b_q = q_smem.index(stage).reshape([TILE, D])
    b_do = do_smem.index(stage).reshape([TILE, D])
    mbarrier.wait(of_stage(barriers, Q_FULL, stage, STAGES), phase)
    s = warpgroup_mma(b_k, b_q.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(of_stage(barriers, DO_FULL, stage, STAGES), phase)
    d_p = warpgroup_mma(b_v, b_do.permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    p = exp2(s * scale - lse_smem.index(stage).load(columns)[None, :])
    if DIAGONAL:
        query = gl.arange(0, TILE, columns)[None, :]
        p = gl.where(query >= gl.arange(0, TILE, gl.SliceLayout(1, s_layout))[:, None], p, 0.0)
    b_p = p.to(gl.bfloat16)
    # ptxas orders instructions anew, but not beyond a wait.
    mbarrier.wait(of_stage(barriers, DO_FULL, stage, STAGES), phase)
    d_p = warpgroup_mma_wait(0, [d_p])
    d_v = warpgroup_mma(gl.convert_layout(b_p, p_layout), b_do, d_v, is_async=True)
    # P as rounded for its product: fewer registers.
    d_s = (b_p.to(gl.float32) * (d_p - delta_smem.index(stage).load(columns)[None, :])).to(gl.bfloat16)
    d_k = warpgroup_mma(gl.convert_layout(d_s, p_layout), b_q, d_k, is_async=True)
    tma.store_wait(0)  # the tile before has left
    d_s_tile.store(d_s)
    fence_async_shared()
    copy_out(d_s_desc, [at, 0], d_s_tile)
    d_v, d_k = warpgroup_mma_wait(0, [d_v, d_k])
    mbarrier.arrive(of_stage(barriers, BOTH_EMPTY, stage, STAGES))
    return d_k, d_v


@gluon.jit
def consume_queries(
    descriptors, ring, kv_smem, out_smem, barriers, scale, factor, sizes, GROUP: gl.constexpr, HQ: gl.constexpr,
    HKV: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dK, dV and dS of the GROUP-th 64 keys of each block, all transposed, so that they are left operands at once."""
    d_k_desc, d_v_desc, d_s_desc = descriptors
    k_smem, v_smem = kv_smem
    d_k_smem, d_v_smem, d_s_smem = out_smem
    T, blocks, heads, near, before = sizes
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    G: gl.constexpr = HQ // HKV
    b_k = k_smem.index(GROUP).reshape([TILE, D])
    b_v = v_smem.index(GROUP).reshape([TILE, D])
    d_s_tile = d_s_smem.index(GROUP)
    stage = 0
    phase = 0
    kv_phase = 0
    tiles = T // TILE
    pairs = (blocks + 1) // 2
    for item in range(gl.program_id(0), pairs * heads, gl.num_programs(0)):
        pair, head = pair_place(item, pairs, heads, near)
        for half in range(pair_blocks(pair, blocks)):
            block = block_of_pair(pair, half, blocks)
            first = block * (BLOCK // TILE) + GROUP  # this group's tile of keys
            d_k = gl.zeros([TILE, D], gl.float32, d_layout)
            d_v = gl.zeros([TILE, D], gl.float32, d_layout)
            mbarrier.wait(barriers.index(KV_FULL), kv_phase)
            kv_phase ^= 1
            for member in range(G):
                kept = (head * G + member) * triangle(tiles) + first
                for _ in range(gl.minimum(GROUP, tiles - block * (BLOCK // TILE))):  # queries before these keys
                    mbarrier.wait(of_stage(barriers, Q_FULL, stage, STAGES), phase)
                    mbarrier.wait(of_stage(barriers, DO_FULL, stage, STAGES), phase)
                    mbarrier.arrive(of_stage(barriers, BOTH_EMPTY, stage, STAGES))
                    stage, phase = following(stage, phase, STAGES)
                if first < tiles:
                    at = (kept + triangle(first)) * TILE
                    d_k, d_v = add_queries(
                        d_k, d_v, b_k, b_v, ring, d_s_desc, d_s_tile, at, barriers, stage, phase, scale, D, STAGES,
                        DIAGONAL=True,
                    )  # fmt: skip
                    stage, phase = following(stage, phase, STAGES)
                for tile in range(first + 1, tiles):
                    at = (kept + triangle(tile)) * TILE
                    d_k, d_v = add_queries(
                        d_k, d_v, b_k, b_v, ring, d_s_desc, d_s_tile, at, barriers, stage, phase, scale, D, STAGES,
                        DIAGONAL=False,
                    )  # fmt: skip
                    stage, phase = following(stage, phase, STAGES)
            mbarrier.arrive(barriers.index(KV_EMPTY))
            tma.store_wait(0)
            d_k_smem.index(GROUP).reshape([TILE, D]).store((d_k * factor).to(gl.bfloat16))
            d_v_smem.index(GROUP).reshape([TILE, D]).store(d_v.to(gl.bfloat16))
            fence_async_shared()
            place = [(before + head) // HKV, first * TILE, (before + head) % HKV, 0]
            copy_out(d_k_desc, place, d_k_smem.index(GROUP))
            copy_out(d_v_desc, place, d_v_smem.index(GROUP))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("scale", "factor", "T", "blocks", "heads", "near", "before"))
def attention_hopper_d_kv_kernel(
    q_desc,  # [B, T, HQ, D]
    do_desc,
    k_desc,  # [B, T, HKV, D]
    v_desc,
    lse_desc,  # [B·HQ·T]
    delta_desc,
    d_k_desc,  # [B, T, HKV, D], written
    d_v_desc,
    d_s_desc,  # [query heads · tiles · 64, 64], written
    scale,
    factor,  # scale without log2(e)
    T,
    blocks,
    heads,  # key heads of this turn
    near,
    before,  # key heads of turns before
    HQ: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    groups: gl.constexpr = BLOCK // TILE
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [groups, 1, TILE, 1, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [groups, 1, TILE, 1, D], v_desc.layout)
    d_k_smem = gl.allocate_shared_memory(gl.bfloat16, [groups, 1, TILE, 1, D], d_k_desc.layout)
    d_v_smem = gl.allocate_shared_memory(gl.bfloat16, [groups, 1, TILE, 1, D], d_v_desc.layout)
    d_s_smem = gl.allocate_shared_memory(gl.bfloat16, [groups, TILE, TILE], d_s_desc.layout)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, TILE, 1, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, TILE, 1, D], do_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], delta_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2 + 3 * STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(KV_FULL), 1)
    mbarrier.init(barriers.index(KV_EMPTY), groups)
    for stage in gl.static_range(STAGES):
        mbarrier.init(of_stage(barriers, Q_FULL, stage, STAGES), 1)
        mbarrier.init(of_stage(barriers, DO_FULL, stage, STAGES), 1)
        mbarrier.init(of_stage(barriers, BOTH_EMPTY, stage, STAGES), groups)
    read = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    written = (d_k_desc, d_v_desc, d_s_desc)
    ring = (q_smem, do_smem, lse_smem, delta_smem)
    kv = (k_smem, v_smem)
    out = (d_k_smem, d_v_smem, d_s_smem)
    sizes = (T, blocks, heads, near, before)
    # Each group has code of its own: its number is a constant.
    gl.warp_specialize(
        [
            (consume_queries, (written, ring, kv, out, barriers, scale, factor, sizes, 0, HQ, HKV, D, STAGES)),
            (consume_queries, (written, ring, kv, out, barriers, scale, factor, sizes, 1, HQ, HKV, D, STAGES)),
            (produce_queries, (read, ring, kv, barriers, sizes, HQ, HKV, D, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def produce_scores(
    descriptors, smem, barriers, sizes, HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):
    """Copy in what d_q reads: for each block of queries tile after tile of keys, and of dS."""
    k_desc, d_s_desc = descriptors
    k_smem, d_s_smem = smem
    T, blocks, heads, near, before = sizes
    groups: gl.constexpr = BLOCK // TILE
    stage = 0
    phase = 1
    tiles = T // TILE
    pairs = (blocks + 1) // 2
    for item in range(gl.program_id(0), pairs * heads, gl.num_programs(0)):
        pair, head = pair_place(item, pairs, heads, near)
        batch = (before + head) // HQ
        key_head = (before + head) % HQ // (HQ // HKV)
        for half in range(pair_blocks(pair, blocks)):
            first = block_of_pair(pair, half, blocks) * groups
            for tile in range(gl.minimum(first + groups, tiles)):
                mbarrier.wait(barriers.index(STAGES + stage), phase)
                full = barriers.index(stage)
                mbarrier.expect(full, TILE * D * 2 + groups * TILE * TILE * 2)
                copy_in(k_desc, [batch, tile * TILE, key_head, 0], full, k_smem.index(stage))
                for group in gl.static_range(groups):
                    kept = head * triangle(tiles) + triangle(first + group) + tile
                    copy_in(d_s_desc, [kept * TILE, 0], full, d_s_smem.index(stage * groups + group))
                stage, phase = following(stage, phase, STAGES)


@gluon.jit
def consume_scores(
    d_q_desc, smem, d_q_smem, barriers, factor, sizes, GROUP: gl.constexpr, HQ: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """dQ of the GROUP-th 64 queries of each block."""
    k_smem, d_s_smem = smem
    T, blocks, heads, near, before = sizes
    groups: gl.constexpr = BLOCK // TILE
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    stage = 0
    phase = 0
    tiles = T // TILE
    pairs = (blocks + 1) // 2
    for item in range(gl.program_id(0), pairs * heads, gl.num_programs(0)):
        pair, head = pair_place(item, pairs, heads, near)
        for half in range(pair_blocks(pair, blocks)):
            first = block_of_pair(pair, half, blocks) * groups
            copied = gl.minimum(first + groups, tiles)
            own = gl.minimum(first + GROUP + 1, copied)
            d_q = gl.zeros([TILE, D], gl.float32, d_layout)
            for _ in range(own):
                mbarrier.wait(barriers.index(stage), phase)
                d_s = d_s_smem.index(stage * groups + GROUP).permute((1, 0))
                d_q = warpgroup_mma(d_s, k_smem.index(stage).reshape([TILE, D]), d_q, is_async=True)
                d_q = warpgroup_mma_wait(0, [d_q])
                mbarrier.arrive(barriers.index(STAGES + stage))
                stage, phase = following(stage, phase, STAGES)
            for _ in range(copied - own):  # only later queries see these
                mbarrier.wait(barriers.index(stage), phase)
                mbarrier.arrive(barriers.index(STAGES + stage))
                stage, phase = following(stage, phase, STAGES)
            tma.store_wait(0)
            d_q_smem.index(GROUP).reshape([TILE, D]).store((d_q * factor).to(gl.bfloat16))
            fence_async_shared()
            place = [(before + head) // HQ, (first + GROUP) * TILE, (before + head) % HQ, 0]
            copy_out(d_q_desc, place, d_q_smem.index(GROUP))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("factor", "T", "blocks", "heads", "near", "before"))
def attention_hopper_d_q_kernel(
    k_desc,  # [B, T, HKV, D]
    d_s_desc,  # [query heads · tiles · 64, 64]
    d_q_desc,  # [B, T, HQ, D], written
    factor,
    T,
    blocks,
    heads,  # query heads of this turn
    near,
    before,  # query heads of turns before
    HQ: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    groups: gl.constexpr = BLOCK // TILE
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, TILE, 1, D], k_desc.layout)
    d_s_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * groups, TILE, TILE], d_s_desc.layout)
    d_q_smem = gl.allocate_shared_memory(gl.bfloat16, [groups, 1, TILE, 1, D], d_q_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())  # full, empty
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), 1)
        mbarrier.init(barriers.index(STAGES + stage), groups)
    smem = (k_smem, d_s_smem)
    sizes = (T, blocks, heads, near, before)
    gl.warp_specialize(
        [
            (consume_scores, (d_q_desc, smem, d_q_smem, barriers, factor, sizes, 0, HQ, D, STAGES)),
            (consume_scores, (d_q_desc, smem, d_q_smem, barriers, factor, sizes, 1, HQ, D, STAGES)),
            (produce_scores, ((k_desc, d_s_desc), smem, barriers, sizes, HQ, HKV, D, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def flat(x: Tensor, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """All numbers of x, TILE at a time."""
    return TensorDescriptor(x, [x.numel()], [1], [TILE.value], layout)


def launch(
    start: Launcher, d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_q: Tensor, d_k: Tensor,
    d_v: Tensor, scale: float, factor: float, at_once: int,
) -> None:  # fmt: skip
    """Write d_q, d_k and d_v, of `at_once` key heads at a time; `scale` is factor times log2(e)."""
    d_o, q, k, v = readable(d_o), readable(q), readable(k), readable(v)
    B, T, HQ, D = q.shape
    HKV = k.shape[2]
    group, tile = HQ // HKV, TILE.value
    delta = torch.empty_like(lse)
    constants: dict[str, Any] = {"HQ": HQ, "D": D, "BM": 32}
    arguments: tuple[Any, ...] = (o, d_o, delta, *d_o.stride()[:3], T)
    start(attention_delta_kernel, (triton.cdiv(T, 32), B * HQ), arguments, constants)

    d_s = q.new_empty((at_once * group * tiles_of(T) * tile, tile))
    square = gl.NVMMASharedLayout.get_default_for([tile, tile], gl.bfloat16)
    line = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    scores = TensorDescriptor(d_s, list(d_s.shape), [tile, 1], [tile, tile], square)
    keys, queries = described(k, tile), described(q, tile)
    rows = queries, described(d_o, tile), keys, described(v, tile), flat(lse, line), flat(delta, line)
    outputs = described(d_k, tile), described(d_v, tile), scores
    blocks = triton.cdiv(T, BLOCK.value)
    pairs = triton.cdiv(blocks, 2)
    programs = multiprocessors(q.device)
    together = max(1, NEAR_BYTES // (2 * D * q.itemsize * T))  # heads whose inputs L2 holds
    constants = {"HQ": HQ, "HKV": HKV, "D": D, "num_warps": 4}
    for before in range(0, B * HKV, at_once):
        heads = min(at_once, B * HKV - before)
        near = min(heads, max(1, together // group))
        arguments = (*rows, *outputs, scale, factor, T, blocks, heads, near, before)
        grid = (min(programs, pairs * heads),)
        start(attention_hopper_d_kv_kernel, grid, arguments, constants | {"STAGES": QUERY_STAGES})
        heads, near = heads * group, min(heads * group, together)
        arguments = (keys, scores, described(d_q, tile), factor, T, blocks, heads, near, before * group)
        grid = (min(programs, pairs * heads),)
        start(attention_hopper_d_q_kernel, grid, arguments, constants | {"STAGES": SCORE_STAGES})
