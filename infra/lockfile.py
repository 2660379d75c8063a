"""Reading a lock file and comparing it with what is installed. Standard library only: it runs before the environment exists.

A lock file (infra/locks/*.txt) pins every distribution with the digests of its files, holds no index address, and says in
its head for which Python it was resolved (`# python: 3.11`). Some distributions that others ask for are left out on purpose
(`LEFT_OUT`; why: docs/decisions/0001-python-lock-without-deps.md), so a lock is installed without following dependencies.

Gap: extras and environment markers are not read; the lock is already resolved for one Python on one kind of machine.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

CPU_LOCK = Path(__file__).parent / "locks" / "cpu.txt"

LEFT_OUT = {
    "torchvision": "its public build links CUDA and breaks `import transformers` beside CPU torch",
    "torchaudio": "its public build links CUDA; text serving does not use it",
    "torchcodec": "its public build links CUDA; text serving does not use it",
    "triton": "compiles GPU kernels; nothing on the CPU path imports it",
}
"""Distributions that others require and that the CPU lock leaves out, with the reason."""

_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;\\]+)")


def canonical(name: str) -> str:
    """The normal form of a distribution name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Pin:
    """One pinned distribution and its lines in the lock, digests included."""

    name: str
    version: str
    text: str


@dataclass(frozen=True)
class Lock:
    """A whole lock file. `digest` is the SHA-256 of its bytes; `python` is "3.11" or the like."""

    pins: dict[str, Pin]
    python: str
    digest: str


def read_lock(path: Path = CPU_LOCK) -> Lock:
    """Parse a lock file. Raises ValueError naming file and line for a line that is neither pin, digest nor comment."""
    text = path.read_text("utf-8")
    pins: dict[str, Pin] = {}
    python, current = "", ""
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if head := re.match(r"^#\s*python:\s*(\S+)", line):
            python = head[1]
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if found := _PIN.match(line):
            current = canonical(found[1])
            pins[current] = Pin(current, found[2], line)
        elif current and line.lstrip().startswith("--hash="):
            pins[current] = Pin(current, pins[current].version, pins[current].text + line)
        else:
            raise ValueError(f"{path}, line {number}: not a pinned requirement; write the lock with `make lock`")
    return Lock(pins, python, hashlib.sha256(text.encode()).hexdigest())


def installed(site_packages: Path) -> dict[str, str]:
    """Name -> version of every distribution below a site-packages folder, from the folder names alone (milliseconds)."""
    found: dict[str, str] = {}
    if site_packages.is_dir():
        for entry in site_packages.iterdir():
            if entry.name.endswith(".dist-info") and "-" in entry.name:
                name, version = entry.name.removesuffix(".dist-info").rsplit("-", 1)
                found[canonical(name)] = version
    return found


def site_packages_of(venv: Path) -> Path:
    """The site-packages folder of a virtual environment (which may not exist yet)."""
    for folder in sorted((venv / "lib").glob("python3.*/site-packages")):
        return folder
    return venv / "lib" / "site-packages"


def differences(lock: Lock, have: dict[str, str]) -> dict[str, str]:
    """Name -> what is wrong ("missing" or "is 1.0, locked 1.1") for each pin that `have` does not meet."""
    wrong: dict[str, str] = {}
    for name, pin in lock.pins.items():
        if name not in have:
            wrong[name] = "missing"
        elif have[name] != pin.version:
            wrong[name] = f"is {have[name]}, locked {pin.version}"
    return wrong
