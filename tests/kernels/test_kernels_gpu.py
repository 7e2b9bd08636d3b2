"""The kernels on a GPU: skipped, visibly, without one."""

import pytest
import torch
from recurrence_cases import BFLOAT16_ERROR, CELLS, GATED, GATES, Inputs, error, make_inputs

import kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

# float32 inputs stay float32: products in TF32 would be at 1e-3.
FLOAT32_GPU_ERROR = 1e-5
# Gradients come back in bfloat16, too, after a float32 backward: one rounding, as for o.
ERRORS = {torch.float32: FLOAT32_GPU_ERROR, torch.bfloat16: BFLOAT16_ERROR}


def results(inputs: Inputs, rule: str, decay: str, backend: str) -> dict[str, torch.Tensor]:
    """Output, state and every gradient of a loss that weighs all of them differently."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    o, state = kernels.chunk(**leaves, rule=rule, decay=decay, output_final_state=True, backend=backend)
    assert state is not None
    (o.double().sin().sum() + state.double().sin().sum()).backward()
    return {"o": o, "state": state, **{f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None}}


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize(
    ("rule", "decay", "gate"), [(*cell, g) for cell in CELLS for g in GATES if cell in GATED or g == "mild"]
)
def test_chunk_matches_float64(rule: str, decay: str, dtype: torch.dtype, gate: str) -> None:
    """Against the token-by-token recurrence in float64 over the same rounded inputs, the state float32."""
    inputs = make_inputs(rule, decay, T=130, H=2, HV=4, K=32, V=48, gate=gate)
    rounded = {name: x.to(torch.float32 if name == "initial_state" else dtype) for name, x in inputs.items()}
    there = results({name: x.cuda() for name, x in rounded.items()}, rule, decay, "auto")
    reference = results({name: x.double() for name, x in rounded.items()}, rule, decay, "reference")
    for name, expected in reference.items():
        assert there[name].isfinite().all(), name
        assert error(there[name].cpu(), expected) < ERRORS[dtype], name
