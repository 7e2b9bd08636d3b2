"""What the tests of the kernels around the recurrence share, whatever runs them: the interpreter on a CPU, or a GPU."""

from typing import Any

import torch
from recurrence_cases import Inputs, assert_close
from torch import Tensor

from kernels import add_rms_norm, gated_rms_norm, linear_cross_entropy, rms_norm, short_convolution, swiglu


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same(out: Inputs, ref: Inputs) -> None:
    """To the bit."""
    assert out.keys() == ref.keys()
    for name, value in ref.items():
        assert out[name].dtype == value.dtype and torch.equal(out[name], value), name


def differentiate(results: dict[str, Tensor], leaves: Inputs) -> Inputs:
    """Results and the gradients of all leaves, for fixed random gradients that every dtype has exactly."""
    weights = [normal(*x.shape, seed=i + 9).bfloat16().to(x) for i, x in enumerate(results.values())]
    grads = torch.autograd.grad(list(results.values()), list(leaves.values()), weights)
    return {
        **{name: x.detach() for name, x in results.items()},
        **{f"d{x}": d for x, d in zip(leaves, grads, strict=True)},
    }


def leaves_of(inputs: Inputs) -> Inputs:
    return {name: x.detach().requires_grad_() for name, x in inputs.items()}


# The short convolution


def conv_inputs(
    B: int, T: int, D: int, W: int, given: set[str], dtype: torch.dtype = torch.float64, N: int | None = None
) -> Inputs:
    inputs = {"x": normal(B, T, D), "weight": normal(D, W, seed=1)}
    if "bias" in given:
        inputs["bias"] = normal(D, seed=2)
    if "initial_state" in given:
        inputs["initial_state"] = normal(B if N is None else N, W - 1, D, seed=3)
    return {name: x.to(dtype) for name, x in inputs.items()}


def assert_conv_in_place(inputs: Inputs, sizes: list[int]) -> None:
    """The state that a call would return is written over the one that came; the inputs stay as they were."""
    before = {name: x.clone() for name, x in inputs.items()}
    y, last = short_convolution(**before, output_final_state=True, backend="triton")
    parts, nothing = short_convolution(**inputs, inplace_state=True, backend="triton", sizes=sizes)
    assert nothing is None and torch.equal(torch.cat(parts, dim=-1), y)
    assert last is not None and torch.equal(inputs.pop("initial_state"), last)
    assert all(torch.equal(x, before[name]) for name, x in inputs.items())


def conv(inputs: Inputs, backend: str, compiler: str | None = None, **options: Any) -> Inputs:
    """y or its parts, the last state and every gradient."""
    leaves = leaves_of(inputs)

    def function(**tensors: Tensor) -> Any:
        return short_convolution(**tensors, **options, output_final_state=True, backend=backend)

    call = function if compiler is None else torch.compile(function, backend=compiler, fullgraph=True)
    y, state = call(**leaves)
    found = {"y": y} if isinstance(y, Tensor) else {f"y{i}": part for i, part in enumerate(y)}
    assert all(x.is_contiguous() for x in found.values())
    if state.numel():
        return differentiate({**found, "state": state}, leaves)
    state_leaf = leaves.pop("initial_state", None)  # of width 1: empty
    assert state_leaf is None or state.shape == state_leaf.shape
    return differentiate(found, leaves)


def assert_conv(inputs: Inputs, dtype: torch.dtype, limit: float, **options: Any) -> None:
    """Output, state and every gradient against float64 on the same rounded inputs."""
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    ref = conv({name: x.double() for name, x in inputs.items()}, "torch", **options)
    out = conv(inputs, "triton", **options)
    assert all(x.dtype == dtype for x in out.values())
    assert_close(out, ref, limit)


def assert_conv_rows_alone(inputs: Inputs) -> None:
    """Every row of the batch has the results that it has alone, and that it has packed with the others, bit by bit;
    but for what sums over the batch."""
    B, T, D = inputs["x"].shape
    shared = {name: x for name, x in inputs.items() if name in ("weight", "bias")}
    together = conv(inputs, "triton", activation="silu")
    bounds = torch.arange(0, B * T + 1, T, device=inputs["x"].device)
    flat = {**inputs, "x": inputs["x"].reshape(1, B * T, D)}
    packed = conv(flat, "triton", activation="silu", cu_seqlens=bounds)
    for name in ("y", "state", "dx", "dinitial_state"):
        assert torch.equal(packed[name].view_as(together[name]), together[name]), name
    for n in range(B):
        one = shared | {name: x[n : n + 1] for name, x in inputs.items() if name not in shared}
        y, state = short_convolution(**one, activation="silu", output_final_state=True, backend="triton")
        assert state is not None
        assert torch.equal(y, together["y"][n : n + 1]) and torch.equal(state, together["state"][n : n + 1])


