"""Which device and which arithmetic `auto` means, the same for training, evaluation and sampling."""

import ctypes
import sys
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


def keep_freed_memory() -> None:
    """Have glibc keep freed buffers for the next step instead of returning them to the system.

    Every step of a CPU run takes and frees the same large tensors, and fresh pages cost more than the arithmetic on
    them: the default run is 1.5 times as fast with this. The process then stays as large as it ever was.
    """
    if not sys.platform.startswith("linux"):
        return
    trim_threshold, mmap_threshold = -1, -3  # mallopt's names for them (malloc.h)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_threshold, 2**30)


def arithmetic(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context to run a model in outside of a Lightning Trainer."""
    if resolve_precision(precision, device) == "bf16-mixed":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()
