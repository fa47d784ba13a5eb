"""`shoal policy`: the policies, and the one of the running cluster."""

from __future__ import annotations

from shoal.cli.lazy import LazyGroup

COMMANDS = {
    "ls": ("shoal.cli.policy_ls:ls", "List the policies, one line each."),
    "show": ("shoal.cli.policy_show:show", "Show what a policy does, and its options."),
    "get": ("shoal.cli.policy_set:get", "Show the policy of the running cluster."),
    "set": ("shoal.cli.policy_set:set_", "Change the policy of the running cluster."),
}


GROUP = LazyGroup("policy", COMMANDS, "Policies, and the policy of the running cluster.")
