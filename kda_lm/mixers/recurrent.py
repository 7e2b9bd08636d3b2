"""The recurrent mixer: one class for linear attention, DeltaNet, Gated DeltaNet, KDA and what lies between.

    S ← exp(g_t) ⊙ S                                 decay: none | scalar | channel
    u = β_t (v_t − Sᵀ k_t)  or  v_t                  rule:  delta | additive
    S ← S + k_t uᵀ,   o_t = K^(−1/2) · Sᵀ q_t

around which

    q, k, v = act(conv(W x)),  then a feature map and a norm on q and k
    y = W_out (gate(x) ⊙ RMSNorm_head(o))

Defaults are Kimi Linear's KDA layer (technical report, section 3); configs/mixer holds the other published layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from kda_lm.layers import JointLinear, RMSNorm
from kda_lm.mixers.base import Mixer, Projected
from kda_lm.mixers.gates import ChannelDecay, OutputGate, ScalarDecay, WriteStrength

RECURRENT_TOKENS = 16  # up to so many are decoded token by token, more of them in chunks
CHUNK_SIZE = 64  # the chunk length that FLOPs are counted at, as in Kimi Linear's equation 13


@dataclass(frozen=True)
class RecurrentConfig:
    """Options of a recurrent mixer; see the module's equations."""

    rule: Literal["additive", "delta"] = "delta"
    decay: Literal["none", "scalar", "channel"] = "channel"
    num_heads: int = 4  # H, heads of q and k
    num_value_heads: int | None = None  # HV, a multiple of H (grouped value heads); null: H
    expand_k: float = 1.0  # H · K = expand_k · dim
    expand_v: float = 1.0  # HV · V = expand_v · dim
    conv_width: int = 4  # taps of the short convolution on q, k and v; 0: none
    activation: Literal["silu", "none"] = "silu"  # on q, k and v, after the convolution
    feature_map: Literal["none", "relu", "elu1"] = "none"  # on q and k, after the activation; elu1 is 1 + ELU
    qk_norm: Literal["l2", "none"] = "l2"  # of each head's q and k
    normalize: bool = False  # divide by the summed keys' product with q (additive rule without decay only)
    allow_neg_eigval: bool = False  # β in (0, 2) instead of (0, 1): the write may reflect
    gate_rank: int | None = None  # of the channel decay and the low-rank output gate; null: V
    output_norm: bool = True  # RMSNorm over each value head
    output_gate: Literal["none", "low_rank", "full"] = "low_rank"
    output_gate_activation: Literal["sigmoid", "silu"] = "sigmoid"
    backend: Literal["auto", "triton", "torch", "reference"] = "auto"  # which kernel implementation runs

    def __post_init__(self) -> None:
        if self.num_heads < 1:
            raise ValueError(f"num_heads is {self.num_heads}; it takes at least 1")
        if self.value_heads < 1 or self.value_heads % self.num_heads:
            raise ValueError(
                f"num_value_heads is {self.num_value_heads}; it takes a multiple of num_heads = {self.num_heads}"
            )
        if not 0 <= self.conv_width <= 8:
            raise ValueError(f"conv_width is {self.conv_width}; it takes 0 (none) to 8")
        if self.normalize and (self.rule, self.decay) != ("additive", "none"):
            raise ValueError("normalize is for rule=additive with decay=none only")
        if self.allow_neg_eigval and self.rule != "delta":
            raise ValueError("allow_neg_eigval is for rule=delta only: the additive rule has no write strength")
        if self.gate_rank is not None and self.gate_rank < 1:
            raise ValueError(f"gate_rank is {self.gate_rank}; it takes at least 1, or null for the value head size")

    @property
    def value_heads(self) -> int:
        return self.num_heads if self.num_value_heads is None else self.num_value_heads


