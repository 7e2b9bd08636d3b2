"""Which device and which arithmetic `auto` means, the same for training, evaluation and sampling."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypeAlias

import torch

Accelerator: TypeAlias = Literal["auto", "cpu", "gpu"]
Precision: TypeAlias = Literal["auto", "32-true", "bf16-mixed"]


def resolve_device(accelerator: Accelerator) -> torch.device:
    """`auto` is the GPU if there is one.

    Raises ValueError: gpu asked for, and there is none.
    """
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise ValueError("accelerator is gpu, but no CUDA GPU is available; it takes auto or cpu here")
    return torch.device("cpu" if accelerator == "cpu" or not torch.cuda.is_available() else "cuda")


def resolve_precision(precision: Precision, device: torch.device) -> Literal["32-true", "bf16-mixed"]:
    """`auto` is bf16 autocast over float32 weights on a GPU, float32 on a CPU."""
    if precision == "auto":
        return "bf16-mixed" if device.type == "cuda" else "32-true"
    return precision


def arithmetic(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context to run a model in outside of a Lightning Trainer."""
    if resolve_precision(precision, device) == "bf16-mixed":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()
