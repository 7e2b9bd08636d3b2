"""What one call of the chunkwise kernels is compiled for and how much memory it takes: sizes, switches, tiles."""

from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from kernels.gpu.limits import padded
from kernels.gpu.recurrence.tiles import Launch, Tiles, generation, tiles_for

# See pairs.py. 2^80 leaves 2^47 for the inputs' own size, and −3.5 a token stays near. The exponents that are moved are
# rounded to 4e-6: nothing beside bfloat16, too much beside float32.
NEAR = {"LIMIT": 160.0, "SHIFT": 80.0}
NEAR_FLOAT32 = {"LIMIT": 64.0, "SHIFT": 0.0}

_TRITON = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


class Plan:
    """Sizes as in `kernels.chunk`; N sequences, `packed` or one a row; chunks of C tokens, NT in a row. Products are of
    float32 operands or of bfloat16 ones, and `exact` or in TF32.

    `prepare`, `pairs`, `scan`, … are the compile-time arguments of the kernels of those names.
    """

    def __init__(
        self,
        B: int,
        T: int,
        H: int,
        K: int,
        HV: int,
        V: int,
        N: int,
        exact: bool,
        float32: bool,
        device: torch.device,
        gated: bool,
        gate: bool,
        bias: bool,
        packed: bool,
        scale: float,
        rule: str,
        decay: str,
        l2norm: bool,
        sigmoid: float,
    ):
        self.B, self.T, self.H, self.K, self.HV, self.V, self.N = B, T, H, K, HV, V, N
        self.device, self.packed = device, packed
        self.delta, self.channel, self.l2norm = rule == "delta", decay == "channel", l2norm
        self.operand = torch.float32 if float32 else torch.bfloat16  # of products
        self.wide = torch.float64 if float32 else torch.float32  # of cumulative gates
        self.launch: Tiles = tiles_for(device, float32, K, V, rule, decay)
        self.C = self.launch.chunk
        self.KP, self.VP = padded(K), padded(V)
        self.NT = -(-T // self.C)
        # Packed sequences take at least this many chunks; how many exactly, only the GPU knows.
        self.chunks = T // self.C + N if packed else B * self.NT
        self.tiles = self.chunks * HV

        # Known while compiling, but for sizes that a compiler has left open.
        full = isinstance(T, int) and T % self.C == 0 and not packed
        common = {"C": self.C, "DELTA": self.delta, "PACKED": packed, "FULL": full, "HV": HV}
        gates = {"GATE": gate, "BIAS": bias}
        precision = "tf32x3" if exact else "tf32"
        products = {"OPERAND": _TRITON[self.operand], "PRECISION": precision}
        keys, values = {"H": H, "K": K, "KP": self.KP}, {"V": V, "VP": self.VP}
        levels = {"LEVELS": self.C.bit_length() - 1} | (NEAR_FLOAT32 if float32 else NEAR)
        kind = {"CHANNEL": self.channel, "GATED": gated}
        norm, strength = {"L2NORM": l2norm}, {"SIGMOID": sigmoid}
        self.sizes = (scale, T, self.NT)
        self.prepare = common | gates | keys | norm | self._options(self.launch.prepare, BK=self.KP)
        self.pairs = common | gates | products | keys | levels | kind | norm | strength
        self.pairs |= {"WIDE": _TRITON[self.wide], "INVERSE": precision if float32 else self.launch.inverse}
        self.pairs |= self._options(self.launch.pairs, BK=self.KP)
        scan = common | products | keys | values | kind | norm
        self.scan = scan | self._options(self.launch.scan, BV=self.VP, stages=True)
        self.reverse_scan = scan | self._options(self.launch.reverse_scan, BV=self.VP, stages=True)
        self.gradients = common | gates | products | keys | values | norm
        self.gradients |= levels if self.channel else {"GATED": gated} | strength
        self.gradients |= self._options(self.launch.gradients, BK=self.KP, BV=self.VP, stages=True)
        # A program of the gradients that has all key channels sums them itself.
        self.dots = l2norm and self.gradients["BK"] < self.KP
        self.pair_gradients = common | products | values | norm | strength | {"DOTS": self.dots}
        self.pair_gradients |= self._options(self.launch.pair_gradients, BV=self.VP)

    @staticmethod
    def _options(
        launch: Launch, *, BK: int | None = None, BV: int | None = None, stages: bool = False
    ) -> dict[str, int]:
        """Blocks of at most BK and BV channels, and Triton's own options. A loop that is to be pipelined asks for
        STAGES itself: Triton's num_stages would pipeline all loops.
        """
        options = {"num_warps": launch.warps, "num_stages": 1}
        if launch.registers:
            options["maxnreg"] = launch.registers
        if BK is not None:
            options["BK"] = min(BK, launch.keys)
        if BV is not None:
            options["BV"] = min(BV, launch.values)
        return options | ({"STAGES": launch.stages} if stages else {})

    @cached_property
    def slices(self) -> dict[str, int]:
        """Programs side by side for one tile, or one head."""
        return {
            "prepare": self.KP // self.prepare["BK"],
            "scan": self.VP // self.scan["BV"],
            "reverse_scan": self.VP // self.reverse_scan["BV"],
            "gradients": self.KP // self.gradients["BK"],
        }

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=self.operand if dtype is None else dtype, device=self.device)

    def floats(self, *shape: int) -> Tensor:
        return self.empty(*shape, dtype=torch.float32)

    def norms(self) -> Tensor:
        return self.floats(self.tiles if self.l2norm else 0, 2, self.C)

    def order(self, cu_seqlens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Of packed sequences: [chunks, 2], a chunk's first token and its number of tokens, zero for an unused one;
        and [N + 1], a sequence's first chunk.
        """
        if cu_seqlens is None:
            return None, None
        bounds = cu_seqlens.long()
        offsets = F.pad((bounds.diff() + self.C - 1).div(self.C, rounding_mode="floor").cumsum(0), (1, 0))
        n = torch.arange(self.chunks, device=self.device)
        sequence = torch.searchsorted(offsets[1:].contiguous(), n, right=True).clamp_(max=self.N - 1)
        first = bounds[sequence] + (n - offsets[sequence]) * self.C
        return torch.stack([first, (bounds[sequence + 1] - first).clamp_(0, self.C)], dim=1), offsets


def plan_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    *options: Any,
) -> Plan:
    """The plan of a call with these tensors; `options` are scale, rule, decay, l2norm and sigmoid."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtypes = {q.dtype, k.dtype, v.dtype}
    # TF32 has float16's 11 bits and bfloat16's range; of float32 three TF32 products are as exact.
    exact, float32 = torch.float32 in dtypes, dtypes != {torch.bfloat16}
    given = (g is not None, A_log is not None, dt_bias is not None, cu_seqlens is not None)
    arguments = (B, T, H, K, HV, V, N, exact, float32, q.device, *given, *options)
    if isinstance(B * T * N, int):
        return _kept_plan(generation(), arguments)
    return Plan(*arguments)  # symbolic sizes, while a compiler traces


@lru_cache(maxsize=1024)
def _kept_plan(generation: int, arguments: tuple[Any, ...]) -> Plan:
    return Plan(*arguments)
