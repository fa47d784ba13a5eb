"""What stands between machines: a relay, wires that can be cut, and a listener that sees all on the loopback."""

import contextlib
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator


class Relay:
    """Passes connections on to an address. `cut` is a broken network: nothing arrives, nothing is refused."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._whole = threading.Event()
        self._whole.set()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        """Connections from before are gone: their peers have given them up."""
        self._end()
        self._whole.set()

    def _end(self) -> None:
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one = self._server.accept()[0]
                threading.Thread(target=self._join, args=(one,), daemon=True).start()

    def _join(self, one: socket.socket) -> None:
        self._open.append(one)
        self._whole.wait()
        with contextlib.suppress(OSError):
            other = socket.create_connection(self._target)
            self._open.append(other)
            for pair in ((one, other), (other, one)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._whole.wait()
                to.sendall(data)
        for sock in (source, to):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()
        self._end()
        self._whole.set()


class Wires:
    """Network namespaces, each with a wire to this machine. Nothing arrives over a wire that is cut, no end either."""

    def __init__(self) -> None:
        self._bridge, self._namespaces = f"shoal{os.getpid()}", list[str]()
        self._subnet = f"198.18.{os.getpid() % 256}"
        self.address = f"{self._subnet}.1"

    def open(self) -> str:
        """Make the near end. The result says why that is impossible; it is empty if it was made."""
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        except FileNotFoundError:
            return "apt-get install -y --no-install-recommends iproute2"
        except subprocess.CalledProcessError as error:
            return error.stderr.decode().strip()
        return ""

    def lay(self) -> tuple[str, str]:
        """A new namespace and its address."""
        n = len(self._namespaces) + 2
        namespace, address = f"{self._bridge}-{n}", f"{self._subnet}.{n}"
        _ip("netns", "add", namespace)
        self._namespaces.append(namespace)
        _ip(
            "link",
            "add",
            self._near_end(namespace),
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            namespace,
        )
        _ip("link", "set", self._near_end(namespace), "master", self._bridge, "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", namespace, "link", "set", device, "up")
        return namespace, address

    def cut(self, namespace: str) -> None:
        _ip("link", "set", self._near_end(namespace), "down")

    def heal(self, namespace: str) -> None:
        _ip("link", "set", self._near_end(namespace), "up")

    def _near_end(self, namespace: str) -> str:
        return f"sh{namespace.removeprefix('shoal')}"

    def close(self) -> None:
        for namespace in self._namespaces:
            _ip("netns", "del", namespace)
        with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):  # it was not made
            _ip("link", "del", self._bridge)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


WRAP = 1 << 32
"""TCP numbers bytes up to here."""
Flow = tuple[tuple[str, int], tuple[str, int]]
"""(address, port) of the sender and of the receiver."""


class Listener:
    """Every TCP payload on the loopback to or from a port, as anybody on the path would see it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.flows: dict[Flow, bytearray] = {}
        self._next: dict[Flow, int] = {}
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(0x0800))
        force = 33  # SO_RCVBUFFORCE: nothing is missed however long this thread waits
        self._socket.setsockopt(socket.SOL_SOCKET, force, 1 << 24)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.2)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                self._take(self._socket.recv(1 << 17)[14:])

    def _take(self, packet: bytes) -> None:
        if packet[9] != socket.IPPROTO_TCP:
            return
        begin, length = 4 * (packet[0] & 15), struct.unpack("!H", packet[2:4])[0]
        source, to, number = struct.unpack("!HHI", packet[begin : begin + 8])
        payload = packet[begin + 4 * (packet[begin + 12] >> 4) : length or None]
        if self._port not in (source, to) or not payload:
            return
        flow = ((socket.inet_ntoa(packet[12:16]), source), (socket.inet_ntoa(packet[16:20]), to))
        # The loopback shows each packet twice, and a slow receiver may get some again.
        known = (self._next.setdefault(flow, number) - number) % WRAP
        known = 0 if known > WRAP // 2 else known  # something was missed
        if known < len(payload):
            self.flows.setdefault(flow, bytearray()).extend(payload[known:])
            self._next[flow] = (number + len(payload)) % WRAP

    def to_port(self) -> Iterator[bytes]:
        return (bytes(data) for (_, (_, port)), data in self.flows.items() if port == self._port)

    def everything(self) -> bytes:
        return b"\0".join(bytes(data) for data in self.flows.values())

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()
