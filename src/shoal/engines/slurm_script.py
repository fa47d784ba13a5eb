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
trap 'cat "$dir/agent.log" 2>/dev/null; rm -rf "$dir"' EXIT
mkdir "$dir/state"

# Slurm signals this shell ahead of the time limit or of a preemption (--signal=B:TERM). The agent finds the deadline
# in a file, in seconds since boot: /proc/uptime and CLOCK_BOOTTIME agree.
signalled=0 warned=0
announce() {
  signalled=1 warned=1
  local up_s rest left_s
  read -r up_s rest </proc/uptime
  left_s=$(seconds_left) || left_s=@WARN_S@
  ((left_s > 0)) || left_s=0
  echo "$((${up_s%.*} + left_s))" >"$dir/leaving.new" && mv "$dir/leaving.new" "$dir/leaving"
}
trap announce TERM

# How long the job may still run. Both times are the controller's: the clock of this node may be wrong.
seconds_left() {
  local end_s now_s
  end_s=$(SLURM_TIME_FORMAT=%s timeout 10 squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e 2>/dev/null)
  now_s=$(timeout 10 sdiag 2>/dev/null | grep -m 1 '^sdiag output at' | grep -oE '[0-9]{9,}')
  [[ $end_s =~ ^[0-9]+$ && $now_s =~ ^[0-9]+$ ]] && echo $((end_s - now_s))
}

# Whether the warning holds no more, because the time limit was extended. Slurm warns up to 60 s early.
is_extended() {
  local left_s
  left_s=$(seconds_left) && ((left_s > @WARN_S@ + 60))
}

@FILES@
agent_name=slurm-${SLURM_JOB_NAME##*-}
export SHOAL_ENGINE=slurm SHOAL_ENGINE_ID="$SLURM_JOB_ID" SHOAL_NODE="$SLURMD_NODENAME"
export SHOAL_LEAVING_FILE="$dir/leaving"
# The type of the node's GPUs, if it has only one, and its place in the topology.
read -r gres features < <(timeout 20 sinfo --noheader -N -n "$SLURMD_NODENAME" -o "%G %f" 2>/dev/null)
types=$(grep -oE 'gpu:[A-Za-z_][^:,(]*' <<<"${gres:-}" | sort -u)
[[ $types && $types != *$'\n'* ]] && export SHOAL_GPU_TYPE="${types#gpu:}"
IFS=, read -ra all <<<"${features:-}"
for feature in "${all[@]}"; do
  case $feature in
    rack*) export SHOAL_RACK="$feature" ;;
    domain*) export SHOAL_DOMAIN="$feature" ;;
  esac
done
@ENV@

# A signal interrupts `wait`: wait again. 127 means that the end of the agent was seen before the signal.
# An agent that was killed is started again and finds its workers in the state directory.
while :; do
  @ARGV@ >>"$dir/agent.log" 2>&1 &
  agent=$! code=
  while :; do
    wait "$agent"
    new=$?
    ((new == 127)) || code=$new
    ((signalled)) || break
    signalled=0
  done
  ((warned)) && is_extended && rm -f "$dir/leaving" && warned=0
  ((${code:-1} > 128 && !warned)) || break
  echo "the agent ended with code $code and is started again" >>"$dir/agent.log"
  sleep 1
done

# Squeue shows the comment, so the launcher can tell why an agent failed on whatever node it ran.
if ((${code:-1} != 0 && !warned)); then
  words=$(grep -v '^ *$' "$dir/agent.log" | tail -n 1 | tr -dc '[:print:]' | tr "'|" '  ' | cut -c 1-300)
  timeout 10 scontrol update JobId="$SLURM_JOB_ID" Comment=@COMMENT@": $words" >/dev/null 2>&1
fi
exit "${code:-1}"
"""
_PLACEHOLDERS = {
    "{dir}": '"$dir"',
    "{state}": '"$dir/state"',
    "{agent}": '"$agent_name"',
    "{node}": '"$SLURMD_NODENAME"',
}


def agent_name(job_name: str) -> str:
    """The name of the agent in a job, as the script makes it."""
    return f"slurm-{job_name.rpartition('-')[2]}"


def batch_script(agent: AgentCommand, comment: str, *, warn_s: int) -> str:
    """The script for one machine. Slurm shows it to its owner and to administrators only."""
    files = [
        f"base64 -d >\"$dir/{name}\" <<'END' || exit 1\n{base64.encodebytes(data).decode()}END"
        for name, data in agent.files.items()
    ]
    env = [f"export {name}={shlex.quote(value)}" for name, value in agent.env.items()]
    parts = {
        "@WARN_S@": str(warn_s),
        "@COMMENT@": shlex.quote(comment),
        "@FILES@": "\n".join(files),
        "@ENV@": "\n".join(env),
        "@ARGV@": " ".join(_quote(argument) for argument in agent.argv),
    }
    return re.sub("|".join(parts), lambda found: parts[found.group()], TEMPLATE)


def _quote(argument: str) -> str:
    """An argument as bash reads it, with each placeholder as a variable of the script."""
    pieces = re.split(f"({'|'.join(map(re.escape, _PLACEHOLDERS))})", argument)
    return "".join(_PLACEHOLDERS.get(p) or shlex.quote(p) for p in pieces if p) or "''"
