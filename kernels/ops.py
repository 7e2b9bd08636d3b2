"""The recurrence for any rule and decay, in two forms: `chunk` and `fused_recurrent`.

Everything that is not the recurrence itself happens here, once for both and for the names over them: checks, query and
key norm, gate, write strength, normaliser, choice of the implementation. The package docstring has the equation and
the conventions.
"""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import chunk_torch, recurrent_torch, reference
from kernels.checks import (
    check_choice,
    check_cu_seqlens,
    check_groups,
    check_in_place,
    check_scale,
    check_tensor,
    read_cu_seqlens,
    resolve_backend,
    without_triton,
)
from kernels.gpu.limits import WIDEST

RULES = ("additive", "delta")
DECAYS = ("none", "scalar", "channel")

NORM_EPS = 1e-6  # under the root of the query and key norm
NORMALIZER_EPS = 1e-10  # added to zᵀq

Implementation = Callable[..., tuple[Tensor, Tensor]]
CHUNK: dict[str, Implementation] = {"torch": chunk_torch.chunk, "reference": reference.recurrence}
RECURRENT: dict[str, Implementation] = {"torch": recurrent_torch.recurrent, "reference": reference.recurrence}
if importlib.util.find_spec("triton") is not None:
    from kernels.gpu.recurrence.chunk import chunk as _chunk
    from kernels.gpu.recurrence.recurrent import recurrent as _recurrent

    CHUNK["triton"], RECURRENT["triton"] = _chunk, _recurrent

Result = tuple[Tensor, Tensor | None]
Function = Callable[..., Result]


