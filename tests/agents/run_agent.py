"""An agent as a process: run_agent.py STATE NAME ADDRESS CONTROL TOKEN_FILE GPUS."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from shoal.agents.agent import Agent, lease_path, node_facts
from shoal.agents.join_tokens import JoinToken
from shoal.agents.joining import Membership
from shoal.executors.local import LocalExecutor


async def main() -> None:
    state, name, address, control, token_file, gpus = sys.argv[1:]
    directory = Path(state)
    directory.mkdir(parents=True, exist_ok=True)
    token = JoinToken.parse(Path(token_file).read_text())
    member = Membership(directory, name, control, token, Path(token_file))
    executor = LocalExecutor(int(gpus), lease_file=lease_path(directory))
    nodes = node_facts(name, executor.nodes(), address, None, "rack0", "domain0")
    agent = Agent(
        name,
        directory,
        executor,
        nodes,
        member.connect,
        save_credential=member.save,
        open_session=executor.session,
    )
    await agent.run()


asyncio.run(main())
