"""No installed distribution brings a top-level module with one of our names; they are generic, and imports would mix.

Looks at the recorded files of every distribution in this environment, `tests` included (a distribution that ships its tests
as a top-level package would shadow ours). Exit status 1 with a line per clash.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable
from pathlib import PurePosixPath

OURS = frozenset({"flows", "tasks", "environments", "models", "data_contracts", "infra", "tests"})
PROJECT = "bessemer"


def clashes(files: Iterable[tuple[str, PurePosixPath]]) -> list[str]:
    """One line per (distribution, module) clash, from pairs of distribution name and path in site-packages."""
    found: dict[tuple[str, str], PurePosixPath] = {}
    for distribution, path in files:
        top = path.parts[0] if path.parts else ""
        name = top if len(path.parts) > 1 else top.split(".")[0] if path.suffix in {".py", ".so", ".pth"} else ""
        if name in OURS and distribution.lower() != PROJECT:
            found.setdefault((distribution, name), path)
    return [
        f"{distribution} brings a top-level module '{name}' ({path})" for (distribution, name), path in sorted(found.items())
    ]


def installed_files() -> Iterable[tuple[str, PurePosixPath]]:
    """Every recorded file of every distribution of this environment."""
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]  # parsed anew at every access
        for file in distribution.files or ():
            yield name, file


def main() -> int:
    lines = clashes(installed_files())
    for line in lines:
        print(f"module names: {line}; leave it out of the lock, or import breaks", file=sys.stderr)
    if not lines:
        print(f"module names: no distribution clashes with {', '.join(sorted(OURS))}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
