"""Which parameter gets what; AdamW and Muon against torch's; Newton–Schulz; the schedules."""

import math
from typing import Any

import pytest
import torch
from support import error, mixer_options, small_options, tiny_lm
from torch import Tensor, nn

from kda_lm.config import read_config
from kda_lm.errors import UserError
from kda_lm.model import LM
from kda_lm.training.optim import (
    NEWTON_SCHULZ,
    NEWTON_SCHULZ_STEPS,
    OptimConfig,
    build_optimizer,
    lr_factor,
    orthogonalise,
    parameter_groups,
    set_learning_rate,
)

# Layers with every sort of parameter: all gates, convolutions, norms, biases.
LAYERS = [small_options(name) for name in ("kda", "gated_delta", "softmax")]


def expected_treatment(name: str, optimizer: str) -> tuple[bool, bool]:
    """(Muon?, weight decay?) as the table in kda_lm/training/optim.py has it, from the parameter's name."""
    last = name.split(".")[-2:]
    table = name in ("embedding.weight", "head.weight")
    gate = any(part in name for part in ("mixer.decay.", "mixer.write.", "mixer.output_gate."))
    vector = last[-1] in ("A_log", "dt_bias", "bias") or "norm" in name or name.endswith("conv.weight")
    matrix = not table and not vector
    return matrix and optimizer == "muon", matrix and not gate


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_is_in_one_group_as_the_table_says(optimizer: str, tied: bool) -> None:
    model = tiny_lm(*LAYERS, tie_embeddings=tied)
    groups = parameter_groups(model, OptimConfig(optimizer=optimizer, lr=0.5, adamw_lr=0.25, weight_decay=0.3))
    found = {id(p): group for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(found) == len(list(model.parameters()))
    kinds = set()
    for name, parameter in model.named_parameters():
        group = found[id(parameter)]
        treatment = expected_treatment(name, optimizer)
        assert (group["muon"], group["weight_decay"] > 0) == treatment, name
        assert group["weight_decay"] in (0, 0.3)
        assert group["lr"] == (0.25 if optimizer == "muon" and not group["muon"] else 0.5), name
        kinds.add(treatment)
    expected = {(True, True), (True, False), (False, False)} if optimizer == "muon" else {(False, True), (False, False)}
    assert kinds == expected
    assert {expected_treatment(n, "muon")[0] for n, p in model.named_parameters() if p.dim() != 2} == {False}


def test_adamw_lr_defaults_to_lr() -> None:
    groups = parameter_groups(tiny_lm(*LAYERS), OptimConfig(lr=0.5))
    assert {group["lr"] for group in groups} == {0.5}


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def twins(**config: Any) -> tuple[LM, LM, OptimConfig]:
    return tiny_lm(*LAYERS), tiny_lm(*LAYERS), OptimConfig(**config)


def test_adamw_is_torch_adamw() -> None:
    ours, theirs, config = twins(optimizer="adamw", lr=0.01, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-6)
    mine = build_optimizer(ours, config)
    decayed = [p for n, p in theirs.named_parameters() if expected_treatment(n, "adamw")[1]]
    rest = [p for n, p in theirs.named_parameters() if not expected_treatment(n, "adamw")[1]]
    oracle = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    for step in range(6):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        mine.step()
        oracle.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7), name


