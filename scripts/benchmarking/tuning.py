"""The peer's autotuner, hastened: stock it takes minutes an op, for it compiles its candidates one after the other.

`compile_ahead` starts processes that compile a part of the candidates each, into Triton's cache, where the run finds
them. `hasten` times each for fewer milliseconds. Neither changes which candidates there are.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from scripts.benchmarking.cases import Case, Contender, Shape, make_inputs
from scripts.benchmarking.measure import Problem

TOKENS = 2048  # of the calls that only compile
WARMUP_SHARE = 0.2  # of a candidate's time, as in Triton: 25 ms before 100

ONCE, SKIPPED = 1.0, 1e9  # ms that a candidate is said to take: what runs is chosen before what was not tried


def hasten(ms: float) -> None:
    """From here on an autotuner of this process gives every candidate `ms`, warm-up included."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    timed = partial(do_bench, warmup=WARMUP_SHARE * ms, rep=(1 - WARMUP_SHARE) * ms)
    Autotuner.do_bench = property(lambda self: timed)


def take_part(part: int, parts: int) -> None:
    """From here on an autotuner of this process compiles only every `parts`-th candidate, and runs it once."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources

    bench, run = Autotuner._bench, Autotuner.run

    def some(self: Any, *arguments: Any, config: Any, **meta: Any) -> list[float]:
        if self.configs.index(config) % parts != part:
            return [SKIPPED] * 3
        times: list[float] = bench(self, *arguments, config=config, **meta)
        return times

    def once(call: Callable[[], object], quantiles: object = None) -> list[float]:
        call()
        return [ONCE] * 3

    def any_that_fits(self: Any, *arguments: Any, **named: Any) -> object:
        """One that was not tried may not fit the GPU; the kernels after this one are to be compiled all the same."""
        failed: list[Any] = []
        while True:
            try:
                return run(self, *arguments, **named)
            except OutOfResources:
                failed.append(self.best_config)
                others = [config for config in self.configs if config not in failed]
                if not others:
                    raise
                self.cache |= {key: others[0] for key, config in self.cache.items() if config is failed[-1]}

    def unkept(self: Any, key: object, configs: object, benchmark: Callable[[], None]) -> bool:
        """What a candidate was said to take is not for the run to find beside the kernels."""
        benchmark()
        return False

    Autotuner._bench, Autotuner.run, Autotuner.check_disk_cache = some, any_that_fits, unkept
    Autotuner.do_bench = property(lambda self: once)


def compile_part(peer: Contender, cases: list[Case], shapes: list[Shape], dtype: torch.dtype, part: list[int]) -> int:
    """What a process of `compile_ahead` does: forward and backward of everything, few tokens long."""
    take_part(*part)
    device = torch.device("cuda")
    few = dict.fromkeys(Shape(1, min(shape.T, TOKENS), shape.H, shape.D) for shape in shapes)
    for case in cases:
        for shape in few:
            inputs = make_inputs(case, shape, dtype, device, seed=0)
            with contextlib.suppress(Exception):  # the run will tell of it
                Problem.of(inputs).both(peer.bind(case, "chunk"))
                torch.cuda.synchronize()
    return 0


def compile_ahead(script: str, words: list[str], processes: int) -> None:
    """`python script compile-peer words… --part n of processes`, all at once; waits for them."""
    started = [
        subprocess.Popen(
            [sys.executable, script, "compile-peer", *words, "--part", str(part), str(processes)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )
        for part in range(processes)
    ]
    for process in started:
        process.wait()
