"""The worker's connection to its coordinator: two threads for which the training does not wait."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from shoal.wire.auth import AuthError
from shoal.wire.channel import Channel
from shoal.wire.messages import Hello, Order, Report, Status, WireError
from shoal.wire.tls import PinnedTls

log = logging.getLogger("shoal.torch")

BEAT_S = 0.5
RETRY_S = 0.3


class ControlLink:
    """Keeps the connection. If the control plane dies, it connects again at the same address until it is back.

    If another process has taken that address meanwhile, the control plane writes its new one to `address_file`.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        job: str,
        worker: str,
        on_order: Callable[[Order], None],
        on_connected: Callable[[], None],
        status: Callable[[], Status],
        report: Callable[[], Report],
        patience_s: float,
        address_file: str | None = None,
        tls: PinnedTls | None = None,
    ) -> None:
        self._first_address, self._address_file, self._tls = address, address_file, tls
        self._secret, self._job = secret, job
        self._worker = worker
        self._on_order, self._on_connected = on_order, on_connected
        self._status, self._report = status, report
        self._patience_s = patience_s
        self._channel: Channel | None = None
        self._wake = threading.Event()
        self._closing = False
        self.up = threading.Event()
        self._reader = threading.Thread(target=self._read, name="shoal-control", daemon=True)
        self._sender = threading.Thread(target=self._beat, name="shoal-beat", daemon=True)

    def start(self) -> None:
        """Connect in this thread, so that a wrong secret is an error at the start.

        Wait for a control plane that was killed while this worker started: it comes back at the same address.
        """
        began_s, warned = time.monotonic(), False
        while True:
            try:
                self._connect()
                break
            except socket.gaierror:
                raise  # an unknown host: waiting does not help
            except OSError as error:
                if time.monotonic() - began_s > self._patience_s:
                    raise
                if not warned:
                    log.warning("no coordinator at %s yet (%s); waiting for it", self.address, error)
                    warned = True
                time.sleep(RETRY_S)
        self._reader.start()
        self._sender.start()

    @property
    def address(self) -> str:
        with contextlib.suppress(OSError):
            if self._address_file is not None:
                with open(self._address_file) as file:
                    return file.read().strip() or self._first_address
        return self._first_address

    def _connect(self) -> None:
        channel = Channel.open(self.address, self._secret, self._job, "worker", tls=self._tls)
        channel.send(Hello(self._worker, os.getpid()))
        self._on_connected()
        channel.send(self._status())
        self._channel = channel
        self.up.set()

    def say(self) -> None:
        """Send the status soon."""
        self._wake.set()

    def say_now(self) -> None:
        """Send the status in this thread, if there is a connection."""
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError, WireError):
                channel.send(self._report())
                channel.send(self._status())

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._channel is not None:
            self._channel.close()

    def _read(self) -> None:
        lost_s: float | None = None
        while not self._closing:
            channel = self._channel
            try:
                if channel is None:
                    self._connect()
                    lost_s = None
                    continue
                message = channel.receive()
                if isinstance(message, Order):
                    self._on_order(message)
            except (OSError, WireError) as error:
                self._channel = None
                self.up.clear()
                if channel is not None:
                    channel.close()
                lost_s = lost_s or time.monotonic()
                if isinstance(error, AuthError):
                    log.warning("the coordinator refuses this worker: %s", error)
                if time.monotonic() - lost_s > self._patience_s and not self._closing:
                    log.error("no coordinator for %.0f s; this worker gives up", self._patience_s)
                    os._exit(75)
                time.sleep(RETRY_S)

    def _beat(self) -> None:
        last_report_s = 0.0
        while not self._closing:
            hurried = self._wake.wait(BEAT_S)
            self._wake.clear()
            channel = self._channel
            if channel is None:
                continue
            try:
                channel.send(self._status())
                if not hurried or time.monotonic() - last_report_s >= BEAT_S:
                    last_report_s = time.monotonic()
                    channel.send(self._report())
            except (OSError, WireError):
                continue  # the reader finds the error, too, and connects again
