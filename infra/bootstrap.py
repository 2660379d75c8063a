"""Set-up from a bare checkout to a working installation, one progress line a step; a second call takes about a second.

Contract: `python -m infra.bootstrap TARGET` (through infra/bootstrap.sh, which finds the right Python) does what TARGET needs
and nothing that is done already: `packages` (the virtual environment), `demo` (also root file system and base model), `test`
(also Docker's engine, its image, a browser and the tiny model). A step either finds out by itself that nothing is to be done,
or leaves a stamp with the digest of its inputs. Two calls at once wait for each other. Every
failure says what, why, and the command that fixes it. Standard library only: it runs before anything is installed.

Gap: system packages are installed with apt-get and only for root; elsewhere the command to run is printed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import pwd
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from infra import install
from infra.lockfile import CPU_LOCK, differences, installed, read_lock, site_packages_of

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"

TOOLS = {
    "bwrap": ("bubblewrap", "sandboxes run in it"),
    "mmdebstrap": ("mmdebstrap", "it builds the sandboxes' root file system"),
    "dockerd": ("docker.io", "the tests run real containers"),
    "chromium": ("chromium", "the tests take screenshots with it"),
}
"""Command -> (Debian package, what it is for)."""


@dataclass(frozen=True)
class Step:
    """One line of progress. `inputs` digests what the step depends on; None: the action finds out itself, every time."""

    name: str
    action: Callable[[], str]
    inputs: Callable[[], str] | None = None


def digest_of(*parts: Path | str) -> str:
    """SHA-256 over texts and over the contents of files."""
    running = hashlib.sha256()
    for part in parts:
        running.update((part.encode() if isinstance(part, str) else part.read_bytes()) + b"\0")
    return running.hexdigest()


def run_steps(steps: Sequence[Step], *, out: TextIO, stamps: Path) -> None:
    """Run what is not done; prints one line a step. Raises install.SetupError from the first step that fails."""
    for number, step in enumerate(steps, start=1):
        stamp = stamps / step.name.replace(" ", "-")
        want = step.inputs() if step.inputs else ""
        head = f"[{number}/{len(steps)}] {step.name}"
        if want and stamp.is_file() and stamp.read_text() == want:
            print(f"{head}: ready", file=out, flush=True)
            continue
        started = time.monotonic()
        print(f"{head} ...", file=out, flush=True)
        said = step.action()
        print(f"{head}: {said} ({time.monotonic() - started:.1f} s)", file=out, flush=True)
        if step.inputs:
            stamps.mkdir(parents=True, exist_ok=True)
            stamp.write_text(step.inputs())


def system_tools(commands: Sequence[str]) -> str:
    """Install missing system commands where root may; raises SetupError with the command elsewhere."""
    missing = [command for command in commands if shutil.which(command, path=_search_path()) is None]
    if not missing:
        return "ready"
    packages = [TOOLS[command][0] for command in missing]
    why = "; ".join(f"{command} is missing ({TOOLS[command][1]})" for command in missing)
    fix = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(packages)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise install.SetupError("system tools are missing and this user may not install them", why, f"as root: {fix}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    quiet = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0"]
    install.command([*quiet, "update"], what="refresh the package lists", why=why, fix=fix, env=env)
    install.command(
        [*quiet, "install", "-y", "--no-install-recommends", *packages], what="install them", why=why, fix=fix, env=env
    )
    return f"installed {', '.join(packages)}"


def virtual_environment() -> str:
    """Create .venv for this interpreter; an environment of another Python version is refused, never deleted."""
    want = _this_python()
    site = site_packages_of(VENV)
    if PYTHON.exists() and site.parent.name == f"python{want}":
        return "ready"
    if VENV.exists() and any(site.glob("*.dist-info")):
        raise install.SetupError(
            f"{VENV} belongs to another Python", f"the lock needs {want}", "make clean, then call this again"
        )
    install.command(
        [sys.executable, "-m", "venv", str(VENV)],
        what="create the virtual environment",
        why="everything is installed into .venv",
        fix=f"{sys.executable} -m venv .venv",
    )
    return f"Python {platform.python_version()}"


def packages() -> str:
    """Bring the environment to the lock; see infra/install.py."""
    lock = read_lock(CPU_LOCK)
    if lock.python and _this_python() != lock.python:
        raise install.SetupError(
            f"this is Python {_this_python()}",
            f"the lock is for {lock.python}",
            f"BESSEMER_PYTHON=python{lock.python} make ...",
        )
    return install.bring_to_lock(lock, VENV)


def project() -> str:
    """The project itself, editable, so that `bessemer` is a command and edits count at once."""
    install.command(
        [str(PYTHON), "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(ROOT)],
        what="install the project itself",
        why="the command `bessemer` comes from it",
        fix=".venv/bin/python -m pip install --no-deps --no-build-isolation -e .",
    )
    return "installed, editable"


def sanity() -> str:
    """`pip check`, tolerant of what the lock leaves out on purpose."""
    wrong = differences(read_lock(CPU_LOCK), installed(site_packages_of(VENV)))
    complaints = install.unexpected_complaints(PYTHON)
    if wrong or complaints:
        lines = [f"{name}: {what}" for name, what in wrong.items()] + complaints
        raise install.SetupError("the environment does not hold together", "; ".join(lines), "make clean, then again")
    return "consistent"


def module(*argv: str, needs: str) -> str:
    """Run one of the project's own set-up modules inside the environment; its output goes to the terminal."""
    shown = f".venv/bin/python -m {' '.join(argv)}"
    install.command([str(PYTHON), "-m", *argv], what=f"prepare {needs}", why=f"{needs} is needed", fix=shown, show=True)
    return "ready"