class RecurrentState(NamedTuple):
    """What a recurrent mixer carries from token to token; its size does not depend on how many there were."""

    memory: Tensor  # S, [B, HV, K, V], float32; with `normalize` one more value column, the sum of the keys
    conv: Tensor | None  # the convolution's last inputs, [B, width − 1, 2·H·K + HV·V]


class RecurrentMixer(Mixer):
    """See the module's docstring; x [B, T, dim] → y [B, T, dim] and the state after the last token."""

    grows = False

    def __init__(self, dim: int, config: RecurrentConfig) -> None:
        heads, value_heads = config.num_heads, config.value_heads
        head_k = _head_dim(dim, config.expand_k, heads, "expand_k", "num_heads")
        head_v = _head_dim(dim, config.expand_v, value_heads, "expand_v", "num_value_heads")
        sizes = (heads * head_k, heads * head_k, value_heads * head_v)
        super().__init__(dim, sizes, config.conv_width, config.activation)
        self.config = config
        self.head_k_dim, self.head_v_dim = head_k, head_v
        rank = config.gate_rank or self.head_v_dim

        self.decay: ScalarDecay | ChannelDecay | None = None
        if config.decay == "scalar":
            self.decay = ScalarDecay(dim, value_heads)
        elif config.decay == "channel":
            self.decay = ChannelDecay(dim, value_heads, self.head_k_dim, rank)
        self.write = WriteStrength(dim, value_heads) if config.rule == "delta" else None
        self.output_norm = RMSNorm(self.head_v_dim) if config.output_norm else None
        self.output_gate: OutputGate | None = None
        if config.output_gate != "none":
            gate_rank = rank if config.output_gate == "low_rank" else None
            self.output_gate = OutputGate(dim, value_heads, head_v, gate_rank, config.output_gate_activation)
        self.out_proj = nn.Linear(sizes[2], dim, bias=False)
        gates = [gate.first for gate in (self.decay, self.output_gate, self.write) if gate is not None]
        self.gate_sizes = [layer.out_features for layer in gates]
        self.in_proj = JointLinear((self.q_proj, self.k_proj, self.v_proj), gates)

    def forward(
        self, x: Tensor, state: RecurrentState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, RecurrentState]:
        projected = self.project(x, None if state is None else state.conv, cu_seqlens)
        memory = None if state is None else state.memory
        y, memory = self._mix(kernels.chunk, projected, memory, cu_seqlens=cu_seqlens)
        return y, RecurrentState(memory, projected.conv_state)

    def new_cache(self, state: RecurrentState, batch: int, capacity: int) -> RecurrentState:
        """A state is its own cache, whatever the capacity."""
        conv = None if state.conv is None else state.conv.new_empty(batch, *state.conv.shape[1:])
        return RecurrentState(state.memory.new_empty(batch, *state.memory.shape[1:]), conv)

    def fill_cache(self, cache: RecurrentState, state: RecurrentState, rows: Tensor, positions: Tensor) -> None:
        cache.memory.copy_(state.memory)
        if cache.conv is not None and state.conv is not None:
            cache.conv.copy_(state.conv)

    def decode(self, x: Tensor, cache: RecurrentState, positions: Tensor) -> Tensor:
        """Few tokens in one launch, more of them in chunks."""
        form = kernels.fused_recurrent if x.shape[1] <= RECURRENT_TOKENS else kernels.chunk
        return self._mix(form, self.project(x, cache.conv, inplace_state=True), cache.memory, inplace_state=True)[0]

    def _mix(
        self, form: Callable[..., Any], projected: Projected, memory: Tensor | None, **more: Any
    ) -> tuple[Tensor, Tensor]:
        """y [B, T, dim] and the memory after the last token; `form` is `chunk` or `fused_recurrent` of kernels."""
        opening, tensors, options = self._inputs(projected)
        o, memory = form(
            *tensors,
            rule=self.config.rule,
            decay=self.config.decay,
            initial_state=memory,
            output_final_state=True,
            normalize=self.config.normalize,
            backend=self.config.backend,
            **options,
            **more,
        )
        assert memory is not None
        return self.out_proj(self._output(o, opening).flatten(-2)), memory

    def _inputs(
        self, projected: Projected
    ) -> tuple[Tensor | None, tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], dict[str, Any]]:
        """The output gate's opening; q, k, v, raw decay and raw write strength of the kernels, heads split off; and
        what of these the kernels are to do themselves.
        """
        config, gates = self.config, iter(projected.gates)
        q, k = (_feature_map(config.feature_map, z) for z in (projected.q, projected.k))
        g = None if self.decay is None else self.decay(next(gates))
        opening = None if self.output_gate is None else self.output_gate(next(gates))
        beta = None if self.write is None else self.write(next(gates))
        timescale = None if self.decay is None else self.decay.timescale
        heads = (config.num_heads, config.num_heads, config.value_heads)
        q, k, v = (z.unflatten(-1, (count, -1)) for z, count in zip((q, k, projected.v), heads, strict=True))
        options = {
            "use_qk_l2norm_in_kernel": config.qk_norm == "l2",
            "use_gate_in_kernel": timescale is not None,
            "use_beta_sigmoid_in_kernel": self.write is not None,
            "allow_neg_eigval": config.allow_neg_eigval,
            "A_log": None if timescale is None else timescale.A_log,
            "dt_bias": None if timescale is None else timescale.dt_bias,
        }
        return opening, (q, k, v, g, beta), options

    def memory_inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """What is written to the memory of texts x [B, T, dim] from their start: keys [B, T, H, K], values
        [B, T, HV, V], log-decay [B, T, HV(, K)] and write strength [B, T, HV], or None where there is none.
        """
        _, (q, k, v, g, beta), options = self._inputs(self.project(x, None))
        _, k, g, beta = kernels.resolve_options(q, k, g, beta, torch.float32, **options)
        return k, v, g, beta

    def _output(self, o: Tensor, opening: Tensor | None) -> Tensor:
        """act(opening) ⊙ RMSNorm_head(o), or what there is of it; [B, T, HV, V]."""
        norm, gate, backend = self.output_norm, self.output_gate, self.config.backend
        if norm is not None and gate is not None and opening is not None:
            return kernels.gated_rms_norm(o, opening, norm.weight, norm.eps, gate.activation, backend)
        if norm is not None:
            return norm(o, backend)
        return o if gate is None or opening is None else o * gate.activate(opening)

    def mixing_flops_per_token(self, length: int) -> int:
        """Chunkwise, a head: 4KV + C(K + V) additive, 6KV + C(2K + V) + C² delta; independent of `length`.

        Kimi Linear's equation 13 for K ≠ V, at its C = 64.
        """
        k, v, c = self.head_k_dim, self.head_v_dim, CHUNK_SIZE
        delta = self.config.rule == "delta"
        a_head = 6 * k * v + c * (2 * k + v) + c * c if delta else 4 * k * v + c * (k + v)
        return self.config.value_heads * a_head

    def memory_bytes(self, length: int, dtype: torch.dtype) -> int:
        """S in float32, whatever `length` and `dtype`."""
        columns = self.head_v_dim + int(self.config.normalize)
        return 4 * self.config.value_heads * self.head_k_dim * columns


def _feature_map(name: str, x: Tensor) -> Tensor:
    if name == "relu":
        return F.relu(x)
    if name == "elu1":
        return 1 + F.elu(x)  # positive, as a normaliser needs it (Katharopoulos et al. 2020)
    return x


def _head_dim(dim: int, expand: float, heads: int, expand_name: str, heads_name: str) -> int:
    """Channels a head of a projection to expand · dim channels; ValueError unless they divide evenly."""
    total = round(expand * dim)
    if total < heads or total % heads:
        raise ValueError(f"{expand_name} × dim = {total} must be a positive multiple of {heads_name} = {heads}")
    return total // heads
