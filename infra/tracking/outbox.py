"""Operations for a service that may be away: kept on disk in order, delivered when it answers, never raised into the loop.

Contract: `Outbox.append` is durable when it returns (one JSON line an operation; NaN and infinity allowed); a last line cut
short by a crash is dropped, not an error. Operations must be idempotent: one that was delivered just before a crash is
delivered again. `Delivery.submit` never raises for what the service or its library does: it reports an outage once, and moves
an operation that a healthy service refuses three times to `<name>.rejected.jsonl`. One writer a file.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Operation = dict[str, Any]
"""`kind`, `at` (seconds since the epoch) and `body`, all JSON."""
REFUSALS = 3

log = logging.getLogger("bessemer.tracking")


class Outbox:
    """The undelivered operations of one campaign."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, operation: Operation) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(operation) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def pending(self) -> list[Operation]:
        """Undelivered operations, oldest first."""
        if not self.path.is_file():
            return []
        found = []
        for line in self.path.read_text("utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # cut short by a crash
        return found

    def keep(self, operations: Sequence[Operation]) -> None:
        """Replace the content; nothing left removes the file."""
        if not operations:
            self.path.unlink(missing_ok=True)
            return
        fresh = self.path.with_suffix(".new")
        fresh.write_text("".join(json.dumps(operation) + "\n" for operation in operations), "utf-8")
        fresh.replace(self.path)


class Delivery:
    """Delivers an outbox through `perform`, which may raise anything; `reachable` answers quickly whether it makes sense."""

    def __init__(
        self, box: Outbox, *, service: str, perform: Callable[[Operation], None], reachable: Callable[[], bool]
    ) -> None:
        self.box, self.service, self.perform, self.reachable = box, service, perform, reachable
        self._lock = threading.RLock()
        self._reported = False

    def submit(self, operation: Operation) -> None:
        """First to disk, so that a crash while delivering loses nothing; then everything that waits, in order."""
        with self._lock:
            self.box.append(operation)
            self.flush()

    def flush(self) -> int:
        """Try to deliver what waits; returns how many operations still wait."""
        with self._lock:
            waiting = self.box.pending()
            if waiting and self.reachable():
                waiting = self._deliver(waiting)
                self.box.keep(waiting)
            if waiting and not self._reported:
                log.warning("%s fails; %d operations wait in %s; training goes on", self.service, len(waiting), self.box.path)
            elif not waiting and self._reported:
                log.warning("%s works again; everything that waited was delivered", self.service)
            self._reported = bool(waiting)
            return len(waiting)

    def _deliver(self, waiting: list[Operation]) -> list[Operation]:
        while waiting:
            try:
                self.perform(waiting[0])
            except Exception as error:  # noqa: BLE001 - rule 10: whatever the service's library raises stays here
                waiting[0]["refusals"] = waiting[0].get("refusals", 0) + 1
                log.info("operation '%s' failed: %s", waiting[0]["kind"], error)
                if waiting[0]["refusals"] < REFUSALS or not self.reachable():
                    break
                rejected = self.box.path.with_suffix(".rejected.jsonl")
                Outbox(rejected).append(waiting[0])
                log.warning("%s refused '%s' (%s); it was moved to %s", self.service, waiting[0]["kind"], error, rejected)
            waiting.pop(0)
        return waiting
