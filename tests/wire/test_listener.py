"""The port on which workers and agents connect."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from shoal.wire.listener import Listener


@pytest.mark.parametrize("turns", range(6))
def test_closing_the_port_ends_connections_at_any_stage_of_their_handshake(turns: int) -> None:
    async def story() -> None:
        async def serve(connection: object) -> None:
            raise AssertionError("nobody has proved who they are")

        listener = Listener(lambda job, purpose: None, serve)
        address = await listener.listen("127.0.0.1", 0)
        with socket.create_connection(address, timeout=30) as peer:
            for _ in range(turns):
                await asyncio.sleep(0)
            await listener.close()
            with contextlib.suppress(ConnectionResetError):
                while peer.recv(1024):  # a timeout here fails the test
                    pass
        assert not listener.strangers

    asyncio.run(story())
