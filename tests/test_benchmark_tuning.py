"""scripts/benchmarking/tuning.py: the peer's autotuner by parts, and hastened, on a kernel that only takes notes."""

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)

import triton
import triton.testing
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

from scripts.benchmarking import tuning


class Kernel:
    """Runs with BLOCK 1, 2, 4, …; what is larger than `fits` is too large for the GPU."""

    arg_names = ("x", "BLOCK")
    fn = staticmethod(lambda: None)  # the function in Python, which is never called

    def __init__(self, fits: int = 1000) -> None:
        self.fits = fits
        self.ran: list[int] = []

    def run(self, x: int, BLOCK: int, **options: Any) -> int:
        if self.fits < BLOCK:
            raise OutOfResources(BLOCK, self.fits, "shared memory")
        self.ran.append(BLOCK)
        return BLOCK


def restored(patch: pytest.MonkeyPatch) -> None:
    """What `tuning` replaces, at the end of the patch."""
    for name in ("_bench", "run", "do_bench", "check_disk_cache"):
        patch.setattr(Autotuner, name, getattr(Autotuner, name))


@pytest.fixture(autouse=True)
def restore(monkeypatch: pytest.MonkeyPatch) -> None:
    restored(monkeypatch)


def tuner(kernel: Kernel, blocks: list[int], **options: Any) -> Any:
    configs = [triton.Config({"BLOCK": block}) for block in blocks]
    return Autotuner(kernel, list(kernel.arg_names), configs, ["x"], None, None, **options)


def test_parts_compile_everything_once() -> None:
    compiled = []
    for part in range(3):
        with pytest.MonkeyPatch.context() as patch:
            restored(patch)
            tuning.take_part(part, 3)
            kernel = Kernel()
            tuner(kernel, [1, 2, 4, 8, 16]).run(7, grid=None, warmup=False)
        assert kernel.ran[-1] in kernel.ran[:-1]  # chosen among its own
        compiled += kernel.ran[:-1]
    assert sorted(compiled) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(("blocks", "fits", "chosen"), [([64, 2, 4], 8, 2), ([64, 32, 4], 8, 4)])
def test_a_part_of_what_does_not_fit_chooses_another(blocks: list[int], fits: int, chosen: int) -> None:
    tuning.take_part(0, 3)
    kernel = Kernel(fits)
    assert tuner(kernel, blocks).run(7, grid=None, warmup=False) == chosen


def test_a_part_keeps_no_times() -> None:
    """The run would find them, and choose by them."""

    def no_file(*arguments: Any) -> bool:
        raise AssertionError("a part reads and writes no times")

    Autotuner.check_disk_cache = no_file
    tuning.take_part(0, 2)
    kernel = Kernel()
    assert tuner(kernel, [1, 2, 4], cache_results=True).run(7, grid=None, warmup=False) == 1


def test_nothing_fits() -> None:
    tuning.take_part(0, 2)
    with pytest.raises(OutOfResources):
        tuner(Kernel(0), [1, 2, 4]).run(7, grid=None, warmup=False)


def test_hastened(monkeypatch: pytest.MonkeyPatch) -> None:
    """All candidates, each for as long as was asked."""
    times = []

    def do_bench(call: Any, warmup: float, rep: float, quantiles: Any) -> list[float]:
        times.append((warmup, rep))
        return [float(call() or len(times))] * 3

    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    tuning.hasten(10)
    kernel = Kernel()
    assert tuner(kernel, [4, 2, 1]).run(7, grid=None, warmup=False) == 4  # the first is said to be fastest
    assert times == [(2.0, 8.0)] * 3 and kernel.ran == [4, 2, 1, 4]
