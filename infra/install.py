"""Installing the lock into a virtual environment, fast. Standard library only.

Method (measured in docs/results/setup.md): uv installs everything but torch, while pip installs torch at the same time,
because the CPU build of torch is found where pip is configured to look. Only what differs from the lock is touched. When uv
cannot be had or fails, pip does it all, more slowly. Digests are always required and dependencies are never followed.

torch: asked for plainly first; when no index known to pip has the locked build, PyTorch's own CPU index is added. The digest
in the lock decides in both cases what is accepted.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.lockfile import LEFT_OUT, Lock, canonical, differences, installed, site_packages_of

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""The only index address in the project: tried for torch alone, after the configured ones failed."""
INSTALLER = Path(__file__).parent / "locks" / "installer.txt"
RESTART = "installing"
"""File in the environment that names what an installation is about to write; left there by one that was killed."""

RARELY_IMPORTED = (
    r"/tests?/|/testing/|/(transformers|model_executor)/models/|site-packages/(pip|setuptools|altair|playwright|mypy)/"
)
"""Files that are left to be compiled when they are first imported."""


class SetupError(Exception):
    """A set-up step that failed: what, why, and the command that fixes it."""

    def __init__(self, what: str, why: str, fix: str) -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(f"{what}: {why}. {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.what, self.why, self.fix))


def command(
    argv: Sequence[str], *, what: str, why: str, fix: str, env: Mapping[str, str] | None = None, show: bool = False
) -> str:
    """Run a command; its output is kept for the error, or shown. Raises SetupError with the last lines of it."""
    try:
        done = subprocess.run(
            list(argv),
            env=dict(env) if env is not None else None,
            stdin=subprocess.DEVNULL,
            stdout=None if show else subprocess.PIPE,
            stderr=None if show else subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError as error:
        raise SetupError(f"could not {what}", f"{argv[0]} was not found; {why}", fix) from error
    if done.returncode:
        tail = "\n        ".join((done.stdout or "").strip().splitlines()[-12:])
        raise SetupError(f"could not {what} (exit status {done.returncode})", f"{why}\n        {tail}".rstrip(), fix)
    return done.stdout or ""


def bring_to_lock(lock: Lock, venv: Path) -> str:
    """Install what differs from the lock, and again what a killed installation may have left half written."""
    marker = venv / RESTART
    unfinished = set(marker.read_text().split()) if marker.is_file() else set()
    wanted = sorted(set(differences(lock, installed(site_packages_of(venv)))) | (unfinished & set(lock.pins)))
    if not wanted:
        marker.unlink(missing_ok=True)
        return "ready"
    marker.write_text("\n".join(wanted))
    for name in unfinished & set(wanted):
        _forget(site_packages_of(venv), name)
    python = venv / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="bessemer-setup-") as folder:
        most, torch = Path(folder) / "most.txt", Path(folder) / "torch.txt"
        most.write_text("".join(lock.pins[name].text for name in wanted if name != "torch"))
        torch.write_text(lock.pins["torch"].text if "torch" in wanted else "")
        helper = None
        if torch.read_text():
            helper = subprocess.Popen(  # at the same time as the rest: both mostly unpack
                _pip(python, torch), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
            )
        try:
            if most.read_text() and not _with_uv(venv, most):
                _plain_pip(python, most)
        finally:
            torch_failed = helper is not None and helper.wait() != 0
        if torch_failed:
            _torch_from_its_index(python, torch, lock)
    left = differences(lock, installed(site_packages_of(venv)))
    if left:
        raise SetupError("the installation is incomplete", ", ".join(f"{n}: {w}" for n, w in left.items()), "call it again")
    marker.unlink()
    return f"installed {len(wanted)} of {len(lock.pins)}"


def _forget(site_packages: Path, name: str) -> None:
    """Remove the record of a distribution that may be half written, so that no installer takes it for whole."""
    for folder in site_packages.glob("*.dist-info"):
        if canonical(folder.name.removesuffix(".dist-info").rsplit("-", 1)[0]) == name:
            shutil.rmtree(folder)


def fetch_uv(venv: Path) -> Path:
    """The uv of infra/locks/installer.txt, in a folder of its own inside the environment."""
    folder = venv / "installer"
    if not (folder / "bin" / "uv").exists():
        argv = _pip(venv / "bin" / "python", INSTALLER, "--target", str(folder))
        command(argv, what="fetch uv", why="it resolves and installs quickly", fix="check that pip reaches a package index")
    return folder / "bin" / "uv"


def unexpected_complaints(python: Path) -> list[str]:
    """Lines of `pip check` but for those about distributions that the lock leaves out on purpose."""
    done = subprocess.run([str(python), "-m", "pip", "check"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    found = []
    for line in done.stdout.splitlines():
        asks = re.search(r" requires ([A-Za-z0-9._-]+), which is not installed", line)
        if not (asks and canonical(asks[1]) in LEFT_OUT):
            found.append(line)
    return found


class ByteCode:
    """Byte-compiles the packages while later steps run, so that first imports keep inside their deadlines. Once a set."""

    def __init__(self, venv: Path) -> None:
        self.venv, self.stamp = venv, venv / "stamps" / "byte-code"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start it unless it is done for the installed set."""
        if self.stamp.is_file() and self.stamp.read_text() == self._set():
            return "ready"
        argv = [str(self.venv / "bin" / "python"), "-m", "compileall", "-q", "-j", "0", "-x", RARELY_IMPORTED]
        argv.append(str(site_packages_of(self.venv)))
        nice = shutil.which("nice")
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen([nice, *argv] if nice else argv, stdin=quiet, stdout=quiet, stderr=quiet)
        return "compiling in the background"

    def finish(self, *, wait: bool) -> None:
        """Wait for it and remember the set, or stop it after a failure."""
        if self.process is None:
            return
        if not wait:
            self.process.terminate()
        self.process.wait()  # its exit status is not looked at: some packages ship files for other Pythons
        if wait:
            self.stamp.parent.mkdir(parents=True, exist_ok=True)
            self.stamp.write_text(self._set())

    def _set(self) -> str:
        return "\n".join(f"{name} {version}" for name, version in sorted(installed(site_packages_of(self.venv)).items()))


def _pip(python: Path, requirements: Path, *more: str) -> list[str]:
    flags = ["-q", "--disable-pip-version-check", "--no-deps", "--require-hashes", "--no-compile"]
    return [str(python), "-m", "pip", "install", *flags, *more, "-r", str(requirements)]


def _plain_pip(python: Path, requirements: Path) -> None:
    command(
        _pip(python, requirements),
        what="install the locked packages",
        why="pip could not fetch or verify them",
        fix="check that pip reaches a package index (pip config list), then call this again",
    )


def _with_uv(venv: Path, requirements: Path) -> bool:
    """Install with uv; False when uv cannot be had or fails, so that the caller takes pip."""
    python = venv / "bin" / "python"
    try:
        uv = fetch_uv(venv)
        index = _configured_index(python)
        argv = [str(uv), "pip", "install", "-q", "--no-config", "--python", str(python), "--no-deps", "--require-hashes"]
        command(
            [*argv, *(["--index-url", index] if index else []), "-r", str(requirements)],
            what="install with uv",
            why="see above",
            fix="",
            env={"UV_HTTP_TIMEOUT": "180", "UV_LINK_MODE": os.environ.get("UV_LINK_MODE", "hardlink"), **os.environ},
        )
    except SetupError as error:
        print(f"setup: uv could not do it, pip takes over ({error.why.splitlines()[-1].strip()})", file=sys.stderr, flush=True)
        return False
    return True


def _configured_index(python: Path) -> str:
    """The main index that pip is configured with, if any, so that uv asks the same one."""
    listed = subprocess.run([str(python), "-m", "pip", "config", "list"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"^[^=]*\bindex-url='([^' ]+)'", re.sub(r"^.*extra-index-url.*$", "", listed, flags=re.M), flags=re.M)
    return found[1] if found else ""


def _torch_from_its_index(python: Path, requirements: Path, lock: Lock) -> None:
    version = lock.pins["torch"].version
    print(f"setup: torch {version} is not where pip looks; trying PyTorch's own CPU index", flush=True)
    command(
        _pip(python, requirements, "--extra-index-url", TORCH_INDEX),
        what=f"install torch {version}",
        why=f"neither the configured index nor {TORCH_INDEX} gave a build whose digest is in the lock",
        fix="check the network; for another Python or processor write a new lock with `make lock`",
    )
