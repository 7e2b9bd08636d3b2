"""Options from plain mappings: what is taken, what is refused, and how it is said."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from kda_lm.config import read_config
from kda_lm.errors import UserError
from kda_lm.training.config import TrainerConfig


@dataclass(frozen=True)
class Options:
    count: int
    rate: float = 0.5
    name: str = "a"
    on: bool = False
    kind: Literal["red", "green"] = "red"
    maybe: int | None = None
    some: tuple[str, ...] = ()
    either: str | tuple[str, ...] | None = None
    made: tuple[int, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count is {self.count}; it takes 0 or more")


def test_values_and_defaults() -> None:
    assert read_config(Options, {"count": 3}, "o") == Options(3)
    found = read_config(
        Options,
        {
            "count": 3,
            "rate": 2,
            "name": "",
            "on": True,
            "kind": "green",
            "maybe": 4,
            "some": ["x"],
            "either": ["y", "z"],
        },
        "o",
    )
    assert found == Options(3, 2.0, "", True, "green", 4, ("x",), ("y", "z"))
    assert type(found.rate) is float
    assert read_config(Options, {"count": 0, "maybe": None, "either": None}, "o") == Options(0)
    assert read_config(Options, {"count": 0, "either": "one"}, "o").either == "one"
    assert read_config(Options, {"count": 0, "some": ()}, "o").some == ()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"count": 1, "size": 2}, "o: unknown option 'size'; options are count, rate, name, on, kind, maybe, some, "
                                  "either, made"),
        ({}, "o: option 'count' must be given"),
        ({"count": "1"}, "o.count is '1'; it takes a whole number"),
        ({"count": 1.0}, "o.count is 1.0; it takes a whole number"),
        ({"count": True}, "o.count is True; it takes a whole number"),
        ({"count": None}, "o.count is None; it takes a whole number"),
        ({"count": 1, "rate": "fast"}, "o.rate is 'fast'; it takes a finite number"),
        ({"count": 1, "rate": False}, "o.rate is False; it takes a finite number"),
        ({"count": 1, "on": 1}, "o.on is 1; it takes true or false"),
        ({"count": 1, "on": "false"}, "o.on is 'false'; it takes true or false"),
        ({"count": 1, "name": 5}, "o.name is 5; it takes text"),
        ({"count": 1, "kind": "blue"}, "o.kind is 'blue'; it takes one of red, green"),
        ({"count": 1, "kind": ["red"]}, "o.kind is ['red']; it takes one of red, green"),
        ({"count": 1, "maybe": 1.5}, "o.maybe is 1.5; it takes a whole number or null"),
        ({"count": 1, "some": "xy"}, "o.some is 'xy'; it takes a list of text"),
        ({"count": 1, "some": ["x", 1]}, "o.some is ['x', 1]; it takes a list of text"),
        ({"count": 1, "some": {"x": 1}}, "o.some is {'x': 1}; it takes a list of text"),
        ({"count": 1, "either": 7}, "o.either is 7; it takes text or a list of text or null"),
        ({"count": -1}, "o: count is -1; it takes 0 or more"),
    ],
)  # fmt: skip
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_config(Options, options, "o")
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_is_finite(value: float) -> None:
    """NaN passes every comparison that a dataclass makes; no option means anything with it."""
    with pytest.raises(UserError, match=r"^o\.?.*rate"):
        read_config(Options, {"count": 1, "rate": value}, "o")


@pytest.mark.parametrize("name", ["max_steps", "batch_size", "devices", "log_every", "val_every", "save_every"])
@pytest.mark.parametrize("value", [0, -3])
def test_the_trainers_counts_start_at_one(name: str, value: int) -> None:
    with pytest.raises(UserError, match=rf"^trainer: {name} is {value}; it takes at least 1$"):
        read_config(TrainerConfig, {"max_steps": 10, "batch_size": 4, name: value}, "trainer")


@pytest.mark.parametrize("value", [0, 1, -0.5, 1.5])
def test_the_averages_decay(value: float) -> None:
    with pytest.raises(UserError, match="ema_decay"):
        read_config(TrainerConfig, {"max_steps": 10, "batch_size": 4, "ema_decay": value}, "trainer")
