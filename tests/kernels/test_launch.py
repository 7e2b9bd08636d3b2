"""Starting a kernel: by Triton the first time, as it was compiled ever after. On stand-ins, so that it needs no GPU."""

from typing import Any

import torch

from kernels.gpu.launch import Launcher, launcher, types


class Kernel:
    """Declares x, T and two constants; notes how it is called. In Triton's interpreter nothing is compiled."""

    __name__ = "stand_in"
    arg_names = ("x", "T", "WIDTH", "FLAG")

    def __init__(self, compiles: bool = True) -> None:
        self.compiles = compiles
        self.calls: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*arguments: Any, **constants: Any) -> Any:
            self.calls.append(("triton", grid, arguments, constants))
            return Compiled(self.calls) if self.compiles else None

        return call


class Compiled:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.calls.append(("compiled", grid, arguments))


CONSTANTS = {"FLAG": True, "num_warps": 4, "WIDTH": 8}


def test_later_calls_take_everything_by_position() -> None:
    kernel, start = Kernel(), Launcher()
    for x, T in (("a", 3), ("b", 5), ("c", 7)):
        start(kernel, (2, 4), (x, T), CONSTANTS)
    assert kernel.calls == [
        ("triton", (2, 4), ("a", 3), CONSTANTS),
        ("compiled", (2, 4, 1), ("b", 5, 8, True)),
        ("compiled", (2, 4, 1), ("c", 7, 8, True)),
    ]


def test_interpreted_kernels_are_called_as_ever() -> None:
    kernel, start = Kernel(compiles=False), Launcher()
    for _ in range(2):
        start(kernel, (1,), ("a", 3), CONSTANTS)
    assert [call[0] for call in kernel.calls] == ["triton", "triton"]


def test_types_are_what_triton_compiles_for() -> None:
    """Not values, not sizes."""
    x = torch.zeros(64, dtype=torch.bfloat16)
    assert types(x, None) == types(torch.ones(2, 16, dtype=torch.bfloat16), None)
    different = [types(x), types(x.float()), types(x[1:]), types(None)]
    assert len(set(different)) == 4
    assert types(x[8:]) == types(x)  # 16 bytes on


def test_one_launcher_for_one_key() -> None:
    x = torch.zeros(8)
    assert launcher("a", types(x)) is launcher("a", types(x))
    assert launcher("a", types(x)) is not launcher("a", types(x.double()))