def assert_conv_parts(inputs: Inputs, sizes: list[int], **options: Any) -> None:
    """What the parts of y are, and the gradients, is what a call for each part has, bit by bit; but for what sums over
    the batch."""
    found = conv(inputs, "triton", sizes=sizes, **options)
    leaves = leaves_of(inputs)
    axes = {name: 0 if name in ("weight", "bias") else 2 for name in inputs}
    split = {name: x.split(sizes, axes[name]) for name, x in leaves.items()}
    each = [{name: parts[i] for name, parts in split.items()} for i in range(len(sizes))]
    done = [short_convolution(**one, **options, output_final_state=True, backend="triton") for one in each]
    alone = {f"y{i}": y for i, (y, _) in enumerate(done)}
    ref = differentiate({**alone, "state": torch.cat([state for _, state in done], dim=-1)}, leaves)
    sums = ("dweight", "dbias")
    assert_same(*({name: x for name, x in results.items() if name not in sums} for results in (found, ref)))


def assert_conv_strides(inputs: Inputs, **options: Any) -> None:
    """x is a slice of a wider projection, or laid out backwards; so are the gradients of y or its parts, each in its
    own way."""
    expected = conv(inputs, "triton", **options)
    x = inputs["x"]
    wide = torch.cat([torch.full_like(x[..., :2], 99.0), x, torch.full_like(x, 99.0)], dim=-1)
    for other in (wide[..., 2 : 2 + x.shape[2]], x.mT.contiguous().mT):
        assert torch.equal(other, x) and not other.is_contiguous()
        assert_same(conv({**inputs, "x": other}, "triton", **options), expected)
    leaves = leaves_of(inputs)
    y, _ = short_convolution(**leaves, **options, backend="triton")
    parts = (y,) if isinstance(y, Tensor) else y
    d_parts = [normal(*part.shape, seed=i).to(part) for i, part in enumerate(parts)]
    changes = (
        lambda d, i: torch.cat([d] * (i + 2), dim=-1)[..., : d.shape[2]],
        lambda d, i: d.mT.contiguous().mT if i % 2 == 0 else d,
        lambda d, i: d.transpose(0, 1).contiguous().transpose(0, 1),
    )
    for change in changes:
        others = [change(d, i) for i, d in enumerate(d_parts)]
        grads = (torch.autograd.grad(parts, list(leaves.values()), d, retain_graph=True) for d in (d_parts, others))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def assert_conv_some_results(inputs: Inputs, used: list[int], compiler: str | None = None, **options: Any) -> None:
    """Of the parts of y and the state, those that were not used have gradient zero."""
    found = []
    for backend in ("triton", "torch"):
        leaves = leaves_of(inputs)

        def function(backend: str = backend, **tensors: Tensor) -> list[Tensor]:
            y, state = short_convolution(**tensors, **options, output_final_state=True, backend=backend)
            results = [*((y,) if isinstance(y, Tensor) else y), state]
            return [results[i].sin().sum() for i in used]

        torch.compiler.reset()
        call = function if compiler is None else torch.compile(function, backend=compiler, fullgraph=True)
        grads = torch.autograd.grad(call(**leaves), list(leaves.values()), allow_unused=True)
        found.append(
            {name: torch.zeros_like(x) if d is None else d for (name, x), d in zip(leaves.items(), grads, strict=True)}
        )
    assert_close(found[0], found[1], 1e-5)


# Norms


