"""Authentication: a challenge-response with the job's secret, and sealed frames after it.

    server -> client   magic, protocol number, nonce_s
    client -> server   job, nonce_c, HMAC(secret, "client" | purpose | job | nonce_s | nonce_c)
    server -> client   HMAC(secret, "server" | the same), or the reason for refusing

The secret itself is never sent. Both ends prove that they know it, so a worker does not follow a false coordinator
either. Frames after the handshake carry a MAC over a running number and the body, under keys derived from both nonces.
A frame that is inserted, repeated, left out or sent back is therefore detected. Contents are not encrypted.

Why our own code and not TLS alone: it authenticates each job by its secret, without certificates, on one machine.
Between machines it runs inside TLS (`tls=` of `Channel.open` and `ControlService.start`), which adds encryption.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from shoal import __version__
from shoal.wire.messages import MAX_MESSAGE_BYTES, PROTOCOL, WireError
from shoal.wire.regular_file import open_regular

MAGIC = b"SHOAL"
NONCE_BYTES = 32
MAC_BYTES = 16
CHALLENGE_BYTES = len(MAGIC) + 2 + NONCE_BYTES
MAX_HANDSHAKE_BYTES = 2048
MIN_SECRET_BYTES = 16


class AuthError(WireError):
    """The peer does not know the secret, speaks another protocol, or refuses this end."""

    #: (job, purpose) of the peer that was refused, as it says.
    claim: tuple[str, str] | None = None


class OtherProtocol(AuthError):
    """The two ends are of different versions of Shoal. The message says which one to install where."""


def new_secret() -> bytes:
    return os.urandom(32)


@dataclass(frozen=True, slots=True)
class JobKey:
    """What the workers of a job share: its secret, and a certificate with its private key for TLS between machines.

    In a file: the secret in hexadecimal on the first line, then the certificate and the key in PEM, if there are any.
    """

    secret: bytes = field(repr=False)
    pem: bytes = field(default=b"", repr=False)

    @staticmethod
    def parse(text: bytes) -> JobKey:
        secret, _, pem = text.partition(b"\n")
        if not pem.isascii():
            raise AuthError("the job's certificate is not in PEM")
        return JobKey(check_secret(secret.strip()), pem.strip())

    @property
    def text(self) -> str:
        """As in the file."""
        return self.secret.hex() + ("\n" + self.pem.decode() if self.pem else "")


def read_key(path: str | Path) -> JobKey:
    """Read a job's key from a file. Only its owner may be able to read the file."""
    path = Path(path)
    try:
        with open_regular(path) as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read(MAX_MESSAGE_BYTES)
    except OSError as error:
        raise AuthError(f"cannot read the job's secret: {error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise AuthError(f"{path} can be read by others than its owner; run: chmod 600 {path}")
    return JobKey.parse(text)


def read_secret(path: str | Path) -> bytes:
    return read_key(path).secret


def write_secret(path: str | Path, secret: bytes, pem: bytes = b"") -> None:
    """Write a job's key to a new file that only its owner can read from the start."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(JobKey(secret, pem).text.encode())


def check_secret(secret: bytes) -> bytes:
    try:
        raw = bytes.fromhex(secret.decode())
    except ValueError:
        raise AuthError("the job's secret must be written in hexadecimal") from None
    if len(raw) < MIN_SECRET_BYTES:
        raise AuthError(f"the job's secret has fewer than {MIN_SECRET_BYTES} bytes")
    return raw


def _mac(secret: bytes, *parts: bytes) -> bytes:
    # Each part carries its length, so that two lists of parts never give the same input.
    made = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        made.update(len(part).to_bytes(4, "big"))
        made.update(part)
    return made.digest()


def challenge(protocol: int = PROTOCOL) -> tuple[bytes, bytes]:
    """The first bytes a server sends, and the nonce in them."""
    nonce = os.urandom(NONCE_BYTES)
    return MAGIC + protocol.to_bytes(2, "big") + nonce, nonce


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one connection, one for each direction."""

    client_to_server: bytes
    server_to_client: bytes


def _keys(secret: bytes, context: tuple[bytes, ...]) -> Keys:
    return Keys(_mac(secret, b"c2s", *context), _mac(secret, b"s2c", *context))


@dataclass(frozen=True, slots=True)
class ClientProof:
    """The client's side, after it has received the challenge."""

    request: bytes
    expected: bytes
    keys: Keys

    @staticmethod
    def make(challenge: bytes, secret: bytes, job: str, purpose: str) -> ClientProof:
        if len(challenge) != CHALLENGE_BYTES or not challenge.startswith(MAGIC):
            raise AuthError("the other end does not speak Shoal's protocol")
        version = int.from_bytes(challenge[len(MAGIC) : len(MAGIC) + 2], "big")
        if version != PROTOCOL:
            raise OtherProtocol(
                f"the other end speaks protocol {version}, this one {PROTOCOL}: upgrade the older"
            )
        nonce_c = os.urandom(NONCE_BYTES)
        context = (purpose.encode(), job.encode(), challenge[-NONCE_BYTES:], nonce_c)
        proof = _mac(secret, b"client", *context)
        request = {
            "protocol": PROTOCOL,
            "purpose": purpose,
            "job": job,
            "nonce": nonce_c.hex(),
            "proof": proof.hex(),
        }
        return ClientProof(
            json.dumps(request).encode(), _mac(secret, b"server", *context), _keys(secret, context)
        )

    @staticmethod
    def farewell(job: str, purpose: str) -> bytes:
        """What to send to an end of another protocol, which then knows who could not connect, and says its version."""
        claim = {"protocol": PROTOCOL, "version": __version__, "purpose": purpose, "job": job}
        return json.dumps(claim | {"nonce": "", "proof": ""}).encode()

    def check(self, reply: bytes) -> Keys:
        if hmac.compare_digest(reply, self.expected):
            return self.keys
        if reply.startswith(b"refused: "):
            raise AuthError(reply.decode(errors="replace")[:300])
        raise AuthError("the other end does not know the job's secret")


@dataclass(frozen=True, slots=True)
class Request:
    """What a client claims. Do not trust any of it before `prove`."""

    purpose: str
    job: str
    nonce: bytes
    proof: bytes

    @staticmethod
    def parse(body: bytes, protocol: int = PROTOCOL) -> Request:
        try:
            raw = json.loads(body)
            spoken = raw["protocol"]
            request = Request(
                str(raw["purpose"]),
                str(raw["job"]),
                bytes.fromhex(raw["nonce"]),
                bytes.fromhex(raw["proof"]),
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            raise AuthError("malformed handshake") from None
        if spoken != protocol:
            theirs = f" (Shoal {str(raw['version'])[:20]})" if "version" in raw else ""
            ours = f"{protocol} (Shoal {__version__})"
            error = OtherProtocol(f"wrong protocol {str(spoken)[:20]}{theirs}, this end speaks {ours}")
            error.claim = (request.job, request.purpose)
            raise error
        if len(request.nonce) != NONCE_BYTES:
            raise AuthError("malformed handshake")
        return request

    def prove(self, secret: bytes, nonce_s: bytes) -> tuple[bytes, Keys]:
        """Return the answer and the connection's keys. Raise AuthError if the client does not know the secret."""
        context = (self.purpose.encode(), self.job.encode(), nonce_s, self.nonce)
        if not hmac.compare_digest(self.proof, _mac(secret, b"client", *context)):
            raise AuthError("wrong secret or unknown job")
        return _mac(secret, b"server", *context), _keys(secret, context)


class Seal:
    """Frames of one direction: length, MAC over number and body, body."""

    HEADER_BYTES = 4 + MAC_BYTES

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def tag(self, body: bytes) -> bytes:
        """The MAC of the next frame of this direction."""
        self._number += 1
        return _mac(self._key, self._number.to_bytes(8, "big"), body)[:MAC_BYTES]

    def wrap(self, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + self.tag(body) + body

    @staticmethod
    def body_bytes(header: bytes) -> int:
        size = int.from_bytes(header[:4], "big")
        if size > MAX_MESSAGE_BYTES:
            raise WireError(f"frame of {size} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        return size

    def unwrap(self, header: bytes, body: bytes) -> bytes:
        if not hmac.compare_digest(header[4:], self.tag(body)):
            raise AuthError("a frame was altered, repeated or left out")
        return body
