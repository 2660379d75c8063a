"""The label of served weights: `<campaign>@<version>`.

vLLM starts with "default" and a reload does not change the label, so whoever loads weights sets it. While a replica runs but is
not proven yet its label begins with `PROVING`, which no sampler accepts.
"""

from __future__ import annotations

import hashlib

PROVING = "proving:"


def label_of(campaign: str, version: int) -> str:
    return f"{campaign}@{version}"


def cache_salt_of(label: str) -> str:
    """A prefix-cache salt that no other version has; vLLM allows no "@" in one."""
    return hashlib.blake2b(label.encode(), digest_size=16).hexdigest()


def version_of(label: str, *, campaign: str) -> int | None:
    """The version in `label` when it is one of `campaign`, else None."""
    name, separator, number = label.rpartition("@")
    if not separator or name != campaign or not number.isdecimal():
        return None
    return int(number)