def norm_inputs(
    *shape: int,
    added: bool = False,
    gated: bool = True,
    weighted: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    """Rows of all lengths, down to where eps counts; what is `added` is y."""
    x = normal(*shape, seed=seed)
    sizes = torch.logspace(-4, 2, shape[0], dtype=x.dtype).view(-1, *[1] * (len(shape) - 1))
    inputs = {"x": x * sizes}
    if added:
        inputs["y"] = normal(*shape, seed=seed + 3) * sizes
    if gated:
        inputs["gate"] = 2 * normal(*shape, seed=seed + 1)
    if weighted:
        inputs["weight"] = normal(shape[-1], seed=seed + 2)
    return {name: x.to(dtype) for name, x in inputs.items()}


def norm(inputs: Inputs, backend: str, compiler: str | None = None, **options: Any) -> Inputs:
    """Results and every gradient: of the norm of a sum if there is a y, with a gate if there is one."""
    leaves = leaves_of(inputs)
    op: Any = add_rms_norm if "y" in inputs else gated_rms_norm if "gate" in inputs else rms_norm

    def function(**tensors: Tensor) -> Any:
        return op(**tensors, **options, backend=backend)

    call = function if compiler is None else torch.compile(function, backend=compiler, fullgraph=True)
    results = call(**leaves)
    return differentiate(dict(zip("sz", results, strict=True)) if "y" in inputs else {"y": results}, leaves)


def assert_norm(inputs: Inputs, dtype: torch.dtype, limit: float, **options: Any) -> None:
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    exact = {name: x.double() for name, x in inputs.items()}
    if "y" in inputs:  # what is normalised has been rounded
        exact |= {"x": (inputs["x"] + inputs["y"]).double(), "y": torch.zeros_like(exact["y"])}
    ref = norm(exact, "torch", **options)
    out = norm(inputs, "triton", **options)
    assert all(x.dtype == dtype for x in out.values())
    assert_close(out, ref, limit)


def assert_sum_and_norm_apart(inputs: Inputs, limit: float, same: str = "sz", **options: Any) -> None:
    """As the sum and its norm one after the other: what is named in `same` to the bit, all the rest to `limit`."""
    leaves = leaves_of(inputs)
    total = leaves["x"] + leaves["y"]
    z = rms_norm(total, leaves["weight"], **options, backend="triton")
    ref = differentiate({"s": total, "z": z}, leaves)
    out = norm(inputs, "triton", **options)
    assert_same({name: out[name] for name in same}, {name: ref[name] for name in same})
    assert all(out[name].dtype == value.dtype for name, value in ref.items())
    assert_close(out, ref, limit)


def assert_either_gradient(inputs: Inputs, limit: float, compiler: str | None = None, **options: Any) -> None:
    """Of the sum alone, and of the norm alone; the other result is not used. What has no gradient is zero."""
    for used in (0, 1):
        found = []
        for backend, dtype in (("triton", None), ("torch", torch.float64)):
            leaves = leaves_of({name: x.to(dtype or x.dtype) for name, x in inputs.items()})

            def function(**tensors: Tensor) -> Tensor:
                return add_rms_norm(**tensors, **options, backend=backend)[used]  # noqa: B023

            ours = compiler is not None and backend == "triton"
            result = (torch.compile(function, backend=compiler, fullgraph=True) if ours else function)(**leaves)
            d = normal(*result.shape).to(result)
            grads = torch.autograd.grad(result, list(leaves.values()), d, allow_unused=True)
            pairs = zip(leaves.items(), grads, strict=True)
            found.append({name: torch.zeros_like(x) if d is None else d for (name, x), d in pairs})
        assert_close(found[0], found[1], limit)


def assert_gradients_are_apart(inputs: Inputs) -> None:
    """x and y in one dtype have one gradient; what is done to one of them later is not done to the other."""
    leaves = leaves_of(inputs)
    results = add_rms_norm(**leaves, backend="triton")
    torch.autograd.backward(results, [torch.ones_like(x) for x in results], retain_graph=True)
    first = {name: x.grad.clone() for name, x in leaves.items() if x.grad is not None}
    assert torch.equal(first["x"], first["y"])
    with torch.no_grad():
        assert leaves["x"].grad is not None and leaves["y"].grad is not None
        leaves["x"].grad.zero_()
        assert torch.equal(leaves["y"].grad, first["y"])
    torch.autograd.backward(results, [torch.ones_like(x) for x in results])
    assert torch.equal(leaves["x"].grad, first["x"])
    assert torch.equal(leaves["y"].grad, 2 * first["y"])


def assert_norm_rows_alone(inputs: Inputs) -> None:
    """Every row has the output that it has alone, and but for the weight's the gradients."""

    def results(inputs: Inputs) -> Inputs:
        leaves = leaves_of(inputs)
        y = gated_rms_norm(**leaves, backend="triton")
        d_x, d_gate = torch.autograd.grad(y, (leaves["x"], leaves["gate"]), inputs["gate"])
        return {"y": y.detach(), "dx": d_x, "dgate": d_gate}

    together = results(inputs)
    for n in range(len(inputs["x"])):
        alone = results({name: x if name == "weight" else x[n : n + 1] for name, x in inputs.items()})
        assert_same(alone, {name: x[n : n + 1] for name, x in together.items()})


def assert_norm_strides(inputs: Inputs, limit: float = 0.0) -> None:
    """Parts of wider tensors, or laid out backwards: the same bits, or as near as `limit`."""
    expected = norm(inputs, "triton")
    for change in (lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]], lambda x: x.mT.contiguous().mT):
        others = {name: x if name == "weight" else change(x) for name, x in inputs.items()}
        assert not others["x"].is_contiguous()
        if limit:
            assert_close(norm(others, "triton"), expected, limit)
        else:
            assert_same(norm(others, "triton"), expected)


