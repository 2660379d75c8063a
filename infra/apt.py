"""What the host's package manager says: its release, its mirrors, and the tools that sandboxes need.

Contract: reads /etc/os-release and /etc/apt, writes nothing but what apt-get installs, and installs only as root. Entries of
third parties (other releases, other components) are left out. Gap: Debian and its derivatives only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data_contracts.errors import MissingRequirement

TOOLS: dict[str, str] = {"bwrap": "bubblewrap", "mmdebstrap": "mmdebstrap"}
"""Command -> Debian package, needed for bubblewrap boxes and for the root file system."""
DOCKER_TOOLS: dict[str, str] = {"dockerd": "docker.io"}


@dataclass(frozen=True)
class AptSources:
    """One-line apt entries of this host's own release, its main mirror, and apt options that set proxies."""

    suite: str
    mirror: str
    lines: tuple[str, ...]
    proxies: tuple[str, ...]


def release() -> str:
    """Code name of the host's release, for example "bookworm"; "unknown" where os-release has none."""
    try:
        pairs = (line.partition("=") for line in Path("/etc/os-release").read_text().splitlines())
    except OSError:
        return "unknown"
    return next((value.strip('"') for key, _, value in pairs if key == "VERSION_CODENAME"), "unknown")


def apt_sources(folder: Path = Path("/etc/apt")) -> AptSources:
    """The host's own mirrors. Raises MissingRequirement where apt has none for this release."""
    suite = release()
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    entries = [entry for file in files if file.is_file() for entry in _entries(file)]
    mine = [
        (options, uri, name, parts) for options, uri, name, parts in entries if name == suite or name.startswith(f"{suite}-")
    ]
    base = [uri for _, uri, name, parts in mine if name == suite and "main" in parts]
    if not base:
        raise MissingRequirement(
            f"{folder} names no mirror with component 'main' for release '{suite}', so no sandbox root file system can be"
            " built; add one and run: apt-get update"
        )
    lines = tuple(f"deb {options}{uri} {name} {' '.join(parts)}" for options, uri, name, parts in mine if "main" in parts)
    return AptSources(suite, base[0], lines, _proxies())


def _entries(file: Path) -> Iterator[tuple[str, str, str, list[str]]]:
    """(options, uri, suite, components) of every enabled binary entry, from either of apt's two formats."""
    text = file.read_text(errors="replace")
    if file.suffix == ".sources":
        for stanza in text.split("\n\n"):
            rows = [row for row in stanza.splitlines() if row and not row.startswith("#")]
            fields = {
                key.strip().lower(): value.split() for key, _, value in (row.partition(":") for row in rows if ":" in row)
            }
            if "deb" not in fields.get("types", []) or fields.get("enabled", ["yes"])[0].lower() == "no":
                continue
            signed = fields.get("signed-by", [])
            options = f"[signed-by={signed[0]}] " if len(signed) == 1 and signed[0].startswith("/") else ""
            for uri in fields.get("uris", []):
                for suite in fields.get("suites", []):
                    yield options, uri, suite, fields.get("components", [])
    elif file.suffix == ".list":
        for row in text.splitlines():
            words = row.split("#")[0].split()
            if not words or words[0] != "deb":
                continue
            rest, options = words[1:], ""
            if rest and rest[0].startswith("["):
                end = next(i for i, word in enumerate(rest) if word.endswith("]"))
                options, rest = " ".join(rest[: end + 1]) + " ", rest[end + 1 :]
            if len(rest) >= 3:
                yield options, rest[0], rest[1], rest[2:]


def _proxies() -> tuple[str, ...]:
    if not shutil.which("apt-config"):
        return ()
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False, timeout=30).stdout
    return tuple(row for row in dump.splitlines() if row.startswith("Acquire::") and "proxy" in row.lower())


def needed_packages(*, docker: bool = False) -> list[str]:
    """Debian packages whose commands are missing on this host."""
    wanted = TOOLS | (DOCKER_TOOLS if docker else {})
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return sorted(package for command, package in wanted.items() if not shutil.which(command, path=path))


def install(*, docker: bool = False, progress: Callable[[str], None]) -> None:
    """Install what is missing. Raises MissingRequirement where that is not allowed or does not work."""
    packages = needed_packages(docker=docker)
    if not packages:
        return
    names = " ".join(packages)
    command = f"apt-get install -y --no-install-recommends {names}"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise MissingRequirement(f"sandboxes need {names}, which this host lacks; run as root: {command}")
    progress(f"installing {names}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    # A failed update is not fatal: old package lists may do. The installation below is what counts.
    subprocess.run(["apt-get", "update", "-qq"], env=environment, check=False, timeout=300, capture_output=True)
    done = subprocess.run(command.split(), env=environment, check=False, timeout=900, capture_output=True, text=True)
    if done.returncode != 0 or needed_packages(docker=docker):
        raise MissingRequirement(
            f"sandboxes need {names}, and apt could not install it: {(done.stderr or done.stdout)[-500:].strip()};"
            f" run: {command}"
        )
