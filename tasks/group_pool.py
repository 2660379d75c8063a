"""Where group coroutines run: a Dask cluster, or this process for tests and small proofs. One interface, no second driver.

Both own the deadline seen from outside: a group that does not answer in time (its own deadline plus a grace for queueing and
the first opening of the worker) is given up as an `infra_failure`, whatever its worker says later.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from data_contracts.records import GroupShard
from infra.dask_cluster import connect
from tasks.episode import GroupJob
from tasks.group import infra_shard
from tasks.runtime import WorkerSpec, close_runtimes

RunGroup = Callable[[GroupJob, WorkerSpec], Coroutine[Any, Any, GroupShard]]
GRACE_SECONDS = 180.0
FETCH_SECONDS = 10.0


class GroupPool(Protocol):
    """Submit by order, read what finished. Not thread-safe: one driver a pool."""

    def submit(self, order: int, run: RunGroup, job: GroupJob, spec: WorkerSpec, *, deadline_seconds: float) -> None: ...

    def finished(self, *, timeout_seconds: float) -> list[tuple[int, GroupShard]]:
        """Wait until at least one group is over or the timeout passes; with nothing in flight, for the timeout."""

    def cancel(self) -> None:
        """Give up everything in flight."""

    def close(self) -> None: ...


class LocalPool:
    """Groups as coroutines on one event loop in a thread of this process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bessemer-groups", daemon=True)
        self._thread.start()
        self._flights: dict[int, tuple[Future[GroupShard], GroupJob, float]] = {}

    def submit(self, order: int, run: RunGroup, job: GroupJob, spec: WorkerSpec, *, deadline_seconds: float) -> None:
        future = asyncio.run_coroutine_threadsafe(run(job, spec), self._loop)
        self._flights[order] = (future, job, time.monotonic() + deadline_seconds + GRACE_SECONDS)

    def finished(self, *, timeout_seconds: float) -> list[tuple[int, GroupShard]]:
        if not self._flights:
            time.sleep(timeout_seconds)
        wait([future for future, _, _ in self._flights.values()], timeout=timeout_seconds, return_when=FIRST_COMPLETED)
        over = []
        for order, (future, job, deadline) in list(self._flights.items()):
            if future.done():
                over.append((order, future.result()))
            elif time.monotonic() > deadline:
                future.cancel()
                over.append((order, _given_up(job)))
            else:
                continue
            del self._flights[order]
        return over

    def cancel(self) -> None:
        for future, _, _ in self._flights.values():
            future.cancel()
        self._flights.clear()

    def close(self) -> None:
        self.cancel()
        asyncio.run_coroutine_threadsafe(close_runtimes(), self._loop).result(timeout=60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()


class DaskPool:
    """Groups as coroutine tasks of a Dask cluster; a lost worker's groups are run again by Dask itself."""

    def __init__(self, address: str) -> None:
        """Raises ClusterUnreachable when no scheduler or worker answers at `address`."""
        self._client = connect(address)
        self._flights: dict[int, tuple[Any, GroupJob, float]] = {}
        self._wake = threading.Event()

    def submit(self, order: int, run: RunGroup, job: GroupJob, spec: WorkerSpec, *, deadline_seconds: float) -> None:
        future = self._client.submit(run, job, spec, key=f"group-{job.attempt_id}", pure=False)
        future.add_done_callback(lambda _: self._wake.set())
        self._flights[order] = (future, job, time.monotonic() + deadline_seconds + GRACE_SECONDS)

    def finished(self, *, timeout_seconds: float) -> list[tuple[int, GroupShard]]:
        self._wake.wait(timeout_seconds)
        self._wake.clear()
        over = []
        for order, (future, job, deadline) in list(self._flights.items()):
            if future.status == "finished" and (shard := _fetched(future)) is not None:
                over.append((order, shard))
            elif future.status != "finished" and future.done():
                over.append((order, _lost(job, future)))
            elif time.monotonic() > deadline:
                future.cancel(force=True)
                over.append((order, _given_up(job)))
            else:
                continue
            del self._flights[order]
        return over

    def cancel(self) -> None:
        self._client.cancel([future for future, _, _ in self._flights.values()], force=True)
        self._flights.clear()

    def close(self) -> None:
        self.cancel()
        self._client.close()


def _fetched(future: Any) -> GroupShard | None:
    """The result of a finished task; None when the worker that holds it does not hand it out now (it just died, say)."""
    try:
        shard: GroupShard = future.result(timeout=FETCH_SECONDS)
    except TimeoutError:
        return None
    return shard


def _lost(job: GroupJob, future: Any) -> GroupShard:
    """A Dask task that ended without a result: a lost node is an infra_failure, anything else is raised as it is."""
    from distributed import CancelledError, KilledWorker

    if future.status in ("cancelled", "lost"):
        return infra_shard(job, "node_lost", f"Dask reports the group as {future.status}")
    error = future.exception(timeout=FETCH_SECONDS)
    if isinstance(error, KilledWorker | CancelledError):
        return infra_shard(job, "node_lost", f"its workers died: {error}")
    raise error


def _given_up(job: GroupJob) -> GroupShard:
    return infra_shard(job, "group_deadline", f"no answer from its worker {GRACE_SECONDS:g} s after its own deadline")
