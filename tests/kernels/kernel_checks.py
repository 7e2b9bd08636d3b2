"""What holds of the Triton kernels bit for bit, whatever runs them: the interpreter on a CPU, or a GPU.

Each check takes `Inputs` that lie where they are to be run. `at` shortens them along T, `rows` along B.
"""

from collections.abc import Callable
from typing import Any

import torch
from recurrence_cases import Inputs, error, make_inputs
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels import chunk, fused_recurrent

FLOAT32 = ("g", "A_log", "dt_bias", "initial_state")  # of 16-bit inputs, too
PER_CALL = ("initial_state", "A_log", "dt_bias")  # without a dimension T

Form = Callable[..., tuple[Tensor, Tensor | None]]


def placed(inputs: Inputs, device: str, dtype: torch.dtype) -> Inputs:
    """Inputs as a model has them: q, k, v and beta in `dtype`, gates and state float32."""
    return {name: x.to(device, torch.float32 if name in FLOAT32 else dtype) for name, x in inputs.items()}


def at(inputs: Inputs, tokens: slice) -> Inputs:
    return {name: x if name in PER_CALL else x[:, tokens] for name, x in inputs.items()}


def rows(inputs: Inputs, chosen: slice) -> Inputs:
    return {name: x if name in ("A_log", "dt_bias") else x[chosen] for name, x in inputs.items()}


