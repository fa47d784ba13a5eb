"""Run a server in the foreground: `python -m shoal.server.serve --home DIR [--gpus N] [--policy P]`.

`shoal up` starts this in the background. It may be killed at any moment and started again on the same home.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys

from shoal import __version__
from shoal.core.errors import ShoalError
from shoal.server.home import Home
from shoal.server.options import Options, bind, parse

log = logging.getLogger("shoal.server")
MAX_CONNECTIONS = 2000


async def serve(options: Options) -> None:
    # First what may be refused, then what takes time: the imports below are most of it.
    home = Home(options.home)
    home.take()
    try:
        sock = bind(options.host, options.port, None) if options.port else None
        import uvicorn

        from shoal.server.control import Control

        control = Control(options, home=home)
        if sock is None:
            sock = bind(options.host, 0, (control.store.get("server") or {}).get("port"))
    except BaseException:
        home.release()
        raise
    await control.start(sock)
    config = uvicorn.Config(
        control.app,
        log_config=None,
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=30,
        lifespan="off",
        server_header=False,
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, control.shut_down, False)
    task = asyncio.create_task(server._serve([sock]))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    control.home.announce(control.server.address, __version__)
    log.info("listening at %s", control.server.address)
    quiet_memory()
    control.executor.warm_up()
    await asyncio.wait([task, asyncio.create_task(control.done.wait())], return_when=asyncio.FIRST_COMPLETED)
    await control.close()
    server.should_exit = True
    server.force_exit = True
    with contextlib.suppress(asyncio.CancelledError, asyncio.TimeoutError):
        await asyncio.wait_for(task, 5)


def quiet_memory() -> None:
    """What was imported stays for good: without looking through it again and again, a full collection of garbage
    takes milliseconds instead of a third of a second, in which no decision could be made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def main(argv: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        asyncio.run(serve(options))
    except ShoalError as error:
        print(f"shoal: {' '.join(str(error).split())}", file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
