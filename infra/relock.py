"""Writes infra/locks/cpu.txt from pyproject.toml: `make lock`. Needs the package index; resolves with uv.

The versions of the present lock are kept where they still fit (ARGS=--upgrade gives newer ones). What `LEFT_OUT` names is
resolved and then taken out. Digests are of every file the index offers for the pinned version, so the lock serves other
processors too; for another Python resolve anew (`--python 3.12`). Index addresses never get into the file.

torch: the local version "+cpu" must be found while resolving. Where pip has find-links configured they are asked too; where
that does not give it, PyTorch's own CPU index is.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from infra.install import TORCH_INDEX, SetupError, command, fetch_uv
from infra.lockfile import CPU_LOCK, LEFT_OUT, canonical, read_lock

ROOT = Path(__file__).resolve().parent.parent
HEAD = """# Resolved for:
# python: {python}
# platform: linux x86_64
# Written by `make lock`; installed without following dependencies (docs/decisions/0001-python-lock-without-deps.md).
"""


def without(text: str, names: set[str]) -> str:
    """A compiled requirements text without some pins (and their digests) and without comments and options."""
    kept, skip = [], False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("#") or line.startswith("--") or not line.strip():
            continue
        if pin := re.match(r"^([A-Za-z0-9._-]+)", line):
            skip = canonical(pin[1]) in names
        if not skip:
            kept.append(line)
    return "".join(kept)


def resolve(uv: Path, target: Path, *, python: str, more: list[str]) -> None:
    """Compile pyproject.toml with the extras cpu and dev into `target`, whose present pins are preferred."""
    argv = [str(uv), "pip", "compile", "-q", str(ROOT / "pyproject.toml"), "--extra", "cpu", "--extra", "dev"]
    argv += ["--python-version", python, "--generate-hashes", "--no-annotate", "--no-header", "--no-emit-index-url"]
    argv += ["--prerelease", "if-necessary-or-explicit", "-o", str(target)]
    links = _find_links()
    try:
        command([*argv, *links, *more], what="resolve", why="uv found no solution", fix="")
    except SetupError as error:
        print(f"lock: not with the configured index alone; asking PyTorch's CPU index too\n{error.why}", flush=True)
        torch = ["--extra-index-url", TORCH_INDEX, "--index-strategy", "unsafe-best-match"]
        command([*argv, *links, *torch, *more], what="resolve", why="uv found no solution", fix="see the message of uv above")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make lock", description="Write infra/locks/cpu.txt anew.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    parser.add_argument("--python", default=read_lock(CPU_LOCK).python or "3.11")
    parser.add_argument("--output", type=Path, default=CPU_LOCK)
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "lock.txt"
            shutil.copyfile(CPU_LOCK, target)
            uv = fetch_uv(ROOT / ".venv")
            resolve(uv, target, python=options.python, more=["--upgrade"] if options.upgrade else [])
            text = HEAD.format(python=options.python) + without(target.read_text("utf-8"), set(LEFT_OUT))
    except SetupError as error:
        print(f"lock: {error.what}\n  why:  {error.why}\n  fix:  {error.fix}", file=sys.stderr)
        return 1
    options.output.write_text(text, "utf-8")
    print(f"lock: {len(read_lock(options.output).pins)} packages in {options.output}")
    return 0


def _find_links() -> list[str]:
    asked = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return [f"--find-links={link}" for link in sorted(set(re.findall(r"find-links='([^' ]+)'", listed)))]


if __name__ == "__main__":
    sys.exit(main())
