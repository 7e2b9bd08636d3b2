"""Optimizers and learning-rate schedules.

Which parameter gets what:

| parameters                                             | adamw | muon  | weight decay |
|--------------------------------------------------------|-------|-------|--------------|
| matrices (weights of linear layers) outside the gates  | AdamW | Muon  | yes          |
| matrices of the gates (decay, write strength, output)  | AdamW | Muon  | no           |
| embedding and head                                     | AdamW | AdamW | no           |
| norms, biases, convolutions, A_log, dt_bias            | AdamW | AdamW | no           |

Muon (Jordan et al. 2024): the Nesterov momentum of a matrix's gradient, orthogonalised, is the update. It is scaled by
0.2 · √max(rows, columns), which gives it the root mean square of an AdamW update (Liu et al. 2025), so that one
learning rate and one weight decay serve both.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kda_lm.mixers import Gate
from kda_lm.model import LM

# Quintic Newton–Schulz coefficients (Jordan et al. 2024): steep at 0, and singular values end within about 1 ± 0.3.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and schedule. All counts are optimizer steps, whatever the accumulation."""

    optimizer: Literal["adamw", "muon"] = "muon"
    lr: float = 0.012
    adamw_lr: float | None = None  # with muon: of what AdamW updates; null: lr
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.9  # Muon's
    weight_decay: float = 0.1  # decoupled: weights shrink by lr · weight_decay a step
    grad_clip: float = 1.0  # largest norm of the whole gradient; 0: no clipping
    z_loss: float = 0.0  # weight of the squared log Σ exp of the logits in the training loss
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 20  # linear from 0
    decay_fraction: float = 0.2  # wsd: the last part of the run, over which the rate falls linearly
    min_lr_ratio: float = 0.1  # the rate at the end, as a part of lr

    def __post_init__(self) -> None:
        if self.lr <= 0 or (self.adamw_lr is not None and self.adamw_lr <= 0):
            raise ValueError("lr and adamw_lr take positive numbers")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes 0 up to, not including, 1")
        for name in ("eps", "weight_decay", "grad_clip", "z_loss", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes 0 or more")
        for name in ("decay_fraction", "min_lr_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes 0 to 1")


def parameter_groups(model: LM, config: OptimConfig) -> list[dict[str, Any]]:
    """The table in the module's docstring as optimizer groups; every trainable parameter is in exactly one."""
    tables = {id(model.embedding.weight), id(model.head.weight)}
    in_gate = {id(p) for module in model.modules() if isinstance(module, Gate) for p in module.parameters()}
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - tables
    members: dict[tuple[bool, bool], list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        is_matrix = id(parameter) in matrices
        muon = is_matrix and config.optimizer == "muon"
        members[muon, is_matrix and id(parameter) not in in_gate].append(parameter)
    return [
        {"params": parameters, **group_options(config, muon, decay)} for (muon, decay), parameters in members.items()
    ]


def group_options(config: OptimConfig, muon: bool, decay: bool) -> dict[str, Any]:
    """What `config` says of a group; `peak_lr` is the rate that the schedule scales."""
    own_lr = config.adamw_lr is not None and config.optimizer == "muon" and not muon
    lr = config.adamw_lr if own_lr else config.lr
    options: dict[str, Any] = {
        "muon": muon,
        "decay": decay,
        "lr": lr,
        "peak_lr": lr,
        "weight_decay": config.weight_decay if decay else 0.0,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
    }
    return {**options, "momentum": config.momentum} if muon else options


def apply_options(optimizer: torch.optim.Optimizer, config: OptimConfig) -> None:
    """Have a restored optimizer go on with the options of `config` instead of those it was saved with."""
    for group in optimizer.param_groups:
        group.update(group_options(config, group["muon"], group["decay"]))


class MuonAdamW(torch.optim.AdamW):
    """AdamW for every group but those with `muon: True`, whose matrices Muon updates; see the module's docstring.

    One optimizer rather than two, so that one step is one step to schedules, checkpoints and step counters.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, foreach=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group["muon"]]
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["muon"]:
                self._muon_step(group)
        return loss

    def _muon_step(self, group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape[parameter.shape].append(parameter)
        for shape, parameters in by_shape.items():  # matrices of one shape are orthogonalised together
            gradients = [p.grad for p in parameters if p.grad is not None]
            states = [self.state[parameter] for parameter in parameters]
            for parameter, state in zip(parameters, states, strict=True):
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                    state["step"] = torch.tensor(0.0)  # AdamW expects one in every state that it loads
                state["step"] += 1
            buffers = [state["momentum_buffer"] for state in states]
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            updates = orthogonalise(torch.stack(gradients).lerp(torch.stack(buffers), group["momentum"]))
            weights: list[Tensor] = list(parameters)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            scale = 0.2 * math.sqrt(max(shape))
            torch._foreach_add_(weights, updates.to(weights[0].dtype).unbind(), alpha=-group["lr"] * scale)


def orthogonalise(matrices: Tensor) -> Tensor:
    """About U Vᵀ of each matrix U Σ Vᵀ in [N, rows, columns], by Newton–Schulz; bf16 on a GPU, else float32."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    if tall := x.shape[-2] > x.shape[-1]:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # singular values into (0, 1]
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def build_optimizer(model: LM, config: OptimConfig) -> torch.optim.Optimizer:
    return MuonAdamW(parameter_groups(model, config))


def lr_factor(config: OptimConfig, max_steps: int, step: int) -> float:
    """What the learning rate of the update after `step` finished ones is multiplied by.

    cosine:   warm-up, then half a cosine down to min_lr_ratio at max_steps
    wsd:      warm-up, then 1, then a straight line down to min_lr_ratio over the last decay_fraction of the run
    constant: warm-up, then 1
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":
        start = max(config.warmup_steps, round(max_steps * (1 - config.decay_fraction)))
    else:
        start = config.warmup_steps
    progress = min(max((step - start) / max(max_steps - start, 1), 0.0), 1.0)
    shape = progress if config.schedule == "wsd" else (1 - math.cos(math.pi * progress)) / 2
    return 1 - (1 - config.min_lr_ratio) * shape


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Before a step: every group's rate is `factor` times its peak. A schedule without state resumes by itself."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
