"""Rotary positions in Triton's interpreter: see interpreter.py. test_fused_gpu.py has the real compiler."""

import interpreter
import pytest
import torch
from recurrence_cases import BFLOAT16_ERROR, FLOAT32_ERROR

interpreter.required()

import bfloat16  # noqa: E402
import rotary_checks as checks  # noqa: E402

from kernels import rotary  # noqa: E402
from kernels.gpu import rotary as implementation  # noqa: E402

LIMITS = {torch.float32: FLOAT32_ERROR, torch.bfloat16: BFLOAT16_ERROR}


@pytest.fixture(autouse=True)
def nan_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    bfloat16.install(monkeypatch)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("B", "T", "H", "D"), [(3, 70, 3, 20), (2, 1, 5, 64), (1, 3, 1, 2)])
def test_matches_complex_numbers(dtype: torch.dtype, norm: bool, B: int, T: int, H: int, D: int) -> None:
    """Several programs, the last not full, and several heads in each or one; positions for all rows and for each."""
    inputs = checks.make_inputs(B, T, H, D, norm)
    for positions in (checks.places(T), checks.places(T, B)):
        checks.assert_exact(inputs, positions, dtype, LIMITS[dtype], "triton")


def test_several_heads_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their number, the output is the same in bits."""
    inputs = checks.make_inputs(2, 40, 5, 8, True, torch.float32)
    alone = checks.results(inputs, checks.places(40), "triton")
    monkeypatch.setattr(implementation, "PROGRAMS", 1)
    checks.assert_exact(inputs, checks.places(40), torch.float32, FLOAT32_ERROR, "triton")
    together = checks.results(inputs, checks.places(40), "triton")
    assert torch.equal(alone["y"], together["y"]) and torch.equal(alone["dx"], together["dx"])


@pytest.mark.parametrize("T", [1, 7])
def test_any_strides(T: int) -> None:
    checks.assert_strides_do_not_matter(checks.make_inputs(3, T, 2, 8, True, torch.float32), checks.places(T, 3))


@pytest.mark.parametrize("norm", [False, True])
def test_operator(norm: bool) -> None:
    inputs = {name: x.requires_grad_() for name, x in checks.make_inputs(2, 3, 2, 8, norm, torch.float32).items()}
    tensors = (inputs["x"], torch.arange(3), checks.frequencies(8), inputs.get("weight"))
    torch.library.opcheck(
        torch.ops.kda_lm.rotary_forward.default,
        (*tensors, 1e-6),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    detached = [None if x is None else x.detach() for x in tensors]
    torch.library.opcheck(
        torch.ops.kda_lm.rotary_backward.default,
        (torch.ones(2, 3, 2, 8), *detached, 1e-6),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_compiles_without_graph_breaks() -> None:
    inputs, positions = checks.make_inputs(2, 3, 2, 8, True, torch.float32), checks.places(3)
    compiled, plain = (checks.results(inputs, positions, "triton", compiler) for compiler in ("aot_eager", None))
    assert all(torch.equal(compiled[name], value) for name, value in plain.items())


def test_what_it_leaves_to_torch() -> None:
    turns, positions = checks.frequencies(4), torch.arange(3)
    x = torch.ones(1, 3, 1, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"backend: got 'triton' for D = 4 in torch\.float64, accepted: D ≤ 256"):
        rotary(x, positions, turns, backend="triton")
    assert torch.equal(rotary(x, positions, turns), rotary(x, positions, turns, backend="torch"))
