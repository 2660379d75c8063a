"""Compiles box_view.c into a root file system, where every program then loads it: the fixed clock and processors of boxes.

Contract: standard library only; run as root of that file system (a chroot, or a line of a Dockerfile), where tcc and python3
are installed: `python3 box_view.py`. The source lies beside this file. It is loaded through /etc/ld.so.preload, so no variable
of an environment has to be kept. `limits` is what the library reads in a box (box_view.c says how).
"""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
LIBRARY = "/usr/lib/box_view.so"
COMPILER = "tcc"
_PT_GNU_STACK, _READ_WRITE = 0x6474E551, 6


def limits(*, began: float, shown: float | None, cpus: float) -> tuple[int, int]:
    """Soft and hard RLIMIT_LOCKS of a box whose clock showed `shown` (None: the right time) when it was `began`, in seconds
    since 1970, and which sees `cpus` processors, rounded up."""
    real = round(began * 1e6)
    return real if shown is None else round(shown * 1e6), real * 1024 + min(math.ceil(cpus), 1023)


def install() -> None:
    """Compile, and have the loader load it. Raises RuntimeError when a program then does not start without complaint."""
    subprocess.run([COMPILER, "-nostdlib", "-shared", "-o", LIBRARY, str(SOURCE)], check=True)
    library = Path(LIBRARY)
    library.write_bytes(_plain_stack(library.read_bytes()))
    library.chmod(0o644)
    Path("/etc/ld.so.preload").write_text(f"{LIBRARY}\n")
    tried = subprocess.run(["/bin/true"], capture_output=True, text=True, check=False)
    if tried.returncode or tried.stderr:
        raise RuntimeError(f"{LIBRARY} does not load: {tried.stderr}")


def _plain_stack(elf: bytes) -> bytes:
    """The library with a header that asks for a stack that is not executable, which tcc leaves out."""
    (start,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    table = elf[start : start + size * count] + struct.pack("<IIQQQQQQ", _PT_GNU_STACK, _READ_WRITE, 0, 0, 0, 0, 0, 16)
    padded = bytearray(elf + bytes(-len(elf) % 16))
    struct.pack_into("<Q", padded, 32, len(padded))
    struct.pack_into("<H", padded, 56, count + 1)
    return bytes(padded) + table


if __name__ == "__main__":
    try:
        install()
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        sys.exit(f"box_view: {error}")
