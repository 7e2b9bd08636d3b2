# mypy: disable-error-code="no-untyped-def"
"""Softmax attention, forward, for Hopper, in Gluon: the o and log-sum-exp of forward.py, where every query sees all
earlier keys of its row and itself, T = S, in bfloat16, heads of 64 or 128 channels.

A program has a multiprocessor to itself and takes tile after tile, long ones first. A tile is BM queries of one head,
64 for each consumer, a group of four warps. One more warp, the producer, has the TMA unit copy queries and blocks of
BN keys and values into shared memory, up to STAGES blocks ahead and on into the next tile. They meet at barriers in
shared memory alone, so consumers drift apart, and the exponentials of one run under the products of another. In each
the next block's Q Kᵀ and the last one's P V are under way together.

Rows after a sequence's last are zero when copied in, and left out when copied out.
"""

from typing import Any

import triton
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
from kernels.gpu.attention.tiles import NEAR_BYTES, HopperBlocks
from kernels.gpu.launch import Launcher
from kernels.gpu.limits import multiprocessors

FLOOR = gl.constexpr(-1e30)  # as in blocks.py
# Barriers: two of the queries, then those of each stage.
Q_FULL, Q_EMPTY = gl.constexpr(0), gl.constexpr(1)
K_FULL, K_EMPTY, V_FULL, V_EMPTY = (gl.constexpr(i) for i in range(4))


@gluon.jit
def tile_place(tile, blocks, heads, near):
    """Block of queries and head, of all rows' heads; `near` as in blocks.locate."""
    group = tile // (blocks * near)
    inside = tile - group * (blocks * near)
    width = gl.minimum(near, heads - group * near)
    return blocks - 1 - inside // width, group * near + inside % width


@gluon.jit
def key_blocks(end, T, BN: gl.constexpr):
    """How many there are before position `end`, or T."""
    return (gl.minimum(end, T) + BN - 1) // BN


