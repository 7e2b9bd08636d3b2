"""Training, evaluation and decoding on a GPU: skipped, visibly, without one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import PUBLISHED, compose_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("kind", PUBLISHED)
def test_training_on_the_gpu(
    kind: str, run: Callable[..., tuple[dict[str, Any], Path]], resume: Callable[..., dict[str, Any]]
) -> None:
    """`auto` trains in bf16 on the GPU; sampling and evaluation agree with the CPU; one answer whichever way it is
    computed; a resumed run goes on."""
    from scripts.evaluate import run as evaluate
    from scripts.evaluate import run_parity

    options = [f"model.pattern=[{kind}]", "trainer.accelerator=auto", f"mixers.{kind}.num_heads=2"]
    summary, folder = run("gpu", *options)
    assert summary["device"] == torch.cuda.get_device_name()
    ckpt = f"ckpt={folder / 'checkpoints' / 'last.ckpt'}"
    same = evaluate(compose_config("evaluate", ckpt))
    assert same.loss == pytest.approx(summary["val/loss"], rel=1e-4)
    for device in ("cpu", "gpu"):
        exact = evaluate(compose_config("evaluate", ckpt, f"accelerator={device}", "precision=32-true"))
        assert exact.loss == pytest.approx(summary["val/loss"], rel=2e-2)
    found = run_parity(compose_config("parity", ckpt, "length=100", "splits=3"))
    assert [x.precision for x in found] == ["32-true", "bf16-mixed"]
    assert resume("gpu", "trainer.max_steps=12")["steps"] == 12
