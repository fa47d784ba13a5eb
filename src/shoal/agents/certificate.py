"""The control plane's self-signed certificate, and TLS contexts for both ends.

Agents do not check names or a certificate authority: they know the SHA-256 fingerprint of the one certificate that they
accept, from their join token.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

VALID_DAYS = 3650


class FingerprintError(Exception):
    """The server has another certificate than the agent expects."""


def make_certificate(certificate: Path, key: Path) -> None:
    """Make a new key and a self-signed certificate. Only the owner can read the key."""
    # The server's dependencies are not installed where only an agent runs.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal control plane")])
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
    with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(
            private.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def fingerprint_of(certificate: Path) -> str:
    return fingerprint(ssl.PEM_cert_to_DER_cert(certificate.read_text()))


def fingerprint(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, key)
    return context


def client_context() -> ssl.SSLContext:
    """Encrypts but accepts any certificate. Call `check_fingerprint` before anything is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_fingerprint(connection: ssl.SSLObject, expected: str) -> None:
    der = connection.getpeercert(binary_form=True)
    if der is None or not hmac.compare_digest(fingerprint(der), expected):
        raise FingerprintError(
            "the control plane's certificate is not the one in the join token: "
            "check the address, or create a new token there"
        )
