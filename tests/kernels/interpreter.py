"""Triton's interpreter runs the kernels on a CPU when TRITON_INTERPRET=1 is set before triton is imported.

`backend="auto"` is then triton on the CPU, for every test of that process. The files here therefore run in a process of
their own, started once by test_interpreter.py, and are skipped everywhere else. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_triton_interpreted.py
"""

import importlib.util
import os
from typing import Any

import pytest

FILES = (
    "test_triton_interpreted.py",
    "test_recurrent_triton.py",
    "test_attention_triton.py",
    "test_fused_triton.py",
    "test_rotary_triton.py",
)
ACTIVE = os.environ.get("TRITON_INTERPRET") == "1"
MISSING = importlib.util.find_spec("triton") is None


def required() -> None:
    """Skip the calling file unless it runs in the interpreter, which is made fit for it."""
    if MISSING or not ACTIVE:
        reason = "needs the package triton" if MISSING else "runs in a process that test_interpreter.py starts"
        pytest.skip(reason, allow_module_level=True)
    quicken()


def quicken() -> None:
    """The interpreter prepares Triton's language anew at every call of a function in a kernel, for milliseconds: from
    here on once for each module that has such functions."""
    from triton.runtime.interpreter import InterpretedFunction

    prepared: set[str] = set()
    slow = InterpretedFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ in prepared:
            return self.rewrite()(*args, **kwargs)
        prepared.add(self.fn.__module__)
        return slow(self, *args, **kwargs)

    InterpretedFunction.__call__ = call
