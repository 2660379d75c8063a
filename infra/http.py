"""HTTP clients of local services."""

from __future__ import annotations

from collections.abc import Iterable


def needs_tls(addresses: Iterable[str]) -> bool:
    """Whether any address is https: what to give httpx as `verify`.

    httpx reads the system's certificates for every client it builds, 30 to 170 ms of CPU, even where only http is spoken.
    """
    return any(address.startswith("https:") for address in addresses)
