"""`shoal policy`: the policies there are."""

from __future__ import annotations

from shoal.cli.lazy import LazyGroup

COMMANDS = {
    "ls": ("shoal.cli.policy_ls:ls", "The policies that can be named, one line each."),
    "show": ("shoal.cli.policy_show:show", "What a policy does, and its options."),
    "get": ("shoal.cli.policy_set:get", "The policy of the running cluster."),
    "set": ("shoal.cli.policy_set:set_", "Change the policy of the running cluster."),
}


GROUP = LazyGroup("policy", COMMANDS, "Policies: which there are, and what each one does.")
