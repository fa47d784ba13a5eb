"""`shoal policy`: the policies there are."""

from __future__ import annotations

from shoal.cli.lazy import LazyGroup

COMMANDS = {
    "ls": ("shoal.cli.policy_ls:ls", "The policies that can be named, one line each."),
    "show": ("shoal.cli.policy_show:show", "What a policy does, and its options."),
}


GROUP = LazyGroup("policy", COMMANDS, "Policies: which there are, and what each one does.")
