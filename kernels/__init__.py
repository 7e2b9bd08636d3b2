"""Linear attention as one recurrence with two switches; beside it softmax attention, and what a model surrounds them
with: the short convolution, norms, gates, the loss.

S [K, V] is the state of a head, g ≤ 0 a log-decay, β a write strength:

    S ← exp(g_t) ⊙ S                      decay: none | scalar (one g per head) | channel (one per key channel)
    u = β_t (v_t − Sᵀ k_t)  or  v_t       rule:  delta | additive
    S ← S + k_t uᵀ
    o_t = scale · Sᵀ q_t                  read after write

| decay   | additive          | delta                                   |
|---------|-------------------|-----------------------------------------|
| none    | chunk_linear_attn | chunk_delta_rule (DeltaNet)             |
| scalar  | chunk_simple_gla  | chunk_gated_delta_rule (Gated DeltaNet) |
| channel | chunk_gla         | chunk_kda (Kimi Delta Attention)        |

`chunk_*` is for training and long prompts, `fused_recurrent_*`, with the same cells and signatures, for decoding.
`softmax_attention` is what they are measured against, for training and prompts, `softmax_decode` its form over a
preallocated cache of keys and values.

`chunk` and `fused_recurrent` take rule and decay as arguments; `help(kernels.chunk)` describes all arguments.
Names and argument order are those of flash-linear-attention.

`short_convolution`, `rms_norm`, `add_rms_norm`, `gated_rms_norm`, `swiglu`, `rotary` and `linear_cross_entropy` take
the same backends, and say themselves what else they take.

Shapes   q, k [B, T, H, K]; v, o [B, T, HV, V]; g [B, T, HV] or [B, T, HV, K]; beta [B, T, HV]. HV is a multiple of
         H: value head i reads key head i // (HV // H).
State    [N, HV, K, V], N = B or the number of packed sequences. What a call returns goes into the next as
         `initial_state`, from either form; a call changes the state it was given only with `inplace_state=True`.
Dtypes   Any floating inputs. Arithmetic and state are float32 (float64 as soon as q, k or v is), under autocast too;
         o has v's dtype. The chunkwise Triton kernels multiply bfloat16 as it is, float16 in TF32, and sum
         in float32.
g        Any log-decay in [−inf, 0]; −inf forgets everything before its token.
Packing  cu_seqlens [N + 1]: boundaries of N sequences along T, with B = 1. Empty sequences are allowed.
Backend  "triton" (GPUs from sm_80 on; 16 or 32 bits, K and V ≤ 256), "torch" (anything), "reference" (token by token,
         for comparison) or "auto": triton where it can run, else torch; `resolve_backend` says which.
Errors   ValueError for wrong shapes and values, TypeError for wrong types and dtypes.
"""

from kernels.checks import BACKENDS, resolve_backend
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.named import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_kda,
    chunk_linear_attn,
    chunk_simple_gla,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gla,
    fused_recurrent_kda,
    fused_recurrent_linear_attn,
    fused_recurrent_simple_gla,
)
from kernels.norm import add_rms_norm, gated_rms_norm, rms_norm
from kernels.ops import DECAYS, RULES, chunk, fused_recurrent, resolve_options
from kernels.rotary import rotary
from kernels.short_conv import short_convolution
from kernels.softmax import softmax_attention, softmax_decode
from kernels.swiglu import swiglu

__all__ = [
    "BACKENDS",
    "DECAYS",
    "RULES",
    "add_rms_norm",
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
    "gated_rms_norm",
    "linear_cross_entropy",
    "resolve_backend",
    "resolve_options",
    "rms_norm",
    "rotary",
    "short_convolution",
    "softmax_attention",
    "softmax_decode",
    "swiglu",
]
