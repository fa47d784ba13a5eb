"""The part of the control plane's environment that its processes get."""

from __future__ import annotations

#: Variables of the control plane's own environment that a worker gets. All others come from the job.
PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_HOME",
)  # fmt: skip