# SwiGLU


def gate_inputs(*shape: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """x [..., 2·N] of this shape: gates from closed to open, and of 0."""
    x = 3 * normal(*shape)
    gates = x.view(-1, shape[-1])[0, : shape[-1] // 2]
    gates[:3] = torch.tensor([0, -100, 100])[: len(gates)]
    return {"x": x.to(dtype)}


def gate(inputs: Inputs, backend: str, compiler: str | None = None) -> Inputs:
    """y and x's gradient."""
    leaves = leaves_of(inputs)

    def function(x: Tensor) -> Tensor:
        return swiglu(x, backend=backend)

    call = function if compiler is None else torch.compile(function, backend=compiler, fullgraph=True)
    return differentiate({"y": call(**leaves)}, leaves)


def assert_gate(inputs: Inputs, dtype: torch.dtype, limit: float) -> None:
    inputs = {"x": inputs["x"].to(dtype)}
    out = gate(inputs, "triton")
    assert all(x.dtype == dtype for x in out.values())
    assert out["dx"].is_contiguous()
    assert_close(out, gate({"x": inputs["x"].double()}, "torch"), limit)


def assert_gate_strides(inputs: Inputs) -> None:
    """x is a part of wider rows, as padding leaves it, or laid out backwards; so is y's gradient; rows come alone."""
    x = inputs["x"]
    expected = gate(inputs, "triton")
    for other in (torch.cat([x, torch.full_like(x[..., :3], 99.0)], dim=-1)[..., :-3], x.mT.contiguous().mT):
        assert torch.equal(other, x) and not other.is_contiguous()
        assert_same(gate({"x": other}, "triton"), expected)
    leaf = x.detach().requires_grad_()
    y = swiglu(leaf, backend="triton")
    d_y = normal(*y.shape).to(y)
    for other in (torch.cat([d_y, d_y], dim=-1)[..., : y.shape[-1]], d_y.mT.contiguous().mT):
        grads = (torch.autograd.grad(y, leaf, d, retain_graph=True)[0] for d in (d_y, other))
        assert torch.equal(*grads)
    for n in range(len(x)):
        assert torch.equal(swiglu(x[n : n + 1], backend="triton"), expected["y"][n : n + 1])


# The loss


def loss_inputs(N: int, dim: int, vocab: int, dtype: torch.dtype = torch.float64, ignored: float = 0.3) -> Inputs:
    """Logits of deviation 3, and targets of which a part does not count."""
    targets = torch.randint(vocab, (N,), generator=torch.Generator().manual_seed(2))
    targets[torch.rand(N, generator=torch.Generator().manual_seed(3)) < ignored] = -100
    x, weight = normal(N, dim), 3 * dim**-0.5 * normal(vocab, dim, seed=1)
    return {"x": x.to(dtype), "weight": weight.to(dtype), "targets": targets}


def loss(inputs: Inputs, backend: str, compiler: str | None = None, factor: float = 0.1, **options: Any) -> Inputs:
    """The loss, and the gradients of x and weight of `factor` times it."""
    targets = inputs["targets"]
    leaves = leaves_of({name: x for name, x in inputs.items() if name != "targets"})

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, **options, backend=backend)

    call = function if compiler is None else torch.compile(function, backend=compiler, fullgraph=True)
    result = call(**leaves)
    d_x, d_weight = torch.autograd.grad(factor * result, list(leaves.values()))
    return {"loss": result.detach(), "dx": d_x, "dweight": d_weight}


def exact_loss(inputs: Inputs, **options: Any) -> Inputs:
    """In float64 over the same rounded inputs."""
    return loss({name: x if name == "targets" else x.double() for name, x in inputs.items()}, "torch", **options)


def assert_loss(out: Inputs, ref: Inputs, limit: float, loss_limit: float) -> None:
    assert_close({"loss": out["loss"]}, {"loss": ref["loss"]}, loss_limit)
    assert_close({x: out[x] for x in ("dx", "dweight")}, {x: ref[x] for x in ("dx", "dweight")}, limit)
