"""The way to the spawner, the small process that starts commands in boxes (spawner.py), and to its preloaded interpreters.

Contract: one a backend, for threads. The spawner is started with the first request, and again with the next one after it died;
what it had started died with it. `close` ends it, with every interpreter; a request after that starts a new one. Everything
blocks for moments, the start of an interpreter for the time of its imports.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_contracts.errors import InfraError
from data_contracts.protocols import Preload
from environments.sandbox import seccomp, spawner

START_SECONDS = 30.0
_PRELOAD_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0",
}  # fmt: skip
"""Of interpreters that are forked; the fork then takes its command's own."""


class SpawnerLink:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._preloading = threading.Lock()
        self._preloaded: dict[tuple[int, Path, Preload], socket.socket] = {}
        """Sockets of interpreters that are forked, by spawner, root file system and what they have imported."""

    @property
    def pid(self) -> int:
        """0 before the first request, and after `close`."""
        return self._process.pid if self._process else 0

    def alive(self, pid: int) -> bool:
        """Whether the spawner with this pid still runs."""
        return self._process is not None and self._process.pid == pid and self._process.poll() is None

    def send(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """One request to the spawner (started when there is none), whose pid is the answer. Raises InfraError."""
        body = os.memfd_create("request")
        try:
            os.write(body, json.dumps(request).encode())
            with self._lock:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                assert self._control is not None
                assert self._process is not None
                socket.send_fds(self._control, [b"r"], [body, *descriptors])
                return self._process.pid
        except OSError as error:
            raise InfraError("sandbox_backend", f"the sandbox spawner does not answer: {error}") from error
        finally:
            os.close(body)

    def send_preloaded(self, preload: Preload, root: Path, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """One request to the interpreter of `root` that has `preload` imported; the pid of its spawner. Raises InfraError."""
        body = os.memfd_create("request")
        try:
            os.write(body, json.dumps(request).encode())
            try:
                socket.send_fds(self._interpreter(preload, root), [b"r"], [body, *descriptors])
            except (BrokenPipeError, ConnectionResetError):  # it was killed, by the host's memory limit for example
                with self._preloading:
                    while self._preloaded:
                        self._preloaded.popitem()[1].close()
                socket.send_fds(self._interpreter(preload, root), [b"r"], [body, *descriptors])
        except OSError as error:
            raise InfraError("sandbox_backend", f"no interpreter with modules imported can be started: {error!r}") from error
        finally:
            os.close(body)
        return self.pid

    def close(self) -> None:
        with self._lock:
            control, process, self._control, self._process = self._control, self._process, None, None
        while self._preloaded:
            self._preloaded.popitem()[1].close()
        if control and process:
            control.close()
            process.wait(30)

    def _interpreter(self, preload: Preload, root: Path) -> socket.socket:
        with self._preloading:
            found = self._preloaded.get((self.pid, root, preload))
            if found is not None:
                return found
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                request = {
                    "op": "preload", "owner": os.getpid(), "root": str(root), "options": preload.options,
                    "modules": preload.modules, "env": _PRELOAD_ENVIRONMENT,
                }  # fmt: skip
                pid = self.send(request, [theirs.fileno()])
            ours.settimeout(START_SECONDS)
            try:
                ready = ours.recv(16)
            except OSError:
                ready = b""
            if ready != b"ready":
                ours.close()
                raise OSError("it did not start in time" if ready else "it ended while it started")
            ours.settimeout(None)
            self._preloaded[pid, root, preload] = ours
            return ours

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        calls = os.memfd_create("calls")
        os.write(calls, seccomp.program())
        passed = (theirs.fileno(), calls)
        command = [sys.executable, "-I", "-S", spawner.__file__, str(passed[0]), str(os.getpid()), str(calls)]
        self._process = subprocess.Popen(
            command, pass_fds=passed, stdin=subprocess.DEVNULL, start_new_session=True, env={}, cwd="/"
        )
        theirs.close()
        os.close(calls)
        if self._control:
            self._control.close()
        self._control = ours
