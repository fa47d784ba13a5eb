"""Run a server in the foreground: `python -m shoal.server.serve --home DIR [--gpus N] [--policy P]`.

`shoal up` starts this in the background. It may be killed at any time and started again on the same home.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys

from shoal import __version__
from shoal.core.errors import ShoalError
from shoal.server.home import Home
from shoal.server.log_repetitions import limit_repetitions
from shoal.server.options import Options, bind, parse

log = logging.getLogger("shoal.server")


async def serve(options: Options) -> None:
    # Check first what may be refused: the imports below take most of the time.
    home = Home(options.home)
    home.take()
    try:
        sock = bind(options.host, options.port, None) if options.port else None
        from shoal.server.connections import Connections, config_of, raise_file_limit
        from shoal.server.control import Control
        from shoal.server.http_server import HttpServer

        connections = Connections(raise_file_limit())
        control = Control(options, home=home)
        if sock is None:
            sock = bind(options.host, 0, (control.store.get("server") or {}).get("port"))
    except BaseException:
        home.release()
        raise
    await control.start(sock)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, control.shut_down, False)
    server = HttpServer(config_of(control.app, connections))
    serving = await server.start(sock)
    control.home.announce(control.process.address, __version__)
    log.info("listening at %s", control.process.address)
    quiet_memory()
    control.executor.warm_up()
    asked_to_end = asyncio.create_task(control.done.wait())
    await asyncio.wait([serving, asked_to_end], return_when=asyncio.FIRST_COMPLETED)
    await control.close()
    await server.stop(serving)


def quiet_memory() -> None:
    """Exclude imported modules from garbage collection.

    A full collection then takes milliseconds instead of a third of a second, during which no decision is made.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def main(argv: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    limit_repetitions()
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