def _generic(name: str, form: str, implementations: dict[str, Implementation]) -> Function:
    """`chunk` or `fused_recurrent`: the same options in front of one implementation per backend.

    The Triton kernels do norm, gate and sigmoid themselves; for the others they are done here.
    """

    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None = None,
        beta: Tensor | None = None,
        *,
        rule: str,
        decay: str,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        normalize: bool = False,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        inplace_state: bool = False,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
    ) -> Result:
        check_choice("rule", rule, RULES)
        check_choice("decay", decay, DECAYS)
        check_scale(scale)
        check_tensor("q", q, "B, T, H, K", (-1, -1, -1, -1))
        B, T, H, K = q.shape
        check_tensor("k", k, "B, T, H, K", (B, T, H, K), q)
        check_tensor("v", v, "B, T, HV, V", (B, T, -1, -1), q)
        HV, V = v.shape[2:]
        check_groups("v", HV, "q and k", H)
        _check_gate(decay, q, (B, T, HV, K), g, use_gate_in_kernel, A_log, dt_bias)
        _check_beta(rule, q, (B, T, HV), beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
        if normalize and rule == "delta":
            raise ValueError("normalize: got True for rule='delta', accepted: only for rule='additive'")
        check_cu_seqlens(cu_seqlens, B)
        dtype = reference.compute_dtype(q, k, v)
        if initial_state is not None:
            N = B if cu_seqlens is None else len(cu_seqlens) - 1
            width = V + 1 if normalize else V
            check_tensor("initial_state", initial_state, "N, HV, K, V", (N, HV, K, width), q, dtype)
        if inplace_state:
            check_in_place(initial_state, q, k, v, g, beta, A_log, dt_bias)
        chosen = resolve_backend(backend, q.device)
        if chosen == "triton" and (dtype != torch.float32 or max(K, V + normalize) > WIDEST):
            got = f"K = {K}, V = {V + normalize} in {dtype}"
            chosen = without_triton(backend, got, f"K, V ≤ {WIDEST} in 16 or 32 bits")
        # A compiled model cannot stop to read values; the kernels only read cu_seqlens on the GPU.
        bounds = None
        if chosen != "triton" or not torch.compiler.is_compiling():
            bounds = read_cu_seqlens(cu_seqlens, B, T)
        factor = 1.0 if normalize else K**-0.5 if scale is None else scale
        values = v
        if normalize:
            values = F.pad(v if chosen == "triton" else v.to(dtype), (0, 1), value=1.0)  # [B, T, HV, V + 1]

        if chosen == "triton":
            sigmoid = 0.0 if not use_beta_sigmoid_in_kernel else 2.0 if allow_neg_eigval else 1.0
            boundaries = None if cu_seqlens is None else cu_seqlens.to(q.device)
            tensors = (q, k, values, g, beta, A_log, dt_bias, initial_state, boundaries)
            options = (factor, rule, decay, use_qk_l2norm_in_kernel, sigmoid, normalize)
            o, state = implementations["triton"](*tensors, *options, inplace_state)
        else:
            with torch.autocast(q.device.type, enabled=False):
                q, k, g, beta = resolve_options(
                    q,
                    k,
                    g,
                    beta,
                    dtype,
                    use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                    use_gate_in_kernel=use_gate_in_kernel,
                    use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
                    allow_neg_eigval=allow_neg_eigval,
                    A_log=A_log,
                    dt_bias=dt_bias,
                )
                o, state = implementations[chosen](q, k, values, g, beta, factor, initial_state, bounds)
        if normalize:
            o = (o[..., :V] / (o[..., V:] + NORMALIZER_EPS)).to(v.dtype)
        if inplace_state and initial_state is not None:
            state = initial_state if state is initial_state else initial_state.copy_(state)
        return o, state if output_final_state else None

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"""Any rule and decay, {form}.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V], HV a multiple of H; value head i reads key head i // (HV // H).
        g: log-decay in [−inf, 0], [B, T, HV] for decay "scalar", [B, T, HV, K] for "channel".
        beta: write strength [B, T, HV] of the delta rule.
        rule, decay: "additive" or "delta"; "none", "scalar" or "channel".
        scale: factor on the output; K^−½ unless given.
        initial_state: [N, HV, K, V] in the compute dtype; zero unless given. Not modified, unless that is asked for:
        inplace_state: write the last state over the initial one. There is no gradient then.
        output_final_state: return the last state, else None in its place.
        use_qk_l2norm_in_kernel: q and k become x / sqrt(Σ_c x_c² + 1e-6), head by head.
        use_gate_in_kernel: g is a raw, finite gate and the log-decay −exp(A_log) · softplus(g + dt_bias);
            A_log [HV], dt_bias [HV] (scalar) or [HV·K] (channel) or None.
        use_beta_sigmoid_in_kernel: the write strength is sigmoid(beta), and twice that with allow_neg_eigval,
            so that I − β k kᵀ may have eigenvalues in (−1, 1). Without the sigmoid beta is used as it is and may
            itself lie in (0, 2): allow_neg_eigval alone would change nothing and is refused.
        normalize: additive rule only: o_t = Sᵀq_t / (zᵀq_t + 1e-10), where z is what the recurrence makes of a
            value that is always 1 (Σ_s≤t k_s without decay). The state then has V + 1 value columns, the last
            one is z. The scale cancels.
        cu_seqlens: int32 or int64 [N + 1], boundaries of N sequences (empty ones allowed) packed along T; B = 1.
        backend: see `resolve_backend`.

    Returns:
        o [B, T, HV, V] in v's dtype, and the last state [N, HV, K, V] in the compute dtype or None.
    """
    return function


def _check_gate(
    decay: str,
    q: Tensor,
    sizes: tuple[int, int, int, int],
    g: Tensor | None,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> None:
    HV, K = sizes[2:]
    if decay == "none":
        if g is not None or use_gate_in_kernel:
            raise ValueError("g, use_gate_in_kernel: got a gate for decay='none', accepted: none")
    elif decay == "scalar":
        check_tensor("g", g, "B, T, HV", sizes[:3], q)
    else:
        check_tensor("g", g, "B, T, HV, K", sizes, q)
    if use_gate_in_kernel:
        check_tensor("A_log", A_log, "HV", (HV,), q)
        if dt_bias is not None:
            check_tensor("dt_bias", dt_bias, *(("HV", (HV,)) if decay == "scalar" else ("HV·K", (HV * K,))), q)
    elif A_log is not None or dt_bias is not None:
        raise ValueError("A_log, dt_bias: got a tensor, accepted: only with use_gate_in_kernel=True")


def _check_beta(
    rule: str,
    q: Tensor,
    sizes: tuple[int, int, int],
    beta: Tensor | None,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
) -> None:
    if rule == "delta":
        check_tensor("beta", beta, "B, T, HV", sizes, q)
    elif beta is not None or use_beta_sigmoid_in_kernel:
        raise ValueError("beta, use_beta_sigmoid_in_kernel: got one for rule='additive', accepted: none")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval: got True without use_beta_sigmoid_in_kernel, accepted: only with it; "
            "otherwise beta is used as it is, so pass values in (0, 2) for negative eigenvalues"
        )


def resolve_options(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    dtype: torch.dtype,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """q, k, log-decay and write strength as the recurrence has them; what an option changes is in `dtype`."""
    if use_qk_l2norm_in_kernel:
        q, k = _l2norm(q.to(dtype)), _l2norm(k.to(dtype))
    if use_gate_in_kernel and g is not None and A_log is not None:
        g = _log_decay(g.to(dtype), A_log.to(dtype), dt_bias)
    if use_beta_sigmoid_in_kernel and beta is not None:
        beta = beta.to(dtype).sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    return q, k, g, beta


def _l2norm(x: Tensor) -> Tensor:
    return x * (x.square().sum(dim=-1, keepdim=True) + NORM_EPS).rsqrt()


def _log_decay(g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """−exp(A_log) · softplus(g + dt_bias) in the dtype of g [B,T,HV] or [B,T,HV,K]."""
    if dt_bias is not None:
        g = g + dt_bias.to(g.dtype).view(g.shape[2:])
    rate = -A_log.exp()  # [HV]
    return F.softplus(g) * (rate if g.dim() == 3 else rate.unsqueeze(1))


chunk = _generic("chunk", "in chunks of tokens: for training and long prompts", CHUNK)
fused_recurrent = _generic("fused_recurrent", "token by token: for decoding", RECURRENT)
