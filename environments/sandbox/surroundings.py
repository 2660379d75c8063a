"""What of a spec a command finds around it on every backend: its variables, its user's name, the date of its clock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

from data_contracts.errors import InputError
from data_contracts.records import SandboxSpec

USER = "box"
"""The one user of commands (uid 1000, see infra/rootfs.py BOX_UID)."""
_FIRST_YEAR, _LAST_YEAR = 1971, 2100
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def environment(spec: SandboxSpec, extra: Mapping[str, str]) -> dict[str, str]:
    """All variables a command sees: ours, then the problem's, then the request's. Nothing of the host's gets in."""
    fixed = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "USER": USER, "LANG": "C.UTF-8",  # noqa: S108
        "LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    merged = fixed | dict(spec.env) | dict(extra)
    for name, value in merged.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise InputError(f"{name!r} cannot be an environment variable", field="env", remedy="Use letters, digits and '_'")
    return merged


def clock(spec: SandboxSpec) -> float | None:
    """`spec.clock` in seconds since 1970; None for the right time. Raises InputError for what is no date and time."""
    if spec.clock is None:
        return None
    try:
        found = datetime.fromisoformat(spec.clock)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None or not _FIRST_YEAR <= found.year <= _LAST_YEAR:
        raise InputError(
            f"{spec.clock[:40]!r} is no date and time with a zone, from {_FIRST_YEAR} to {_LAST_YEAR}", field="sandbox.clock",
            remedy="Write for example '2025-01-15T12:00:00Z', or null for the right time",
        )  # fmt: skip
    return found.timestamp()
