"""The control plane's self-signed certificate, and its TLS context.

Agents do not check names or a certificate authority: they know the SHA-256 fingerprint of the one certificate that they
accept, from their join token.
"""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from shoal.wire.atomic_file import write_atomically
from shoal.wire.tls import fingerprint

VALID_DAYS = 3650


def make_certificate(certificate: Path, key: Path) -> None:
    """Make a new key and a self-signed certificate. Only the owner can read the key."""
    signed, private = new_certificate("shoal control plane")
    with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(private)
        file.flush()
        os.fsync(file.fileno())
    # The certificate last, and at once: where it is, both are complete.
    write_atomically(certificate, signed, 0o644)


def new_certificate(common_name: str) -> tuple[bytes, bytes]:
    """A self-signed certificate and its key, both in PEM."""
    # The server's dependencies are not installed where only an agent runs.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))  # clocks of nodes may be a day off
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .sign(private, hashes.SHA256())
    )
    return signed.public_bytes(serialization.Encoding.PEM), private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def fingerprint_of(certificate: Path) -> str:
    return fingerprint(ssl.PEM_cert_to_DER_cert(certificate.read_text()))


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, key)
    return context