def newton_schulz(matrix: Tensor) -> Tensor:
    """The iteration again, in float64, one matrix at a time."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.double()
    transpose = x.shape[0] > x.shape[1]
    x = x.T if transpose else x
    x = x / x.norm()
    for _ in range(5):
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    return x.T if transpose else x


def test_muon_by_hand() -> None:
    """Nesterov momentum, orthogonalised, at 0.2 · √max(rows, columns), with decoupled decay; AdamW for the rest."""
    ours, theirs, config = twins(lr=0.02, adamw_lr=0.01, weight_decay=0.3, momentum=0.9)
    mine = build_optimizer(ours, config)
    muon = {n: p for n, p in theirs.named_parameters() if expected_treatment(n, "muon")[0]}
    oracle = torch.optim.AdamW(
        [p for n, p in theirs.named_parameters() if n not in muon], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0
    )
    weights = {n: p.detach().double() for n, p in muon.items()}
    buffers = {n: torch.zeros_like(w) for n, w in weights.items()}
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        mine.step()
        oracle.step()
        for name, parameter in muon.items():
            assert parameter.grad is not None
            gradient = parameter.grad.double()
            buffers[name] = 0.9 * buffers[name] + 0.1 * gradient
            update = newton_schulz(0.1 * gradient + 0.9 * buffers[name])
            decay = 0.3 if expected_treatment(name, "muon")[1] else 0.0
            scale = 0.2 * math.sqrt(max(update.shape))
            weights[name] = weights[name] * (1 - 0.02 * decay) - 0.02 * scale * update
    for name, parameter in ours.named_parameters():
        expected = weights[name] if name in muon else theirs.get_parameter(name)
        # A small singular value grows 3.4445-fold in each of five iterations, and float32's rounding with it.
        assert error(parameter, expected) < (2e-5 if name in muon else 1e-6), name


def test_muon_is_near_torch_muon() -> None:
    """torch.optim.Muon iterates in bf16, which leaves some percent of an update; momentum and scale must agree."""
    shapes = [(24, 16), (16, 24), (16, 16)]
    ours, theirs, config = twins(lr=0.01, weight_decay=0.3, momentum=0.9)
    start = {name: p.detach().clone() for name, p in ours.named_parameters()}
    mine = build_optimizer(ours, config)
    decayed, rest = [], []
    for name, parameter in theirs.named_parameters():
        muon, decay = expected_treatment(name, "muon")
        if muon:
            (decayed if decay else rest).append(parameter)
    oracles = [
        torch.optim.Muon(
            parameters, lr=0.01, weight_decay=decay, momentum=0.9, nesterov=True, ns_coefficients=NEWTON_SCHULZ,
            ns_steps=NEWTON_SCHULZ_STEPS, adjust_lr_fn="match_rms_adamw",
        )
        for parameters, decay in ((decayed, 0.3), (rest, 0.0))
    ]  # fmt: skip
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for optimizer in (mine, *oracles):
            optimizer.step()
    compared = 0
    for name, parameter in ours.named_parameters():
        if expected_treatment(name, "muon")[0]:
            moved = theirs.get_parameter(name) - start[name]
            assert error(parameter - start[name], moved) < 0.05, name
            compared += parameter.shape in shapes
    assert compared > 4


def test_a_parameter_without_gradient_stays() -> None:
    for optimizer in ("muon", "adamw"):
        model = tiny_lm(*LAYERS)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine = build_optimizer(model, OptimConfig(optimizer=optimizer, weight_decay=0.5))
        set_gradients(model, 0)
        still = "blocks.0.mixer.q_proj.weight"
        model.get_parameter(still).grad = None
        engine.step()
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert moved == set(before) - {still}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weight_decay_acts_only_where_documented(optimizer: str) -> None:
    """With zero gradients AdamW and Muon leave weights alone, but for the decay by lr · weight_decay."""
    model = tiny_lm(*LAYERS)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = build_optimizer(model, OptimConfig(optimizer=optimizer, lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if expected_treatment(name, optimizer)[1] else 1.0
        assert torch.allclose(parameter, before[name] * factor, rtol=1e-6, atol=0), name
        assert parameter.isfinite().all()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_optimizer_state_goes_through_a_checkpoint(optimizer: str, tmp_path: Any) -> None:
    ours, theirs, config = twins(optimizer=optimizer)
    mine = build_optimizer(ours, config)
    for step in range(3):
        set_gradients(ours, step)
        mine.step()
    torch.save(mine.state_dict(), tmp_path / "state")
    theirs.load_state_dict(ours.state_dict())
    again = build_optimizer(theirs, config)
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for step in range(3, 5):
        for model, engine in ((ours, mine), (theirs, again)):
            set_gradients(model, step)
            engine.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


# ------------------------------------------------------------------------------ Newton–Schulz


def conditioned(rows: int, columns: int, smallest: float, seed: int = 0) -> Tensor:
    """A matrix with singular values between `smallest` and 1."""
    generator = torch.Generator().manual_seed(seed)
    size = min(rows, columns)
    u, _ = torch.linalg.qr(torch.randn(rows, size, dtype=torch.float64, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(columns, size, dtype=torch.float64, generator=generator))
    return u * torch.linspace(smallest, 1, size, dtype=torch.float64) @ v.T


@pytest.mark.parametrize("shape", [(16, 16), (40, 16), (16, 40), (1, 12), (12, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_orthogonalise(shape: tuple[int, int], size: float) -> None:
    """Singular values come near 1, singular vectors stay, whatever the matrix's size."""
    matrix = conditioned(*shape, smallest=0.1)
    out = orthogonalise((size * matrix).float()[None])[0].double()
    u, values, vh = torch.linalg.svd(out, full_matrices=False)
    assert values.min() > 0.6 and values.max() < 1.3
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ out @ vh.T
    assert error(inner, inner.diag().diag()) < 2e-2 if size < 1e-3 else error(inner, inner.diag().diag()) < 1e-4
    assert (inner.diag() > 0.6).all()  # not turned around


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)], ids=str)
def test_orthogonalising_a_batch_is_orthogonalising_each(shape: tuple[int, int]) -> None:
    matrices = torch.stack([conditioned(*shape, smallest=0.05, seed=i) for i in range(4)])
    matrices *= torch.tensor([1.0, 10.0, 0.01, 3.0], dtype=torch.float64)[:, None, None]
    batch = orthogonalise(matrices.float())
    for one, matrix in zip(batch, matrices, strict=True):
        assert error(one, orthogonalise(matrix.float()[None])[0]) < 1e-5
        assert error(one, newton_schulz(matrix)) < 1e-4
    assert torch.equal(orthogonalise(torch.zeros(2, *shape)), torch.zeros(2, *shape))


