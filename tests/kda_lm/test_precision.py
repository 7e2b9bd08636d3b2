"""The dtype that a run asks for is the dtype that its products have, for every kind of layer, or the run says no (B14).

test_devices.py trains with two processes; here is what such a process wraps around the model.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import pytest
import torch
import torch.distributed as dist
from support import PUBLISHED, small_options, tiny_lm
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from kda_lm.errors import UserError
from kda_lm.training.module import TrainingModule
from kda_lm.training.optim import OptimConfig

Run = Callable[..., tuple[dict[str, Any], Path]]
PRODUCTS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}


@contextmanager
def dtypes_of_products() -> Iterator[set[torch.dtype]]:
    """Those that linear layers return with gradients on, inside: of training alone."""
    found: set[torch.dtype] = set()

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.Linear) and output.requires_grad:
            found.add(output.dtype)

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()


EVERY_KIND = [f"model.pattern=[{','.join(PUBLISHED)}]", f"model.num_layers={len(PUBLISHED)}"]
HEADS = [f"mixers.{kind}.num_heads=2" for kind in PUBLISHED]


@pytest.mark.parametrize("precision", PRODUCTS)
def test_a_run_has_the_dtype_that_it_names(precision: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """In every product of every kind of layer, and says so before it starts."""
    options = [*EVERY_KIND, *HEADS, "trainer.max_steps=2", f"trainer.precision={precision}"]
    with dtypes_of_products() as found:
        summary, _ = run("run", *options)
    assert found == {PRODUCTS[precision]}
    assert f"cpu, {precision}, kernels: torch" in capsys.readouterr().out
    assert summary["steps"] == 2 and summary["val/loss"] < 10


@pytest.mark.parametrize("kind", PUBLISHED)
def test_bf16_weights_are_refused_before_anything_is_read(kind: str, run: Run, corpus: Path) -> None:
    corpus.unlink()
    with pytest.raises(UserError, match=r"^trainer.precision.*'bf16-true'.*auto, 32-true, bf16-mixed$"):
        run("run", f"model.pattern=[{kind}]", "trainer.precision=bf16-true")
    assert not Path("run").exists()


@pytest.fixture
def one_process() -> Iterator[None]:
    """Leaves neither a process group nor its variables behind."""
    with mock.patch.dict(os.environ):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("precision", PRODUCTS)
@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")  # of Lightning, about a single process
def test_a_process_of_several_has_it_too(precision: Any) -> None:
    wrapped: list[bool] = []

    class Look(lightning.Callback):
        def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
            wrapped.append(isinstance(trainer.strategy.model, DistributedDataParallel))

    model = tiny_lm(*map(small_options, PUBLISHED)).train()
    module = TrainingModule(model, OptimConfig(optimizer="adamw", warmup_steps=0), 1, {})
    ids = torch.randint(29, (2, 8), generator=torch.Generator().manual_seed(0))
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=1, precision=precision, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Look()],
    )  # fmt: skip
    with dtypes_of_products() as found:
        trainer.fit(module, DataLoader([[{"tokens": ids, "targets": ids}]], batch_size=None))  # type: ignore[arg-type]
    assert wrapped == [True] and trainer.global_step == 1
    assert found == {PRODUCTS[precision]}