@gluon.jit
def produce(
    descriptors, smem, barriers, sizes, HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy in what the consumers read, in their order: of each tile the queries, then keys and values from the last."""
    q_desc, k_desc, v_desc = descriptors
    q_smem, k_smem, v_smem = smem
    T, blocks, heads, near = sizes
    stage = 0
    phase = 1  # of empty barriers: nothing has to be read before the first copies
    q_phase = 1
    for tile in range(gl.program_id(0), blocks * heads, gl.num_programs(0)):
        block, head = tile_place(tile, blocks, heads, near)
        batch = head // HQ
        query_head = head % HQ
        key_head = query_head // (HQ // HKV)
        mbarrier.wait(barriers.index(Q_EMPTY), q_phase)
        mbarrier.expect(barriers.index(Q_FULL), BM * D * 2)
        for group in gl.static_range(BM // GROUP_ROWS):
            start = block * BM + group * GROUP_ROWS
            copy_in(q_desc, [batch, start, query_head, 0], barriers.index(Q_FULL), q_smem.index(group))
        q_phase ^= 1
        n = key_blocks((block + 1) * BM, T, BN)
        for i in range(n):
            at = (n - 1 - i) * BN
            mbarrier.wait(of_stage(barriers, K_EMPTY, stage, STAGES), phase)
            full = of_stage(barriers, K_FULL, stage, STAGES)
            mbarrier.expect(full, BN * D * 2)
            copy_in(k_desc, [batch, at, key_head, 0], full, k_smem.index(stage))
            mbarrier.wait(of_stage(barriers, V_EMPTY, stage, STAGES), phase)
            full = of_stage(barriers, V_FULL, stage, STAGES)
            mbarrier.expect(full, BN * D * 2)
            copy_in(v_desc, [batch, at, key_head, 0], full, v_smem.index(stage))
            stage, phase = following(stage, phase, STAGES)


@gluon.jit
def weigh(s, peak, total, scale):
    """P = 2^(s − peak) with the new peaks and sums, and what the sums before have faded by."""
    highest = gl.maximum(peak, gl.max(s, 1) * scale)
    p = exp2(s * scale - highest[:, None])
    faded = exp2(peak - highest)
    return p, highest, total * faded + gl.sum(p, 1), faded


@gluon.jit
def consume(
    o_desc, lse, smem, o_smem, barriers, scale, sizes, GROUP: gl.constexpr, HQ: gl.constexpr, D: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The GROUP-th 64 queries of each tile."""
    q_smem, k_smem, v_smem = smem
    T, blocks, heads, near = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    q_tile = q_smem.index(GROUP).reshape([GROUP_ROWS, D])
    o_tile = o_smem.index(GROUP)
    nothing = gl.zeros([GROUP_ROWS, BN], gl.float32, s_layout)
    r = gl.arange(0, GROUP_ROWS, s_rows)
    key = gl.arange(0, BN, gl.SliceLayout(0, s_layout))
    stage = 0
    phase = 0
    q_phase = 0
    for tile in range(gl.program_id(0), blocks * heads, gl.num_programs(0)):
        block, head = tile_place(tile, blocks, heads, near)
        first = block * BM + GROUP * GROUP_ROWS
        position = first + r
        n = key_blocks(first + GROUP_ROWS, T, BN)
        for _ in range(key_blocks((block + 1) * BM, T, BN) - n):  # only later queries see these
            mbarrier.wait(of_stage(barriers, K_FULL, stage, STAGES), phase)
            mbarrier.arrive(of_stage(barriers, K_EMPTY, stage, STAGES))
            mbarrier.wait(of_stage(barriers, V_FULL, stage, STAGES), phase)
            mbarrier.arrive(of_stage(barriers, V_EMPTY, stage, STAGES))
            stage, phase = following(stage, phase, STAGES)

        # The block of the diagonal, the only one with a mask: blocks of keys begin at multiples of 64.
        mbarrier.wait(barriers.index(Q_FULL), q_phase)
        q_phase ^= 1
        mbarrier.wait(of_stage(barriers, K_FULL, stage, STAGES), phase)
        b_k = k_smem.index(stage).reshape([BN, D]).permute((1, 0))
        s = warpgroup_mma_wait(0, [warpgroup_mma(q_tile, b_k, nothing, use_acc=False, is_async=True)])
        mbarrier.arrive(of_stage(barriers, K_EMPTY, stage, STAGES))
        s = gl.where(position[:, None] >= (n - 1) * BN + key[None, :], s, -float("inf"))
        peak = gl.full([GROUP_ROWS], FLOOR, gl.float32, s_rows)
        total = gl.zeros([GROUP_ROWS], gl.float32, s_rows)
        p, peak, total, faded = weigh(s, peak, total, scale)
        b_p = gl.convert_layout(p.to(gl.bfloat16), p_layout)
        acc = gl.zeros([GROUP_ROWS, D], gl.float32, o_layout)
        mbarrier.wait(of_stage(barriers, V_FULL, stage, STAGES), phase)
        for _ in range(1, n):
            next_stage, next_phase = following(stage, phase, STAGES)
            mbarrier.wait(of_stage(barriers, K_FULL, next_stage, STAGES), next_phase)
            b_k = k_smem.index(next_stage).reshape([BN, D]).permute((1, 0))
            s = warpgroup_mma(q_tile, b_k, nothing, use_acc=False, is_async=True)
            acc = warpgroup_mma(b_p, v_smem.index(stage).reshape([BN, D]), acc, is_async=True)
            s = warpgroup_mma_wait(1, [s])
            mbarrier.arrive(of_stage(barriers, K_EMPTY, next_stage, STAGES))
            p, peak, total, faded = weigh(s, peak, total, scale)
            # Between the exponentials and the wait for P V, for ptxas orders instructions anew, but not beyond this.
            mbarrier.wait(of_stage(barriers, V_FULL, next_stage, STAGES), next_phase)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(of_stage(barriers, V_EMPTY, stage, STAGES))
            acc = acc * gl.convert_layout(faded, o_rows)[:, None]
            b_p = gl.convert_layout(p.to(gl.bfloat16), p_layout)
            stage = next_stage
            phase = next_phase
        mbarrier.arrive(barriers.index(Q_EMPTY))
        acc = warpgroup_mma(b_p, v_smem.index(stage).reshape([BN, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(of_stage(barriers, V_EMPTY, stage, STAGES))
        stage, phase = following(stage, phase, STAGES)

        gl.store(lse + head.to(gl.int64) * T + position, peak + gl.log2(total), mask=position < T)
        acc = acc * gl.convert_layout(1.0 / total, o_rows)[:, None]
        tma.store_wait(0)  # the tile before has left
        o_tile.reshape([GROUP_ROWS, D]).store(acc.to(gl.bfloat16))
        fence_async_shared()
        copy_out(o_desc, [head // HQ, first, head % HQ, 0], o_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("scale", "T", "blocks", "heads", "near"))
def attention_hopper_forward_kernel(
    q_desc,  # [B, T, HQ, D], blocks of 64 queries
    k_desc,  # [B, T, HKV, D], blocks of BN keys
    v_desc,
    o_desc,  # [B, T, HQ, D], written
    lse,  # [B, HQ, T], written
    scale,
    T,
    blocks,
    heads,
    near,
    HQ: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    groups: gl.constexpr = BM // GROUP_ROWS
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [groups, 1, GROUP_ROWS, 1, D], q_desc.layout)
    o_smem = gl.allocate_shared_memory(gl.bfloat16, [groups, 1, GROUP_ROWS, 1, D], o_desc.layout)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, BN, 1, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, BN, 1, D], v_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2 + 4 * STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(Q_FULL), 1)
    mbarrier.init(barriers.index(Q_EMPTY), groups)
    for stage in gl.static_range(STAGES):
        mbarrier.init(of_stage(barriers, K_FULL, stage, STAGES), 1)
        mbarrier.init(of_stage(barriers, K_EMPTY, stage, STAGES), groups)
        mbarrier.init(of_stage(barriers, V_FULL, stage, STAGES), 1)
        mbarrier.init(of_stage(barriers, V_EMPTY, stage, STAGES), groups)
    smem = (q_smem, k_smem, v_smem)
    sizes = (T, blocks, heads, near)
    # Each group has code of its own: its number is a constant.
    if groups == 2:
        gl.warp_specialize(
            [
                (consume, (o_desc, lse, smem, o_smem, barriers, scale, sizes, 0, HQ, D, BM, BN, STAGES)),
                (consume, (o_desc, lse, smem, o_smem, barriers, scale, sizes, 1, HQ, D, BM, BN, STAGES)),
                (produce, ((q_desc, k_desc, v_desc), smem, barriers, sizes, HQ, HKV, D, BM, BN, STAGES)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(groups == 4)
        gl.warp_specialize(
            [
                (consume, (o_desc, lse, smem, o_smem, barriers, scale, sizes, 0, HQ, D, BM, BN, STAGES)),
                (consume, (o_desc, lse, smem, o_smem, barriers, scale, sizes, 1, HQ, D, BM, BN, STAGES)),
                (consume, (o_desc, lse, smem, o_smem, barriers, scale, sizes, 2, HQ, D, BM, BN, STAGES)),
                (consume, (o_desc, lse, smem, o_smem, barriers, scale, sizes, 3, HQ, D, BM, BN, STAGES)),
                (produce, ((q_desc, k_desc, v_desc), smem, barriers, sizes, HQ, HKV, D, BM, BN, STAGES)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )


def launch(
    start: Launcher, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, chosen: HopperBlocks
) -> None:
    """Write o and lse; `scale` comes times log2(e)."""
    q, k, v = readable(q), readable(k), readable(v)
    B, T, HQ, D = q.shape
    HKV = k.shape[2]
    blocks, heads = triton.cdiv(T, chosen.queries), B * HQ
    near = min(heads, HQ // HKV * max(1, NEAR_BYTES // (2 * D * q.itemsize * T)))
    queries: int = GROUP_ROWS.value
    descriptors = described(q, queries), described(k, chosen.keys), described(v, chosen.keys), described(o, queries)
    constants: dict[str, Any] = {"HQ": HQ, "HKV": HKV, "D": D, "BM": chosen.queries, "BN": chosen.keys}
    constants |= {"STAGES": chosen.stages, "REGISTERS": chosen.registers, "num_warps": 4}
    programs = min(multiprocessors(q.device), blocks * heads)
    start(attention_hopper_forward_kernel, (programs,), (*descriptors, lse, scale, T, blocks, heads, near), constants)