# ------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize(
    "schedule, values",
    [
        ("cosine", {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 55: 0.55, 100: 0.1, 150: 0.1}),
        ("wsd", {0: 0.1, 9: 1.0, 10: 1.0, 50: 1.0, 80: 1.0, 90: 0.55, 95: 0.325, 100: 0.1, 150: 0.1}),
        ("constant", {0: 0.1, 9: 1.0, 10: 1.0, 100: 1.0, 150: 1.0}),
    ],
)
def test_schedules(schedule: str, values: dict[int, float]) -> None:
    """Warm-up over 10 of 100 steps, decay over the last fifth (wsd), down to a tenth."""
    config = OptimConfig(schedule=schedule, warmup_steps=10, decay_fraction=0.2, min_lr_ratio=0.1)
    for step, value in values.items():
        assert lr_factor(config, 100, step) == pytest.approx(value, abs=1e-12), step


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("max_steps, warmup", [(1, 0), (1, 1), (5, 0), (5, 5), (5, 50), (100, 99)])
def test_schedules_stay_between_zero_and_one(schedule: str, max_steps: int, warmup: int) -> None:
    for decay_fraction in (0.0, 0.5, 1.0):
        config = OptimConfig(schedule=schedule, warmup_steps=warmup, decay_fraction=decay_fraction, min_lr_ratio=0.0)
        factors = [lr_factor(config, max_steps, step) for step in range(max_steps)]
        assert all(0 < factor <= 1 for factor in factors), factors
        rising = factors[: min(warmup, max_steps)]
        assert rising == sorted(rising)
        assert factors[warmup:] == sorted(factors[warmup:], reverse=True)


def test_the_schedule_multiplies_each_groups_own_rate() -> None:
    model = tiny_lm(*LAYERS)
    config = OptimConfig(lr=0.5, adamw_lr=0.25, warmup_steps=2, schedule="constant")
    optimizer = build_optimizer(model, config)
    seen = []
    for step in range(3):
        set_learning_rate(optimizer, lr_factor(config, 10, step))
        seen.append({group["muon"]: group["lr"] for group in optimizer.param_groups})
        optimizer.step()
    assert seen == [{True: 0.25, False: 0.125}, {True: 0.5, False: 0.25}, {True: 0.5, False: 0.25}]


# ------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    "options, words",
    [
        ({"optimizer": "sgd"}, ["optim.optimizer", "'sgd'", "adamw, muon"]),
        ({"schedule": "linear"}, ["optim.schedule", "'linear'", "cosine, wsd, constant"]),
        ({"lr": -1e-3}, ["lr", "positive"]),
        ({"lr": 0}, ["lr", "positive"]),
        ({"adamw_lr": -1.0}, ["adamw_lr", "positive"]),
        ({"lr": "high"}, ["optim.lr", "'high'", "a finite number"]),
        ({"lr": float("nan")}, ["lr"]),
        ({"lr": float("inf")}, ["lr"]),
        ({"beta1": 1.0}, ["beta1 is 1.0"]),
        ({"beta2": -0.1}, ["beta2 is -0.1"]),
        ({"momentum": 1}, ["momentum is 1"]),
        ({"eps": -1.0}, ["eps is -1.0"]),
        ({"weight_decay": -0.1}, ["weight_decay is -0.1"]),
        ({"weight_decay": float("nan")}, ["weight_decay is nan"]),
        ({"grad_clip": -1.0}, ["grad_clip is -1.0"]),
        ({"z_loss": -1e-4}, ["z_loss is -0.0001"]),
        ({"warmup_steps": -1}, ["warmup_steps is -1"]),
        ({"warmup_steps": 1.5}, ["optim.warmup_steps", "1.5", "a whole number"]),
        ({"decay_fraction": 1.5}, ["decay_fraction is 1.5"]),
        ({"min_lr_ratio": -0.1}, ["min_lr_ratio is -0.1"]),
        ({"nesterov": True}, ["optim", "'nesterov'", "momentum", "grad_clip"]),
    ],
)
def test_refusals(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read_config(OptimConfig, options, "optim")
    message = str(caught.value)
    assert message.startswith("optim") and "\n" not in message
    assert all(word in message for word in words), message


def test_published_optimizers_use_the_whole_table() -> None:
    assert mixer_options("kda")["mixer"] == "recurrent"
    model = tiny_lm(mixer_options("kda"), mixer_options("softmax"))
    assert len(parameter_groups(model, OptimConfig(optimizer="muon"))) == 3
    assert len(parameter_groups(model, OptimConfig(optimizer="adamw"))) == 2
