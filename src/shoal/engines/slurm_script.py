"""The batch script that runs the agent command in a Slurm job."""

from __future__ import annotations

import base64
import re
import shlex

from shoal.engines.base import AgentCommand

TEMPLATE = """\
#!/bin/bash
# One Shoal agent on one node. `shoal down` or scancel ends it.
set -u
umask 077
dir=$(mktemp -d "${TMPDIR:-/tmp}/shoal-agent.XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT

# Slurm signals this shell ahead of the time limit or of a preemption (--signal=B:TERM). The agent finds the deadline
# in a file, in seconds since boot: /proc/uptime and CLOCK_BOOTTIME agree.
signalled=0
announce() {
  signalled=1
  local up_s rest end_s left_s=@WARN_S@
  read -r up_s rest </proc/uptime
  end_s=$(SLURM_TIME_FORMAT=%s timeout 10 squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e 2>/dev/null)
  [[ $end_s =~ ^[0-9]+$ ]] && left_s=$((end_s - $(date +%s)))
  ((left_s > 0)) || left_s=0
  echo "$((${up_s%.*} + left_s))" >"$dir/leaving.new" && mv "$dir/leaving.new" "$dir/leaving"
}
trap announce TERM

@FILES@
export SHOAL_ENGINE=slurm SHOAL_ENGINE_ID="$SLURM_JOB_ID" SHOAL_MACHINE="$SLURM_JOB_NAME"
export SHOAL_NODE="$SLURMD_NODENAME" SHOAL_LEAVING_FILE="$dir/leaving"
@ENV@
@ARGV@ &
agent=$!

# A signal interrupts `wait`: wait again. 127 means that the end of the agent was seen before the signal.
while :; do
  wait "$agent"
  new=$?
  ((new == 127)) || code=$new
  ((signalled)) || exit "${code:-1}"
  signalled=0
done
"""
_PLACEHOLDERS = {"{dir}": '"$dir"', "{machine}": '"$SLURM_JOB_NAME"', "{node}": '"$SLURMD_NODENAME"'}


def batch_script(agent: AgentCommand, *, warn_s: int) -> str:
    """The script for one machine. Slurm shows it to its owner and to administrators only."""
    files = [
        f"base64 -d >\"$dir/{name}\" <<'END' || exit 1\n{base64.encodebytes(data).decode()}END"
        for name, data in agent.files.items()
    ]
    env = [f"export {name}={shlex.quote(value)}" for name, value in agent.env.items()]
    parts = {
        "@WARN_S@": str(warn_s),
        "@FILES@": "\n".join(files),
        "@ENV@": "\n".join(env),
        "@ARGV@": " ".join(_quote(argument) for argument in agent.argv),
    }
    return re.sub("|".join(parts), lambda found: parts[found.group()], TEMPLATE)


def _quote(argument: str) -> str:
    """An argument as bash reads it, with each placeholder as a variable of the script."""
    pieces = re.split(r"(\{dir\}|\{machine\}|\{node\})", argument)
    return "".join(_PLACEHOLDERS.get(p) or shlex.quote(p) for p in pieces if p) or "''"
