"""Which addresses the server may send notifications to.

A user chooses the URL, but the server connects to it, from inside its network. So only addresses of the public internet
are allowed, besides the hosts and networks that the operator names.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from shoal.core.errors import ShoalError

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
RESOLVE_S = 5.0
MAX_URL = 2000


class Refused(ShoalError):
    """Notifications may not go there."""


class Allowed:
    """The hosts and networks inside that the operator allows: `hooks.internal`, `10.1.0.0/16`."""

    def __init__(self, words: Iterable[str] = ()) -> None:
        self.words = tuple(words)
        self._names: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for word in self.words:
            try:
                self._networks.append(ipaddress.ip_network(word, strict=False))
            except ValueError:
                self._names.add(word.lower())

    def has(self, host: str, address: Ip) -> bool:
        """Whether the server may connect to this address for a URL with this host."""
        if host.lower() in self._names or any(address in network for network in self._networks):
            return True
        return _is_public(address)


def _is_public(address: Ip) -> bool:
    """Whether the address is one of the public internet. IPv6 addresses that stand for IPv4 ones count as those."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is not None:
            return _is_public(inner)
        if address.teredo is not None or address in ipaddress.ip_network("64:ff9b::/96"):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def check_url(url: str) -> str:
    """The host of a URL to which notifications may be sent; Refused with what is wrong."""
    if len(url) > MAX_URL or any(not 32 < ord(c) < 127 for c in url):
        raise Refused(f"url: give at most {MAX_URL} characters without spaces and control characters")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise Refused(f"url: {str(error).lower()}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise Refused("url: give an address that begins with https:// or http://")
    if parts.username is not None or parts.password is not None:
        raise Refused("url: leave out the user and password; the signature proves who sends it")
    return host


async def resolve(host: str, port: int, allowed: Allowed) -> str:
    """An address of the host to which the server may connect; Refused if one of its addresses may not be used."""
    loop = asyncio.get_running_loop()
    try:
        lookup = loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found = await asyncio.wait_for(lookup, RESOLVE_S)
    except (OSError, TimeoutError, UnicodeError) as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        raise Refused(f"url: the host {host} cannot be found: {why}") from None
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    return str(_first_allowed(host, addresses, allowed))


def _first_allowed(host: str, addresses: Sequence[Ip], allowed: Allowed) -> Ip:
    for address in addresses:
        if not allowed.has(host, address):
            raise Refused(
                f"url: {host} is {address}, which is not on the public internet; "
                f"an admin can allow it: shoal up --webhook-host {host}"
            )
    if not addresses:
        raise Refused(f"url: the host {host} has no address")
    return addresses[0]
