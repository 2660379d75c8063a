"""An interpreter that has modules imported already and is forked for every verifier's script that wants them.

Contract: standard library only. It runs the python3 of a box's root file system, in a mount namespace with nothing but that
root, read-only, and no network (spawner.py `_preload`), and never runs or reads anything of a request: the fork does, and goes
the same way into the box as a command does (entering.py), the filter of system calls included, without the execve at its end.
It ends with its owner, with the spawner, or when its socket is closed. Its sources are handed over, as the root has none of
them; what they are called is forgotten before a script runs, so a candidate's modules may have the same names.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from environments.sandbox import entering
else:  # handed over as source: there are no packages
    import entering

SOURCES = ("shell_agent", "entering", "preloaded")
"""What is handed over, each after what it imports."""
CONTROL, OWNER, JOB = 3, 4, 5
"""Descriptors of the interpreter: its socket, a pidfd of its owner, and JSON with what LOADER and `serve` need."""
LOADER = f"""
import json, os, sys, types
with os.fdopen({JOB}) as file: job = json.load(file)
for name, source in job["sources"].items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
for name in job["sources"]: del sys.modules[name]
module.serve(job["modules"], bytes.fromhex(job["calls"]))
"""


def serve(modules: list[str], calls: bytes) -> None:
    """Import `modules`, say "ready", then fork for each request until the owner is gone. `calls` is the filter of forks."""
    control = socket.socket(fileno=CONTROL)
    for name in modules:
        with contextlib.suppress(ImportError):  # the script will say so itself
            importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    while True:
        readable, _, _ = select.select([control.fileno(), OWNER], [], [])
        if OWNER in readable:
            return
        packet, descriptors, _, _ = socket.recv_fds(control, 16, entering.DESCRIPTORS)
        if not packet:
            return
        if os.fork() == 0:
            try:
                control.close()
                os.close(OWNER)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                fds = entering.away(descriptors)
                entering.run_command(entering.read(fds[0]) | {"calls": calls}, fds[1:])
            finally:
                os._exit(125)
        for fd in descriptors:
            os.close(fd)
