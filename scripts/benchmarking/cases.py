"""What is measured: the six ops, their inputs, and the calls of ours and of the peer that compute them.

Inputs are random and realistic: q, k ~ N(0, 1), normalised unless the kernel does it, v ~ N(0, 1),
beta = sigmoid(N(0, 1)) in q's dtype, and the log-decay g = −A · softplus(raw + dt_bias), computed once in float32,
with A ~ U(1, 16) a head, softplus(dt_bias) log-uniform in [1e-3, 0.1] and raw ~ N(0, 1).

KDA is measured twice. "kda" takes normalised q, k and a float32 g. "kda, gate and norm in kernel" takes raw q, k, raw g
in q's dtype, A_log and dt_bias in float32: `use_gate_in_kernel`, `use_qk_l2norm_in_kernel`. fla is fastest there with
`safe_gate`, lower_bound −5, which is another gate, g = −5 · sigmoid(A · (raw + dt_bias)); ours has no bounded gate. The
two then differ in the values of g, and fla is spared what unbounded ones cost; each is held to a reference with its
own gate.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels

NAMES = {
    ("additive", "none"): "linear_attn",
    ("additive", "scalar"): "simple_gla",
    ("additive", "channel"): "gla",
    ("delta", "none"): "delta_rule",
    ("delta", "scalar"): "gated_delta_rule",
    ("delta", "channel"): "kda",
}
CELLS = {name: cell for cell, name in NAMES.items()}

LOWER_BOUND = -5.0  # of fla's safe gate, the lowest that it takes

Inputs = dict[str, Tensor]
Call = Callable[..., tuple[Tensor, Tensor | None]]  # tensors and options by name → o, state


@dataclass(frozen=True)
class Shape:
    """B×T×H×D with K = V = D and as many value heads as key heads."""

    B: int
    T: int
    H: int
    D: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        sizes = text.lower().split("x")
        if len(sizes) != 4 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ValueError(f"got {text!r}, accepted: BxTxHxD, whole numbers from 1 on, as in 8x4096x16x128")
        return cls(*map(int, sizes))

    def __str__(self) -> str:
        return f"{self.B}x{self.T}x{self.H}x{self.D}"


@dataclass(frozen=True)
class Case:
    """An op; `in_kernel` leaves query and key norm and the gate to it."""

    op: str
    in_kernel: bool = False

    @property
    def label(self) -> str:
        return f"{self.op}, gate and norm in kernel" if self.in_kernel else self.op

    @property
    def options(self) -> dict[str, Any]:
        """What ours and fla's both take."""
        if self.op == "linear_attn":
            return {"normalize": False}
        return {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True} if self.in_kernel else {}


def cases_of(ops: list[str]) -> list[Case]:
    """A row each, in the order of NAMES, and two for KDA."""
    plain = [Case(op) for op in NAMES.values() if op in ops]
    return plain + ([Case("kda", in_kernel=True)] if "kda" in ops else [])


@dataclass(frozen=True)
class Contender:
    """Who computes: `bind(case, form)` is the call, form "chunk" or "fused_recurrent"."""

    name: str
    bind: Callable[[Case, str], Call]
    safe_gate: bool = False  # whether its gate in the kernel is the bounded one


def ours(backend: str, name: str = "ours") -> Contender:
    def bind(case: Case, form: str) -> Call:
        return partial(getattr(kernels, f"{form}_{case.op}"), **case.options, backend=backend)

    return Contender(name, bind)


def fla() -> Contender:
    """flash-linear-attention with its fastest settings."""

    def bind(case: Case, form: str) -> Call:
        function = getattr(importlib.import_module(f"fla.ops.{case.op}"), f"{form}_{case.op}")
        if (case.op, form) == ("gla", "fused_recurrent"):  # the only one that names its gate otherwise
            return lambda g, **others: function(gk=g, **others)
        safe = {"safe_gate": True, "lower_bound": LOWER_BOUND} if case.in_kernel else {}
        return partial(function, **case.options, **safe)

    return Contender("fla", bind, safe_gate=True)


def reference(case: Case, safe_gate: bool) -> Call:
    """The recurrence token by token, with the gate of the contender."""

    def bounded(g: Tensor, A_log: Tensor, dt_bias: Tensor, **others: Any) -> tuple[Tensor, Tensor | None]:
        g = LOWER_BOUND * torch.sigmoid(A_log.exp().unsqueeze(1) * (g + dt_bias.view(g.shape[2:])))
        return kernels.chunk_kda(g=g, **others, use_qk_l2norm_in_kernel=True, backend="reference")

    return bounded if case.in_kernel and safe_gate else ours("reference").bind(case, "chunk")


def make_inputs(case: Case, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """The tensors of a call by name, drawn on the device; see the module docstring."""
    random = torch.Generator(device).manual_seed(seed)
    rule, decay = CELLS[case.op]
    B, T, H, D = shape.B, shape.T, shape.H, shape.D

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=random, device=device)

    def uniform(*sizes: int, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(*sizes, generator=random, device=device)

    def query() -> Tensor:
        x = normal(B, T, H, D)
        return (x if case.in_kernel else F.normalize(x, dim=-1)).to(dtype)

    inputs = {"q": query(), "k": query(), "v": normal(B, T, H, D).to(dtype)}
    if decay != "none":
        gates = (H, D) if decay == "channel" else (H,)
        A = uniform(H, *[1] * (len(gates) - 1), low=1.0, high=16.0)
        dt = uniform(*gates, low=math.log(1e-3), high=math.log(0.1)).exp()
        dt_bias = dt + torch.log(-torch.expm1(-dt))  # softplus⁻¹
        raw = normal(B, T, *gates)
        inputs["g"] = raw.to(dtype) if case.in_kernel else -A * F.softplus(raw + dt_bias)
        if case.in_kernel:
            inputs |= {"A_log": A.log().flatten(), "dt_bias": dt_bias.flatten()}
    if rule == "delta":
        inputs["beta"] = normal(B, T, H).sigmoid().to(dtype)
    return inputs


def floor_bytes(inputs: Inputs) -> dict[str, int]:
    """The least that must move, each tensor in its own dtype; o, d_o and dv are as large as v.

    forward    reads all inputs, writes o
    backward   reads all inputs and d_o, writes a gradient of every input
    both       the sum
    """
    everything, o = sum(x.nbytes for x in inputs.values()), inputs["v"].nbytes
    forward = everything + o
    return {"forward": forward, "both": forward + everything + o + everything}
