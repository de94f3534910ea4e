"""Addresses: which ones stay on this machine, and under which one others reach it."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

EVERY_ADDRESS = ("", "0.0.0.0", "::")


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine reaches a socket that is bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_address(towards: str) -> str:
    """The address of this machine on the way to the host `towards`: whoever is there reaches this machine under it."""
    family, _, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # datagrams: nothing is sent, only the route is looked up
        return str(probe.getsockname()[0])


def http_url(listener: socket.socket, broker_url: str) -> str:
    """The URL to tell others for an HTTP server on `listener`; for one that listens everywhere, by the way to the broker."""
    host, port = listener.getsockname()[:2]
    if host in EVERY_ADDRESS:
        host = own_address(urlsplit(broker_url.split(",")[0]).hostname or "localhost")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
