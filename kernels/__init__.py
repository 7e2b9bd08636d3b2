"""Linear attention as one recurrence with two switches, softmax attention and the short convolution beside it.

A state S [K, V] per head; g ≤ 0 is a log-decay, β a write strength:

    S ← exp(g_t) ⊙ S                      decay: none | scalar (one g per head) | channel (a g per key channel)
    u = β_t (v_t − Sᵀ k_t)  or  v_t       rule:  delta | additive
    S ← S + k_t uᵀ
    o_t = scale · Sᵀ q_t                  read after write

| decay   | additive          | delta                                |
|---------|-------------------|--------------------------------------|
| none    | chunk_linear_attn | chunk_delta_rule (DeltaNet)          |
| scalar  | chunk_simple_gla  | chunk_gated_delta_rule (Gated DeltaNet) |
| channel | chunk_gla         | chunk_kda (Kimi Delta Attention)     |

`chunk_*` is for training and long prompts, `fused_recurrent_*` (same cells, same signatures) for decoding; `chunk`
and `fused_recurrent` take the rule and the decay as arguments.
"""

from kernels.checks import BACKENDS, resolve_backend
from kernels.ops import (
    DECAYS,
    RULES,
    chunk,
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_kda,
    chunk_linear_attn,
    chunk_simple_gla,
    fused_recurrent,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gla,
    fused_recurrent_kda,
    fused_recurrent_linear_attn,
    fused_recurrent_simple_gla,
)
from kernels.short_conv import short_convolution
from kernels.softmax import softmax_attention

__all__ = [
    "BACKENDS",
    "DECAYS",
    "RULES",
    "chunk",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_simple_gla",
    "fused_recurrent",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_linear_attn",
    "fused_recurrent_simple_gla",
    "resolve_backend",
    "short_convolution",
    "softmax_attention",
]
