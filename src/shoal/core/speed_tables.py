"""The speed curves of all profiles, concatenated in one array that kernels index."""

from __future__ import annotations

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.profile import Profile


class SpeedTables:
    """The curves of all known profiles, by GPU type of one cluster."""

    def __init__(self, gpu_types: tuple[str, ...]) -> None:
        self.gpu_types = gpu_types
        self.values: FloatArray = np.zeros(1024)
        self._end = 1  # offset 0 holds the curve of a job that cannot run: the single speed 0
        self._rows: dict[int, tuple[Profile, IntArray, IntArray]] = {}
        self._curves: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, profile: Profile) -> tuple[IntArray, IntArray]:
        """(offset, longest share) of the profile's curve for each GPU type of the cluster."""
        known = self._rows.get(id(profile))
        if known is None:
            at = np.zeros(len(self.gpu_types), np.int32)
            longest = np.zeros(len(self.gpu_types), np.int32)
            for i, gpu_type in enumerate(self.gpu_types):
                if profile.knows(gpu_type):
                    at[i] = self._append(profile.speeds_on(gpu_type))
                    longest[i] = profile.curve(gpu_type).max_gpus
            # Keep a reference to the profile, so that no other object gets its id.
            known = self._rows[id(profile)] = (profile, at, longest)
        return known[1], known[2]

    def _append(self, speed: FloatArray) -> int:
        key = speed.tobytes()
        at = self._curves.get(key)
        if at is not None:
            return at
        at, end = self._end, self._end + len(speed)
        if end > len(self.values):
            grown = np.zeros(max(2 * len(self.values), end))
            grown[: self._end] = self.values[: self._end]
            self.values = grown
        self.values[at:end] = speed
        self._end = end
        self._curves[key] = at
        return at
