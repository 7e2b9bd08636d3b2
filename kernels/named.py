"""The field's names: twelve functions, each `chunk` or `fused_recurrent` with its rule and decay fixed.

Names, argument order and what is positional are those of flash-linear-attention, so that an import can be replaced.
What a function takes is its signature: any other option is a TypeError.
"""

from torch import Tensor

from kernels.ops import Function, Result, chunk, fused_recurrent


def _pin(function: Function, generic: Function, suffix: str, rule: str, decay: str) -> Function:
    """Name and docstring of the function that fixes `rule` and `decay` of `generic`."""
    name = f"{generic.__name__}_{suffix}"
    function.__name__ = function.__qualname__ = name
    function.__doc__ = (
        f"`{generic.__name__}` with rule={rule!r}, decay={decay!r}; the arguments are described there.\n\n"
        "    Returns o [B, T, HV, V] and the last state [N, HV, K, V] or None.\n"
    )
    return function


def _gated_delta(generic: Function, suffix: str, decay: str) -> Function:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        *,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        inplace_state: bool = False,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
    ) -> Result:
        return generic(
            q,
            k,
            v,
            g,
            beta,
            rule="delta",
            decay=decay,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            A_log=A_log,
            dt_bias=dt_bias,
            inplace_state=inplace_state,
            cu_seqlens=cu_seqlens,
            backend=backend,
        )

    return _pin(function, generic, suffix, "delta", decay)


def _delta(generic: Function) -> Function:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        *,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        inplace_state: bool = False,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
    ) -> Result:
        return generic(
            q,
            k,
            v,
            None,
            beta,
            rule="delta",
            decay="none",
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            inplace_state=inplace_state,
            cu_seqlens=cu_seqlens,
            backend=backend,
        )

    return _pin(function, generic, "delta_rule", "delta", "none")


def _gated_linear(generic: Function, suffix: str, decay: str) -> Function:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        inplace_state: bool = False,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
    ) -> Result:
        return generic(
            q,
            k,
            v,
            g,
            rule="additive",
            decay=decay,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            A_log=A_log,
            dt_bias=dt_bias,
            inplace_state=inplace_state,
            cu_seqlens=cu_seqlens,
            backend=backend,
        )

    return _pin(function, generic, suffix, "additive", decay)


def _linear(generic: Function) -> Function:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        normalize: bool = True,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        inplace_state: bool = False,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
    ) -> Result:
        return generic(
            q,
            k,
            v,
            rule="additive",
            decay="none",
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            normalize=normalize,
            inplace_state=inplace_state,
            cu_seqlens=cu_seqlens,
            backend=backend,
        )

    return _pin(function, generic, "linear_attn", "additive", "none")


chunk_linear_attn, fused_recurrent_linear_attn = _linear(chunk), _linear(fused_recurrent)
chunk_simple_gla = _gated_linear(chunk, "simple_gla", "scalar")
fused_recurrent_simple_gla = _gated_linear(fused_recurrent, "simple_gla", "scalar")
chunk_gla = _gated_linear(chunk, "gla", "channel")
fused_recurrent_gla = _gated_linear(fused_recurrent, "gla", "channel")
chunk_delta_rule, fused_recurrent_delta_rule = _delta(chunk), _delta(fused_recurrent)
chunk_gated_delta_rule = _gated_delta(chunk, "gated_delta_rule", "scalar")
fused_recurrent_gated_delta_rule = _gated_delta(fused_recurrent, "gated_delta_rule", "scalar")
chunk_kda = _gated_delta(chunk, "kda", "channel")
fused_recurrent_kda = _gated_delta(fused_recurrent, "kda", "channel")