def steps_for(target: str, byte_code: install.ByteCode) -> list[Step]:
    """The steps of one target, in order."""
    packaged = [
        Step("virtual environment", virtual_environment),
        Step("packages", packages),
        Step("project", project, lambda: digest_of(ROOT / "pyproject.toml", str(ROOT))),
        Step("byte code", byte_code.start),
        Step("consistency", sanity, lambda: read_lock(CPU_LOCK).digest),
    ]
    if target == "packages":
        return packaged
    tools = ["bwrap", "mmdebstrap"] if target == "demo" else list(TOOLS)
    rootfs = [] if target == "demo" else ["--docker"]
    names = ["smollm2-135m"] if target == "demo" else ["smollm2-135m", "tiny"]
    return [
        Step("system tools", partial(system_tools, tools)),
        *packaged,
        Step(
            f"sandbox root file system{' and image' if rootfs else ''}",
            partial(module, "environments.images", *rootfs, needs="the sandbox root file system"),
        ),
        *(
            Step(
                f"base model {name}",
                partial(module, "models.base_model", name, needs=f"the base model '{name}'"),
            )
            for name in names
        ),
    ]


@contextmanager
def only_one(path: Path, out: TextIO) -> Iterator[None]:
    """Hold the set-up lock; a second call says that it waits."""
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: another set-up is running in this checkout; waiting for it", file=out, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when all is ready; 1 after a failed step, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="infra/bootstrap.sh", description="Set up this checkout.")
    parser.add_argument("target", choices=["packages", "demo", "test"])
    target = parser.parse_args(arguments).target
    if not os.environ.get("HOME"):
        os.environ["HOME"] = pwd.getpwuid(os.geteuid()).pw_dir
    try:
        with only_one(ROOT / ".setup.lock", sys.stdout):
            byte_code, done = install.ByteCode(VENV), False
            try:
                run_steps(steps_for(target, byte_code), out=sys.stdout, stamps=VENV / "stamps")
                done = True
            finally:
                byte_code.finish(wait=done)
    except install.SetupError as error:
        print(f"\nsetup: {error.what}\n  why:  {error.why}\n  fix:  {error.fix}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; call it again, it goes on where it stopped", file=sys.stderr)
        return 130
    return 0


def _this_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


if __name__ == "__main__":
    sys.exit(main())
