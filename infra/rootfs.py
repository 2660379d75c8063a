"""The one root file system that every sandbox backend uses, and the host tools that the sandboxes need.

Contract: `ensure_rootfs` answers the path of an unpacked, never-changed Debian tree (minbase, python3, pytest, the library of
box_view.c) below `cache()/rootfs/<variant>-<digest>`; the digest is that of the recipe (release, architecture, packages,
library, fix-ups). It is built aside and renamed, so a reader sees a whole tree or none; two builders wait for each other.
`ensure_image` gives the same tree to Docker as `bessemer-sandbox:<variant>-<digest>`. A variant is a name of VARIANTS, and
"name,package,package" adds packages of Debian to one, so that a domain declares what its boxes need without a line of code
here. Mirrors are the host's own apt sources: no host name is written here. Gaps: only Debian-like hosts can build; elsewhere
copy a built tree into the cache, or set the image up with infra/docker/Dockerfile.sandbox. The packages' versions are the
mirror's of the day.

    python -m infra.rootfs             # tools for bubblewrap (apt, where root may) and the tree
    python -m infra.rootfs --docker    # also Docker's engine and the image
    python -m infra.rootfs --variant node --variant base,jq,sqlite3
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
from filelock import FileLock

from data_contracts.errors import InfraError, MissingRequirement
from infra import box_view
from infra.apt import apt_sources, install, release
from infra.docker_engine import engine_client, ensure_dockerd
from infra.paths import cache

Progress = Callable[[str], None]

RECIPE = 2
"""Raise it when the fix-ups below change: the digest changes, and the tree is built anew."""
VARIANTS: dict[str, tuple[str, ...]] = {
    "base": ("python3", "python3-pytest"),
    "node": ("python3", "python3-pytest", "nodejs"),
}
"""Declared root file systems: name (SandboxSpec.image) -> packages on top of minbase. Boxes themselves need python3."""
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]{1,60}")
BOX_UID = 1000
FOLDERS = ("work", "workspace", "testbed", "app", "home/box")
"""Empty folders in the tree: the possible work folders of a box."""
_VIEW = (box_view.SOURCE, Path(box_view.__file__))
"""What is compiled into the tree, and how."""
_UNWANTED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian", "var/cache/apt")


def silent(message: str) -> None:
    """The progress callback that says nothing."""


def packages_of(variant: str) -> tuple[str, ...]:
    """The packages of `variant` on top of minbase. Raises MissingRequirement for one that is not declared."""
    name, *more = variant.split(",")
    if name not in VARIANTS or not all(_PACKAGE.fullmatch(package) for package in more):
        raise MissingRequirement(
            f"no root file system variant '{variant[:80]}' is declared; choose one of {sorted(VARIANTS)}, write"
            " 'base,package,package' with packages of Debian, or add it to infra/rootfs.py VARIANTS"
        )
    return (*VARIANTS[name], *(package for package in sorted(set(more)) if package not in VARIANTS[name]))


def digest(variant: str) -> str:
    """Twelve hex digits that name the recipe of `variant` on this host. Raises MissingRequirement for an undeclared one."""
    view = [hashlib.sha256(path.read_bytes()).hexdigest() for path in _VIEW]
    recipe = [RECIPE, release(), platform.machine(), packages_of(variant), FOLDERS, BOX_UID, view]
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]


def _label(variant: str) -> str:
    """`variant` as a part of file names and image tags."""
    return f"{re.sub('[^a-z0-9_.-]', '-', variant)[:60]}-{digest(variant)}"


def rootfs_path(variant: str = "base") -> Path:
    """Where the tree of `variant` is, or will be."""
    return cache() / "rootfs" / _label(variant)


def image_name(variant: str = "base") -> str:
    """The Docker image with the same tree."""
    return f"bessemer-sandbox:{_label(variant)}"


def ensure_rootfs(variant: str = "base", *, progress: Progress = silent) -> Path:
    """The tree, built when it is not there yet (some 30 s). Raises MissingRequirement, InfraError("image_missing")."""
    target = rootfs_path(variant)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.is_dir():
            return target
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            progress(f"building the sandbox root file system '{variant}' ({', '.join(packages_of(variant))})")
            tree = aside / "root"
            tree.mkdir(mode=0o755)
            _bootstrap(tree, packages_of(variant), log=target.with_suffix(".log"))
            _fix_up(tree)
            tree.rename(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    progress(f"sandbox root file system ready: {target}")
    return target


def ensure_image(variant: str = "base", *, progress: Progress = silent) -> str:
    """Import the tree into Docker's engine unless the image exists; answers its name. The engine must be reachable."""
    name = image_name(variant)
    with engine_client() as client, FileLock(f"{rootfs_path(variant)}.image.lock"):
        if client.get(f"/images/{name}/json").status_code == httpx.codes.OK:
            return name
        tree = ensure_rootfs(variant, progress=progress)
        progress(f"importing {tree.name} into Docker as {name}")
        repository, tag = name.split(":")
        answer = client.post(
            "/images/create",
            params={"fromSrc": "-", "repo": repository, "tag": tag},
            content=_tar_stream(tree),
            headers={"content-type": "application/x-tar"},
            timeout=600,
        )
        if answer.status_code != httpx.codes.OK or '"error"' in answer.text:
            raise InfraError("image_missing", f"Docker refused to import {tree}: {answer.text[-500:]}")
    return name


