"""Typed options from plain mappings: a dataclass states what an option may be, and this module says so to the user."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kda_lm.errors import UserError

T = TypeVar("T")


def read_config(cls: type[T], options: Mapping[str, Any], where: str) -> T:
    """Build the dataclass `cls` from `options`.

    Understands bool, int, float, str, None, Literal, mappings as `dict[str, Any]`, unions of these and lists of them as
    `tuple[X, ...]`.

    Raises UserError, in one line that starts with `where`: unknown option (the options are listed), missing option,
    wrong type, a choice that does not exist (the choices are listed), or what `__post_init__` objects to.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if not isinstance(options, Mapping):
        raise UserError(f"{where} is {options!r}; it takes the options {', '.join(fields)}")
    for name in options:
        if name not in fields:
            raise UserError(f"{where}: unknown option '{name}'; options are {', '.join(fields)}")
    hints = typing.get_type_hints(cls)
    values = {name: _read(hints[name], value, f"{where}.{name}") for name, value in options.items()}
    for name, field in fields.items():
        no_default = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if no_default and name not in values:
            raise UserError(f"{where}: option '{name}' must be given")
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def plain(config: DictConfig) -> dict[str, Any]:
    """A composed configuration as nested dicts, interpolations resolved.

    Raises UserError: an interpolation that leads nowhere, or an option that must be given and was not.
    """
    try:
        options: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise UserError(str(error).splitlines()[0]) from None
    return options


def _read(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint`, or a UserError that says what is accepted."""
    alternatives = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    for alternative in alternatives:
        if _matches(alternative, value):
            if alternative is float:
                return float(value)
            if typing.get_origin(alternative) is tuple:
                return tuple(value)
            return value
    raise UserError(f"{where} is {value!r}; it takes {' or '.join(_describe(a) for a in alternatives)}")


def _matches(hint: Any, value: Any) -> bool:
    if hint is type(None):
        return value is None
    if typing.get_origin(hint) is Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if typing.get_origin(hint) is dict:
        return isinstance(value, dict)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return isinstance(value, Sequence) and not isinstance(value, str) and all(_matches(item, v) for v in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    if typing.get_origin(hint) is dict:
        return "options, such as {seq_len: 512}"
    if typing.get_origin(hint) is tuple:
        return f"a list of {_describe(typing.get_args(hint)[0])}"
    names = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
    return names.get(hint, str(hint))
