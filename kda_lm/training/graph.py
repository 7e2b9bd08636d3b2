"""A micro-batch's forward and backward as one CUDA graph.

A step of a small model is some two thousand kernels, which the host takes longer to start than a GPU to run; from a
graph it starts all of them at once. What a graph holds reads and writes the same memory every time: weights that are
changed in place, gradients that are zeroed instead of dropped, and copies of the inputs. Hooks of autograd and of
Lightning around the backward run when it is recorded, not when it is replayed.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kda_lm.errors import UserError


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]  # that the graph reads
    output: Tensor  # that it writes


class Recorded:
    """`function`, of tensors on a GPU by name to a tensor without gradient, replayed from a graph for each set of
    shapes. It may add to tensors that exist, such as `.grad`; nothing in it may depend on numbers that the host reads.

    The first call of a set runs as it is: compilers work then, and gradients come to exist. The second is recorded.

    Raises UserError: it cannot be recorded.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._stream = torch.cuda.Stream()
        self._recordings: dict[tuple[object, ...], _Recording | None] = {}  # None: has run once

    def __call__(self, **inputs: Tensor) -> Tensor:
        key = tuple((name, x.shape, x.dtype) for name, x in inputs.items())
        if key not in self._recordings:
            self._recordings[key] = None
            return self._first(inputs)
        recording = self._recordings[key]
        if recording is None:
            recording = self._recordings[key] = self._record(inputs)
        for static, x in zip(recording.inputs, inputs.values(), strict=True):
            static.copy_(x)
        recording.graph.replay()
        return recording.output.clone()

    def _run(self, inputs: dict[str, Tensor]) -> Tensor:
        """Without autocast's cache: what it keeps would be read after a graph has written over it. A compiler makes
        another version without than with it, so the first call does without, too."""
        dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", dtype, enabled, cache_enabled=False):
            return self._function(**inputs)

    def _first(self, inputs: dict[str, Tensor]) -> Tensor:
        """On the stream that records later: what libraries keep for each stream is there then."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            output = self._run(inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return output

    def _record(self, inputs: dict[str, Tensor]) -> _Recording:
        static = {name: x.clone() for name, x in inputs.items()}
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream()),  # a capture that fails leaves its own stream current
                # Other threads, such as a data loader's, may go on with what a capture of their own would not allow.
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                output = self._run(static)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # Ending the capture fails, too; the reason is what failed before.
            reason = str(error.__context__ or error).partition("\n")[0]
            raise UserError(
                f"a step cannot be recorded as a CUDA graph: {reason}; trainer.cuda_graph=false does without"
            ) from error
        return _Recording(graph, list(static.values()), output)