def weights(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Gradients for o and the last state, row by row the same in every batch."""
    B, T, HV, V = inputs["v"].shape
    rng = torch.Generator().manual_seed(4)
    state = torch.randn(HV, inputs["k"].shape[3], V, generator=rng)
    o = torch.randn(T, HV, V, generator=rng)
    return tuple(x.expand(B, *x.shape).to(inputs["v"].device) for x in (o, state))  # type: ignore[return-value]


def results(form: Form, inputs: Inputs, d_o: Tensor, d_state: Tensor | None = None, **options: Any) -> Inputs:
    """o, state and the gradient of every input."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    o, state = form(**leaves, output_final_state=True, **{"backend": "triton", **options})
    assert state is not None
    outputs, gradients = ([o], [d_o.to(o.dtype)]) if d_state is None else ([o, state], [d_o.to(o.dtype), d_state])
    grads = torch.autograd.grad(outputs, list(leaves.values()), gradients)
    return {"o": o.detach(), "state": state.detach(), **{f"d{name}": d for name, d in zip(leaves, grads, strict=True)}}


def assert_same(out: Inputs, ref: Inputs) -> None:
    """To the bit."""
    assert out.keys() == ref.keys()
    for name, value in ref.items():
        assert out[name].dtype == value.dtype and torch.equal(out[name], value), name


def assert_causal(
    form: Form, inputs: Inputs, cuts: list[int], rule: str, decay: str, gate: str = "zero to -20"
) -> None:
    """A batch of one row and of the same row with other tokens, gates included, from each cut on."""
    (_, T, H, K), (HV, V) = inputs["q"].shape, inputs["v"].shape[2:]
    other = make_inputs(rule, decay, T, B=1, H=H, HV=HV, K=K, V=V, gate=gate, seed=1)
    other = {name: x.to(inputs[name]) for name, x in other.items()}
    row = rows(inputs, slice(1))
    batch = {
        name: torch.cat([x, *(x if name in PER_CALL else torch.cat([x[:, :t], other[name][:, t:]], 1) for t in cuts)])
        for name, x in row.items()
    }
    o, _ = form(**batch, rule=rule, decay=decay, backend="triton")
    for changed, t in zip(o[1:], cuts, strict=True):
        assert torch.equal(changed[:t], o[0, :t]), f"what follows token {t} reaches an earlier output"
        assert not torch.equal(changed[t:], o[0, t:])


def assert_long_equal_keys_reach_no_earlier_token(device: str, decay: str) -> None:
    """They take the triangular inverse out of float16's range: its largest number, and no NaN in the rest of it."""
    outputs = []
    for length in (1.0, 30.0):
        inputs = make_inputs("delta", decay, 64, B=1, H=1, HV=2, K=64, V=64)
        inputs["k"][:, 30:36] = inputs["k"][:, 30:31] * length**0.5
        inputs["beta"][:, 30:36] = 1.0
        inputs = placed(inputs, device, torch.bfloat16)
        outputs.append(results(chunk, inputs, *weights(inputs), rule="delta", decay=decay))
    assert all(x.isfinite().all() for x in outputs[1].values())
    assert torch.equal(*(x["o"][:, :30] for x in outputs))


def assert_rows_do_not_meet(form: Form, inputs: Inputs, **options: Any) -> None:
    """Every row of the batch has the output, state and gradients that it has alone."""
    together = results(form, inputs, *weights(inputs), **options)
    for n in range(len(inputs["q"])):
        one = rows(inputs, slice(n, n + 1))
        alone = results(form, one, *weights(one), **options)
        assert_same(alone, {name: x[n : n + 1] for name, x in together.items()})


def assert_strides_do_not_matter(form: Form, inputs: Inputs, **options: Any) -> None:
    """Inputs and the output's gradient are parts of wider tensors, their dimensions laid out backwards; the state's
    gradient is one number, as that of a sum."""

    def spread(x: Tensor) -> Tensor:
        wide = x.new_full((*reversed(x.shape), 2), 99.0)
        view = wide[..., 0].permute(*reversed(range(x.dim())))
        return view.copy_(x)

    d_o, d_state = (x.contiguous() for x in weights(inputs))
    d_state = d_state[:1, :1, :1, :1].expand_as(d_state)
    spread_inputs = {name: spread(x) for name, x in inputs.items()}
    out = results(form, spread_inputs, spread(d_o), d_state, **options)
    assert_same(out, results(form, inputs, d_o, d_state.contiguous(), **options))


def assert_backward_twice(form: Form, inputs: Inputs, **options: Any) -> None:
    """A graph that is kept gives its gradients again, and leaves its inputs and outputs as they were."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    o, state = form(**leaves, output_final_state=True, backend="triton", **options)
    assert state is not None
    before = [x.detach().clone() for x in (o, state)]
    d_o, d_state = weights(inputs)
    gradients = [d_o.to(o.dtype), d_state]
    first, second = (
        torch.autograd.grad([o, state], list(leaves.values()), gradients, retain_graph=True) for _ in range(2)
    )
    for name, a, b in zip(leaves, first, second, strict=True):
        assert torch.equal(a, b), f"d{name}"
    assert torch.equal(o, before[0]) and torch.equal(state, before[1])
    assert all(torch.equal(leaves[name], x) for name, x in inputs.items())


def assert_checkpoint_changes_nothing(
    form: Form, inputs: Inputs, use_reentrant: bool, autocast: bool, **options: Any
) -> None:
    device = inputs["q"].device.type

    def checkpointed(backend: str, output_final_state: bool, **leaves: Tensor) -> tuple[Tensor, Tensor | None]:
        def positional(*tensors: Tensor) -> Any:
            given = dict(zip(leaves, tensors, strict=True))
            return form(**given, backend=backend, output_final_state=output_final_state, **options)

        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            result: Any = checkpoint(positional, *leaves.values(), use_reentrant=use_reentrant)
        return result

    if use_reentrant:  # takes no torch.autograd.grad
        plain, again = ({name: x.detach().clone().requires_grad_() for name, x in inputs.items()} for _ in range(2))
        for leaves, function in ((plain, form), (again, checkpointed)):
            extra = options if function is form else {}
            o, state = function(**leaves, backend="triton", output_final_state=True, **extra)
            d_o, d_state = weights(inputs)
            torch.autograd.backward([o, state], [d_o.to(o.dtype), d_state])
        grads: Any = [{name: x.grad for name, x in leaves.items()} for leaves in (again, plain)]
        assert_same(*grads)
    else:
        assert_same(results(checkpointed, inputs, *weights(inputs)), results(form, inputs, *weights(inputs), **options))


def split(inputs: Inputs, pieces: list[tuple[Form, int]], **options: Any) -> tuple[Tensor, Tensor]:
    """Pieces of so many tokens, each by its form, with the state carried: the joined output and the last state. The
    state that a piece is given stays as it was."""
    tokens = {name: x for name, x in inputs.items() if name != "initial_state"}
    state, start, outputs = inputs["initial_state"], 0, []
    for form, length in pieces:
        saved = state.clone()
        piece = at(tokens, slice(start, start + length))
        o, after = form(**piece, initial_state=state, output_final_state=True, backend="triton", **options)
        assert after is not None and torch.equal(state, saved)
        state, start = after, start + length
        outputs.append(o)
    assert start == inputs["q"].shape[1]
    return torch.cat(outputs, dim=1), state


def assert_long_decoding(
    steps: int, dtype: torch.dtype, device: str, backend: str, rule: str, decay: str, normalize: bool, limit: float
) -> None:
    """So many tokens one by one from a large state: the state stays float32 and exact to it, outputs are finite and at
    the end as close as `limit`, what they are rounded to. Before its factor, or its denominator, an output would leave
    float16's range."""
    inputs = make_inputs(rule, decay, steps, B=1, H=2, HV=4, K=32, V=16)
    inputs["initial_state"] *= 6e4
    if normalize:  # positive keys add up to a denominator of 400 a step
        inputs |= {name: 20.0 * inputs[name].abs() for name in ("q", "k")}
        inputs["initial_state"] = inputs["initial_state"].new_zeros(1, 4, 32, 17)
    inputs = placed(inputs, device, dtype)
    state: Tensor = inputs.pop("initial_state")
    exact = {name: x.double() for name, x in inputs.items()} | {"initial_state": state.double()}
    given: dict[str, Any] = {"rule": rule, "decay": decay, "normalize": normalize, "output_final_state": True}
    outputs = []
    with torch.no_grad():
        for t in range(steps):
            step = at(inputs, slice(t, t + 1))
            o, after = fused_recurrent(**step, initial_state=state, **given, backend=backend)
            assert after is not None and after.dtype == torch.float32
            state = after
            outputs.append(o)
        ref_o, ref_state = chunk(**exact, **given, backend="torch")
    o = torch.cat(outputs, dim=1)
    assert ref_state is not None and o.dtype == dtype and o.isfinite().all()
    if not normalize and dtype == torch.float16:
        assert ref_o.abs().max() * 32**0.5 > torch.finfo(dtype).max
    for part in (slice(None), slice(steps - steps // 10, None)):
        assert error(o[:, part], ref_o[:, part]) <= limit
    assert error(state, ref_state) <= 1e-5  # of 8,000 roundings of float32, where nothing fades


PIECES: list[tuple[Form, int]] = [(fused_recurrent, 3), (chunk, 37), (fused_recurrent, 1), (chunk, 24), (chunk, 5)]
