"""Options of policies and placements: a frozen dataclass, read from text such as `quantum_s=3600`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, get_type_hints

import numpy as np

from shoal.core.errors import ShoalError, did_you_mean


@dataclass(frozen=True)
class NoOptions:
    """No options."""


def make_options(named: Any, given: dict[str, str], what: str = "policy") -> Any:
    """The options of a policy or placement from text (`{"quantum_s": "3600"}`), checked by type."""
    cls = named.Options
    known = {f.name for f in dataclasses.fields(cls)}
    hints = get_type_hints(cls)
    values = {}
    for key, text in given.items():
        if key in getattr(named, "removed_options", ()):
            continue
        if key not in known:
            hint = did_you_mean(key, known) if known else "it has none"
            raise ShoalError(f"{what} {named.name!r} has no option {key!r}; {hint}")
        values[key] = _parse(f"{what} {named.name!r}", key, text, hints[key])
    return cls(**values)


def at_least_a_second(option: str, seconds: float, policy: str) -> None:
    """Reject a quantum below one second: the scheduler would do little else than decide."""
    if not seconds >= 1:
        raise ShoalError(f"option {option}={seconds:g} of policy {policy!r} must be 1 second or more")


_IN_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple[float, ...]: "numbers separated by commas",
}


def _parse(owner: str, key: str, text: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
                text.lower()
            ]
        if kind is int:
            return int(text)
        if kind is float:
            value = float(text)
            if np.isnan(value):
                raise ValueError
            return value
        if kind == tuple[float, ...]:
            parts = tuple(float(part) for part in text.split(",") if part)
            if any(np.isnan(part) for part in parts):
                raise ValueError
            return parts
        return text
    except (ValueError, KeyError):
        raise ShoalError(f"option {key}={text!r} of {owner} must be {_IN_WORDS[kind]}") from None
