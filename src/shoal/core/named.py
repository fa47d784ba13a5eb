"""Plug-ins by name: those of Shoal, and those that other packages register as entry points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from shoal.core.errors import ShoalError, did_you_mean


@dataclass(frozen=True, slots=True)
class Named:
    """One kind of plug-in. `built_in` maps a name to module:attribute, so that listing names imports nothing."""

    kind: str
    group: str
    built_in: Mapping[str, str]

    def names(self) -> list[str]:
        added = (entry.name for entry in entry_points(group=self.group) if entry.name not in self.built_in)
        return [*self.built_in, *added]

    def find(self, name: str) -> Any:
        """The object with this name. An unknown name raises an error with a suggestion."""
        if name in self.built_in:
            module, _, attribute = self.built_in[name].partition(":")
            return getattr(import_module(module), attribute)
        for entry in entry_points(group=self.group):
            if entry.name == name:
                return self._load(entry)
        raise ShoalError(f"there is no {self.kind} {name!r}; {did_you_mean(name, self.names())}")

    def _load(self, entry: EntryPoint) -> Any:
        try:
            return entry.load()
        except Exception as error:  # code of another package may raise anything
            raise ShoalError(
                f"{self.kind} {entry.name!r} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}"
            ) from error
