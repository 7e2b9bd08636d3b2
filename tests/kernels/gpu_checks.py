"""What the tests on a GPU share: inputs placed there, the reference in float64, and how close results have to be.

Errors are ‖out − ref‖ / ‖ref‖ over the same rounded inputs.
"""

from collections.abc import Iterator
from typing import Any

import kernel_checks as checks
import pytest
import torch
from recurrence_cases import CELLS, Inputs, error, evaluate, make_inputs

from kernels import chunk

DEVICE = "cuda"

required = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
# Of outputs and states, and of gradients. bfloat16 operands have 2⁻⁹ = 2e-3 at most a rounding, and are summed in
# float32: a few roundings. float16 is multiplied in TF32. float32 stays float32: products in TF32 would be at 1e-3.
LIMITS = {BFLOAT16: (4e-3, 5e-3), FLOAT16: (4e-3, 5e-3), FLOAT32: (1e-5, 1e-5)}
# Token by token everything is float32 but the output, which is rounded once.
ROUNDED = {BFLOAT16: 4e-3, FLOAT16: 5e-4, FLOAT32: 1e-5}

SIZES = {"B": 1, "H": 2, "HV": 4, "K": 64, "V": 64}  # the same where it can be: compiling takes most of the time

cells = pytest.mark.parametrize(("rule", "decay"), CELLS)
KINDS = [("delta", "channel"), ("delta", "scalar"), ("additive", "none")]  # one cell for each set of kernels
kinds = pytest.mark.parametrize(("rule", "decay"), KINDS)
dtypes = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """Several processes may test on one GPU."""
    yield
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def make(rule: str, decay: str, T: int, dtype: torch.dtype = BFLOAT16, **sizes: Any) -> Inputs:
    sizes = {**SIZES, **sizes}
    return checks.placed(make_inputs(rule, decay, T, **sizes), DEVICE, dtype)


def reference(inputs: Inputs, rule: str, decay: str, backend: str = "reference", **options: Any) -> Inputs:
    exact = {name: x.double() for name, x in inputs.items()}
    return evaluate(chunk, exact, rule=rule, decay=decay, backend=backend, **options)


def triton(inputs: Inputs, rule: str, decay: str, form: checks.Form = chunk, **options: Any) -> Inputs:
    """With NaN in all new memory: nothing may be read before it is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return evaluate(form, inputs, rule=rule, decay=decay, backend="triton", **options)
    finally:
        torch.use_deterministic_algorithms(False)


def assert_within(out: Inputs, ref: Inputs, dtype: torch.dtype, **times: float) -> None:
    """As close as LIMITS, or so many times as far for the results that are named."""
    assert out.keys() == ref.keys()
    broken = {name: "not finite" for name, x in out.items() if not x.isfinite().all()}
    for name in ref.keys() - broken.keys():
        found, limit = error(out[name], ref[name]), times.get(name, 1.0) * LIMITS[dtype][name.startswith("d")]
        if found > limit:
            broken[name] = f"{found:.1e} > {limit:.0e}"
    assert not broken, broken


def check(
    inputs: Inputs, rule: str, decay: str, dtype: torch.dtype, times: dict[str, float] | None = None, **options: Any
) -> None:
    options = {"scale": 0.37, **options}
    ref = reference(inputs, rule, decay, **options)
    assert_within(triton(inputs, rule, decay, **options), ref, dtype, **(times or {}))
