"""Widths that the kernels take, and what they are compiled for."""

from functools import cache

import torch

NARROWEST = 64  # columns of a tensor-core operand: Triton 3.7.1 compiles 32 wrongly
WIDEST = 256  # channels of a head
WIDEST_NORM = 8192  # numbers of a row that a norm takes: 16 a thread
MOST_PARTS = 3  # tensors that the short convolution gives its channels in: q, k and v


def padded(width: int) -> int:
    """The tile width for so many channels: the power of two from 64 on that holds them."""
    return max(NARROWEST, 1 << (width - 1).bit_length())


@cache
def capability(device: torch.device) -> int:
    """90 for an H100 or H200; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def multiprocessors(device: torch.device) -> int:
    """132 for an H100 or H200; 1 without a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
