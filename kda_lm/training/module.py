"""The LightningModule: one Lightning batch is one optimizer step.

A batch is the list of a step's micro-batches, and accumulation happens inside `training_step`. So Lightning's batch
counter, its step counter, the schedule, the loggers and the checkpoints all count the same thing, and no checkpoint
can fall into the middle of an accumulation. The gradient is that of

    Σ −log p(target) over all micro-batches and ranks  /  number of targets over all micro-batches and ranks

which is the big batch's gradient whatever the masks are. With `optim.z_loss` the sum, and so train/loss, has that in
it, too; validation never has.

With `cuda_graph` a micro-batch's forward and backward are recorded once and replayed, see graph.py.
"""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from kda_lm.errors import UserError
from kda_lm.evaluation.tasks import TaskScore
from kda_lm.evaluation.text import Score, Tally
from kda_lm.model import LM
from kda_lm.training.graph import Recorded
from kda_lm.training.optim import OptimConfig, apply_options, build_optimizer, lr_factor, set_learning_rate

MicroBatch = dict[str, Tensor]
AHEAD = {"cpu": 1, "cuda": 8}  # steps that the host may start before it looks at what the device made of them


class TrainingModule(lightning.LightningModule):
    """Trains `model`; `metadata` are plain values that go into every checkpoint beside the model's own."""

    def __init__(
        self,
        model: LM,
        optim: OptimConfig,
        max_steps: int,
        metadata: dict[str, Any],
        val_bytes: int | None = None,
        cuda_graph: bool = False,
        new_tally: Callable[[], Tally] = Tally,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.optim = optim
        self.max_steps = max_steps
        self.metadata = metadata
        self.val_bytes = val_bytes
        self.cuda_graph = cuda_graph  # on one GPU, without cu_seqlens
        self.val_score: Score | TaskScore | None = None  # the latest validation's
        self._new_tally = new_tally
        self._tally = new_tally()
        self._saved_rng: dict[str, Any] | None = None
        self._recorded: Recorded | None = None
        self._activations = 0  # bytes that the last forward left for its backward
        self._unseen: list[Tensor] = []  # loss and gradient norm of the latest steps

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, self.optim)

    def training_step(self, batch: list[MicroBatch], batch_idx: int) -> dict[str, Any]:
        """One optimizer step; its loss and gradient norm are tensors, for reading them waits for the device.

        Raises UserError: see `settle`.
        """
        optimizer: Any = self.optimizers()
        targets = torch.stack([(micro["targets"] != -100).sum() for micro in batch]).sum()
        targets = self._sum_over_ranks(targets).clamp(min=1)
        factor = self.trainer.world_size / targets  # DDP averages gradients over ranks; the sum is wanted
        add_gradients = self._recorded or self._add_gradients
        total = torch.zeros((), device=self.device)
        for i, micro in enumerate(batch):
            with self._synchronise_gradients(i == len(batch) - 1):
                total += add_gradients(**micro, factor=factor)
        loss = self._sum_over_ranks(total) / targets
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.grad_clip or float("inf"))
        step = self.trainer.global_step + 1
        rate = lr_factor(self.optim, self.max_steps, step - 1)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not self.cuda_graph)
        self._unseen.append(torch.stack([loss, norm]))
        if len(self._unseen) >= AHEAD[self.device.type]:
            self.settle()
        metrics = {"train/loss": loss, "train/grad_norm": norm, "train/lr": self.optim.lr * rate}
        if self.device.type == "cuda":
            metrics["train/activation_mib"] = self._activations / 2**20
            metrics["train/peak_memory_mib"] = torch.cuda.max_memory_allocated(self.device) / 2**20
        return metrics

    def settle(self) -> None:
        """Wait for the device to do all that was started.

        Raises UserError naming the first step of those since the last call whose loss or gradient norm is not finite.
        The weights have been updated with it then; no checkpoint has them.
        """
        unseen = torch.stack(self._unseen).tolist() if self._unseen else []
        self._unseen = []
        for step, figures in enumerate(unseen, start=self.trainer.global_step - len(unseen) + 1):
            for what, value in zip(("loss", "gradient norm"), figures, strict=True):
                if not np.isfinite(value):
                    raise UserError(
                        f"step {step}: the {what} is {value}; stopped, the checkpoints are of earlier steps (a lower "
                        "optim.lr or a longer optim.warmup_steps may help)"
                    )

    def _add_gradients(self, factor: Tensor, **micro: Tensor) -> Tensor:
        """Add the gradient of factor · loss to the parameters', and return the loss, summed over targets."""
        held = self._allocated()
        nll, _ = self.model.loss(**micro, z_loss=self.optim.z_loss)
        self._activations = self._allocated() - held
        self.manual_backward(nll * factor)
        return nll.detach()

    def _allocated(self) -> int:
        """Bytes of the GPU that tensors take now; 0 on a CPU."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def on_validation_model_zero_grad(self) -> None:
        """Lightning drops all gradients before a validation, but a graph adds to those that it was recorded with."""
        if not self.cuda_graph:
            super().on_validation_model_zero_grad()

    def on_validation_epoch_start(self) -> None:
        self._tally = self._new_tally()

    def validation_step(self, batch: MicroBatch, batch_idx: int) -> None:
        self._tally.add_batch(self.model, batch)

    def on_validation_epoch_end(self) -> None:
        self._tally.over_ranks(self.device)
        self.val_score = self._tally.score(self.val_bytes)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.settle()
        checkpoint["kda_lm"] = {**self.model.hyperparameters(), **self.metadata}
        checkpoint["rng"] = {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all(),
            "python": random.getstate(),
            "numpy": _plain(np.random.get_state(legacy=False)),
        }
        # The run's last batch is the last only until somebody gives the run more steps.
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._saved_rng = checkpoint["rng"]

    def on_train_start(self) -> None:
        self._recorded = Recorded(self._add_gradients) if self.cuda_graph else None
        self._unseen = []  # an earlier training may have ended in an error
        apply_options(self.optimizers(), self.optim)  # type: ignore[arg-type]
        # As late as possible: building loaders draws random numbers, too.
        if self._saved_rng is not None:
            version, internal, gauss = self._saved_rng["python"]
            torch.set_rng_state(self._saved_rng["torch"].cpu())
            random.setstate((version, tuple(internal), gauss))
            np.random.set_state(self._saved_rng["numpy"])
            if len(self._saved_rng["cuda"]) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all([state.cpu() for state in self._saved_rng["cuda"]])
            self._saved_rng = None

    def on_train_end(self) -> None:
        self.settle()
        self.release()

    def release(self) -> None:
        """Let a graph go, and the gradients that it adds to: their memory, and they would not follow the weights to
        another device. Where training ends in an error, Lightning does not say so to a module.
        """
        self._recorded = None
        if self.cuda_graph:
            self.zero_grad(set_to_none=True)

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self.trainer.world_size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def _synchronise_gradients(self, last: bool) -> AbstractContextManager[None]:
        wrapped = self.trainer.strategy.model
        if isinstance(wrapped, DistributedDataParallel) and not last:
            return wrapped.no_sync()
        return nullcontext()


def _plain(value: Any) -> Any:
    """Nested dicts with NumPy arrays as lists: what a checkpoint may hold and still load with weights_only=True."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value
