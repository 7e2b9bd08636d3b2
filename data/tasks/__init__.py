"""Synthetic tasks: recall, copying, stacks and state tracking, made on the fly.

    draws      random numbers that belong to a sample, whatever batch it is in
    base       Task, its examples, and mixtures of tasks
    recall     MQAR, overwriting, global and selective reset, phone book
    sequences  palindrome, selective copying, stacks, in-context recall with noise and runs
    state      parity, permutations, modular arithmetic
    needle     needles in haystacks, as texts
    module     TaskConfig and the data module that a trainer takes

TASKS has them by name, but for the needles, which are no ids.
"""

from data.tasks.base import FILLER, Examples, Mixture, Task
from data.tasks.draws import Draws, Split
from data.tasks.module import TaskConfig, TaskDataModule
from data.tasks.recall import MQAR, GlobalReset, Overwrite, PhoneBook, SelectiveReset
from data.tasks.sequences import InContextRecall, Palindrome, SelectiveCopy, Stacks
from data.tasks.state import ModularArithmetic, Parity, Permutations

# By the name that a configuration gives.
TASKS: dict[str, type[Task]] = {
    "mqar": MQAR,
    "overwrite": Overwrite,
    "global_reset": GlobalReset,
    "selective_reset": SelectiveReset,
    "phone_book": PhoneBook,
    "palindrome": Palindrome,
    "selective_copy": SelectiveCopy,
    "stacks": Stacks,
    "in_context_recall": InContextRecall,
    "parity": Parity,
    "permutations": Permutations,
    "modular_arithmetic": ModularArithmetic,
}

__all__ = [
    "FILLER",
    "MQAR",
    "TASKS",
    "Draws",
    "Examples",
    "GlobalReset",
    "InContextRecall",
    "Mixture",
    "ModularArithmetic",
    "Overwrite",
    "Palindrome",
    "Parity",
    "Permutations",
    "PhoneBook",
    "SelectiveCopy",
    "SelectiveReset",
    "Split",
    "Stacks",
    "Task",
    "TaskConfig",
    "TaskDataModule",
]
