"""One daemon per state folder: starts the processes of a spec file, restarts what crashes, ends all of them on TERM.

    python -m infra.supervisor <home> [--detach]

Reads `<home>/stack.spec.json` (a list of ProcessSpec), writes `<home>/stack.json` (StackState) atomically on every change, and
holds a lock on `<home>/supervisor.lock` while it lives. HUP makes it read the spec again: processes that vanished or changed
are stopped, new ones started, equal ones left alone. It survives its caller. When it is killed outright its guard (a second,
tiny process that waits on a pipe) ends every marked process within a second or two; when the guard is killed too, the next
`up` sweeps them.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Literal

import msgspec

from data_contracts.records import Record
from infra import processes
from infra.processes import ProcessSpec

TICK_SECONDS = 0.2
BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_SECONDS = 60.0
"""A process that lived this long starts its back-off from the beginning."""

State = Literal["waiting", "starting", "healthy", "backoff", "failed", "ended"]


class ProcessState(Record, frozen=True, kw_only=True):
    """One process of stack.json."""

    name: str
    state: State
    pid: int | None
    address: str
    log: str
    restarts: int
    detail: str = ""


class StackState(Record, frozen=True, kw_only=True):
    """stack.json. `pid` and `started` (its start time) name the supervisor; a reader checks that it still lives.

    `spec` is the digest of the spec file that `processes` follow: a caller that wrote a newer one waits for it.
    """

    pid: int
    started: float
    home: str
    spec: str
    processes: tuple[ProcessState, ...]

    def address(self, name: str) -> str | None:
        """Address of process `name`, None when the stack has no such process."""
        return next((process.address for process in self.processes if process.name == name), None)


def spec_path(home: Path) -> Path:
    return home / "stack.spec.json"


def state_path(home: Path) -> Path:
    return home / "stack.json"


def mark(home: Path) -> str:
    """What every process below this state folder carries in its environment."""
    return str(home)


@dataclass
class _Child:
    spec: ProcessSpec
    log: Path
    process: subprocess.Popen[bytes] | None = None
    state: State = "waiting"
    restarts: int = 0
    strikes: int = 0
    since: float = 0.0
    retry_at: float = 0.0
    detail: str = ""


@dataclass
class Supervisor:
    """The loop. `step` is one turn of it; nothing in it blocks longer than one health probe or one stop."""

    home: Path
    children: dict[str, _Child] = field(default_factory=dict)
    stopping: bool = False
    reload: bool = True
    spec: str = ""
    _written: bytes = b""

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_reload)
        try:
            while not self.stopping:
                self.step()
                time.sleep(TICK_SECONDS)
        finally:
            self._stop_all()
            processes.sweep(mark(self.home))
            state_path(self.home).unlink(missing_ok=True)

    def step(self) -> None:
        if self.reload:
            self.reload = False
            data = spec_path(self.home).read_bytes()
            self._reconcile(msgspec.json.decode(data, type=list[ProcessSpec]))
            self.spec = sha256(data).hexdigest()
        for child in self.children.values():
            if self.stopping:
                return
            self._advance(child)
        self._write()

    def _advance(self, child: _Child) -> None:
        now = time.monotonic()
        exited = child.process is not None and child.process.poll() is not None
        if child.process is not None and exited and child.state in ("starting", "healthy"):
            self._lost(child, f"ended with code {child.process.returncode}", now)
        elif child.state == "starting" and processes.healthy(child.spec.health):
            child.state, child.detail = "healthy", ""
        elif child.state == "starting" and now - child.since > child.spec.startup_seconds:
            self._end(child)
            self._lost(child, f"not healthy within {child.spec.startup_seconds:.0f} s", now)
        elif child.state == "healthy" and now - child.since > STEADY_SECONDS:
            child.strikes = 0
        elif child.state == "waiting" and all(
            name not in self.children or self.children[name].state == "healthy" for name in child.spec.after
        ):
            self._start(child, now)
        elif child.state == "backoff" and now >= child.retry_at:
            child.restarts += 1
            self._start(child, now)

    def _start(self, child: _Child, now: float) -> None:
        child.since, child.state = now, "starting"
        try:
            child.process = processes.start(child.spec, log=child.log, owner=mark(self.home))
        except processes.ProcessFailed as error:
            child.state, child.detail = "failed", str(error)

    def _lost(self, child: _Child, why: str, now: float) -> None:
        """What is left of its group goes first: a restarted server must find its port free."""
        self._end(child)
        child.detail = why
        if not child.spec.restart:
            child.state = "ended"
            return
        pause = BACKOFF_SECONDS[min(child.strikes, len(BACKOFF_SECONDS) - 1)]
        child.strikes += 1
        child.state, child.retry_at = "backoff", now + pause
        print(f"{time.strftime('%F %T')} {child.spec.name}: {why}; again in {pause} s", flush=True)  # noqa: T201

    def _end(self, child: _Child) -> None:
        if child.process is not None:
            processes.stop(child.process, child.spec, owner=mark(self.home))

    def _stop_all(self) -> None:
        """Those that depend on others first, so that a worker can still talk to its server; each wave at once."""
        for wave in (True, False):
            chosen = [name for name, child in self.children.items() if bool(child.spec.after) is wave]
            for name in chosen:
                child = self.children[name]
                if child.process is not None and child.process.poll() is None:
                    processes.ask_to_end(child.process)
            for name in chosen:
                self._stop(name)

    def _stop(self, name: str) -> None:
        self._end(self.children.pop(name))

    def _reconcile(self, specs: list[ProcessSpec]) -> None:
        wanted = {spec.name: spec for spec in specs}
        for name in list(self.children)[::-1]:
            if self.children[name].spec != wanted.get(name):
                self._stop(name)
        kept = self.children
        self.children = {
            name: kept.get(name) or _Child(spec=spec, log=self.home / "logs" / f"{name}.log") for name, spec in wanted.items()
        }
        for child in self.children.values():
            if child.state == "failed":
                child.state = "waiting"

    def _write(self) -> None:
        state = StackState(
            pid=os.getpid(),
            started=processes.identity(os.getpid()) or 0.0,
            home=str(self.home),
            spec=self.spec,
            processes=tuple(
                ProcessState(
                    name=name,
                    state=child.state,
                    pid=child.process.pid if child.process is not None and child.process.poll() is None else None,
                    address=child.spec.address,
                    log=str(child.log),
                    restarts=child.restarts,
                    detail=child.detail,
                )
                for name, child in self.children.items()
            ),
        )
        data = msgspec.json.format(msgspec.json.encode(state), indent=1)
        if data != self._written:
            replace(state_path(self.home), data)
            self._written = data

    def _on_stop(self, *_: object) -> None:
        self.stopping = True

    def _on_reload(self, *_: object) -> None:
        self.reload = True


def replace(path: Path, data: bytes) -> None:
    """Write `path` so that a reader sees the old bytes or the new ones."""
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_bytes(data)
    partial.replace(path)


def lock(home: Path) -> IO[bytes] | None:
    """The lock of a state folder's supervisor, None when another process holds it. Held while the file stays open."""
    handle = (home / "supervisor.lock").open("ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle


def start_guard(home: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A child that outlives a killed supervisor just long enough to end everything marked; and the pipe it waits on."""
    read_end, write_end = os.pipe()
    guardian = subprocess.Popen(
        (sys.executable, "-m", "infra.supervisor", str(home), "--guard", str(read_end)),
        pass_fds=(read_end,),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_end)
    return guardian, write_end


def guard(home: Path, read_end: int) -> None:
    """Wait for the supervisor's end of the pipe to close. A byte before that means an orderly end: nothing to do."""
    if not os.read(read_end, 1):
        processes.sweep(mark(home))


def main(argv: list[str]) -> int:
    home = Path(argv[0]).resolve()
    if "--guard" in argv:
        guard(home, int(argv[2]))
        return 0
    if "--detach" in argv and os.fork():
        return 0
    held = lock(home)
    if held is None:
        return 0
    processes.sweep(mark(home))
    guardian, write_end = start_guard(home)
    with held:
        Supervisor(home=home).run()
        os.write(write_end, b"q")
        guardian.wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