def _bootstrap(tree: Path, packages: tuple[str, ...], *, log: Path) -> None:
    sources = apt_sources()
    root = os.geteuid() == 0
    include = ",".join(dict.fromkeys((*packages, box_view.COMPILER)))
    after = [["python3", f"/{_VIEW[1].name}"], ["rm", *(f"/{path.name}" for path in _VIEW)]]
    after += [] if box_view.COMPILER in packages else [["dpkg", "--purge", box_view.COMPILER]]
    if shutil.which("mmdebstrap"):
        lines = "".join(f"{line}\n" for line in sources.lines)
        mode = "root" if root else "unshare"
        command = ["mmdebstrap", f"--mode={mode}", "--variant=minbase", f"--include={include}", "--format=directory"]
        command += [f"--aptopt={option}" for option in sources.proxies]
        command += [f"--dpkgopt=path-exclude=/{folder}/*" for folder in _UNWANTED if folder.startswith("usr/")]
        command += [f"--customize-hook=upload {shlex.quote(str(path))} /{path.name}" for path in _VIEW]
        command += [f'--customize-hook=chroot "$1" {" ".join(words)}' for words in after]
        command += [sources.suite, str(tree), "-"]
        command_input, after = lines, []
    elif shutil.which("debootstrap") and root:
        command = ["debootstrap", "--variant=minbase", f"--include={include}", sources.suite, str(tree), sources.mirror]
        command_input = ""
    else:
        raise MissingRequirement(
            "building the sandbox root file system needs mmdebstrap (or debootstrap as root), and neither is here;"
            " run: apt-get install -y mmdebstrap"
        )
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/"}
    environment |= {key: value for key, value in os.environ.items() if key.lower() in {"http_proxy", "https_proxy", "no_proxy"}}
    with log.open("w") as output:
        done = subprocess.run(
            command, input=command_input, text=True, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False,
            timeout=1800, start_new_session=True,
        )  # fmt: skip
    if done.returncode != 0:
        tail = log.read_text(errors="replace")[-800:]
        raise InfraError(
            "image_missing",
            f"'{' '.join(command[:2])} ...' ended with {done.returncode} (log: {log}): {tail}\nCheck that `apt-get update`"
            " works on this host, then run: python -m infra.rootfs",
        )
    for path in _VIEW if after else ():
        shutil.copy(path, tree)
    for words in after:
        ended = subprocess.run(["chroot", str(tree), *words], capture_output=True, text=True, check=False, env=environment)
        if ended.returncode != 0:
            raise InfraError("image_missing", f"'{' '.join(words)}' in {tree} ended with {ended.returncode}: {ended.stderr}")


def _fix_up(tree: Path) -> None:
    """Take out what names the host or could raise privileges, add the box's user and its folders."""
    for folder in (*_UNWANTED, "var/lib/apt/lists", "var/log", "tmp", "run"):
        shutil.rmtree(tree / folder, ignore_errors=True)
    for folder in ("tmp", "run", "var/log", "proc", "sys", "dev", *FOLDERS):
        (tree / folder).mkdir(parents=True, exist_ok=True)
    etc = tree / "etc"
    with (etc / "passwd").open("a") as passwd:
        passwd.write(f"box:x:{BOX_UID}:{BOX_UID}:box:/home/box:/bin/sh\n")
    with (etc / "group").open("a") as group:
        group.write(f"box:x:{BOX_UID}:\n")
    for name, text in {"hostname": "box\n", "hosts": "127.0.0.1 localhost box\n::1 localhost\n", "resolv.conf": ""}.items():
        (etc / name).unlink(missing_ok=True)
        (etc / name).write_text(text)
    (etc / "machine-id").write_text("")
    shutil.rmtree(etc / "apt", ignore_errors=True)
    for folder, _, names in os.walk(tree):
        for name in names:
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
                os.chmod(path, stat.S_IMODE(mode) & ~(stat.S_ISUID | stat.S_ISGID))


def _tar_stream(tree: Path) -> Iterator[bytes]:
    """The tree as an uncompressed tar, streamed through a pipe."""
    read_end, write_end = os.pipe()

    def write() -> None:
        with os.fdopen(write_end, "wb") as sink, tarfile.open(fileobj=sink, mode="w|") as archive:
            for entry in sorted(tree.iterdir()):
                archive.add(entry, arcname=entry.name, filter=lambda info: None if info.isdev() else info)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    with os.fdopen(read_end, "rb") as source:
        while block := source.read(1 << 20):
            yield block
    writer.join()


def prepare(variants: Sequence[str], *, docker: bool, progress: Progress) -> None:
    """The host's tools and these root file systems; with `docker` the engine and their images too."""
    for variant in variants:
        packages_of(variant)
    install(docker=docker, progress=progress)
    for variant in variants:
        progress(str(ensure_rootfs(variant, progress=progress)))
    if docker:
        ensure_dockerd(progress=progress)
        for variant in variants:
            progress(ensure_image(variant, progress=progress))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.rootfs", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--docker", action="store_true", help="also set up Docker's engine and the sandbox image")
    parser.add_argument(
        "--variant",
        action="append",
        metavar="NAME[,PACKAGE...]",
        help=f"{', '.join(VARIANTS)}; may be repeated (default: base)",
    )
    chosen = parser.parse_args(arguments)

    def progress(message: str) -> None:
        sys.stdout.write(f"rootfs: {message}\n")
        sys.stdout.flush()

    try:
        prepare(chosen.variant or ["base"], docker=chosen.docker, progress=progress)
    except (MissingRequirement, InfraError) as error:
        sys.stderr.write(f"rootfs: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
