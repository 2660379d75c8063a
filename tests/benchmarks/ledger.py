"""Figures of docs/results/ledger.md: `python -m tests.benchmarks.ledger [FOLDER]` prints them as a Markdown table.

Append latency (with and without fsync reaching a disk), reading and folding a ledger of 10,000 events, `ready`, a lease.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from data_contracts.ledger import CampaignState, fold, ready
from data_contracts.ledger_events import Created, Entry, Holder, LeaseTaken, decode, encode
from data_contracts.records import CheckpointRef
from infra.ledger_log import LedgerLog, this_process
from infra.store import LocalStore
from tests.data_contracts.test_ledger import event_of

EVENTS = 10_000


def entries(count: int) -> list[Entry]:
    """A real course of a campaign, `count` events long, as the machine itself orders it."""
    config = {"iterations": count, "max_staleness": 1, "evaluate": {"every": 3}}
    base = CheckpointRef(uri="base", sha256="0", version=0, size=1)
    holder = Holder(run="r", host="h", machine="m", pid=1, pid_started=0.0)
    made = [Entry(seq=0, epoch=0, writer="w", event=Created(campaign="c", config=config, base=base))]
    made.append(Entry(seq=1, epoch=1, writer="w", event=LeaseTaken(holder=holder, since=0.0)))
    state = fold(made)
    while len(made) < count:
        step = min(ready(state, until=count), key=str)
        made.append(Entry(seq=state.next_seq, epoch=1, writer="w", event=event_of(step)))
        state = fold(made[-1:], state)
    return made


def best(work: Callable[[], object], *, times: int = 5) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def append_seconds(folder: Path, count: int = 300) -> tuple[float, float]:
    """Median and 95th percentile of one append."""
    log = LedgerLog(LocalStore(folder), "c")
    made = entries(count + 2)
    assert isinstance(made[0].event, Created)
    log.create(made[0].event)
    log.take_lease(this_process("benchmark"))
    seconds = []
    for entry in made[2:]:
        start = time.perf_counter()
        log.append(entry.event)
        seconds.append(time.perf_counter() - start)
    log.release()
    return statistics.median(seconds), statistics.quantiles(seconds, n=20)[-1]


def lease_seconds(folder: Path) -> float:
    log = LedgerLog(LocalStore(folder), "c")

    def once() -> None:
        log.take_lease(this_process("benchmark"))
        log.release()

    return best(once)


def main(folder: Path) -> None:
    rows: list[tuple[str, str]] = []
    made = entries(EVENTS)
    data = [encode(entry) for entry in made]
    state: CampaignState = fold(made)
    rows.append((f"fold {EVENTS:,} events", f"{best(lambda: fold(made)) * 1e3:.0f} ms"))
    rows.append((f"decode {EVENTS:,} events", f"{best(lambda: [decode(item, key='') for item in data]) * 1e3:.0f} ms"))
    last = made[-1:]
    before = fold(made[:-1])
    rows.append((f"fold one event onto {EVENTS:,}", f"{best(lambda: fold(last, before)) * 1e6:.0f} µs"))
    rows.append((f"`ready` after {EVENTS:,}", f"{best(lambda: ready(state, until=EVENTS)) * 1e6:.0f} µs"))
    for name, root in (("disk", folder), ("memory (no disk behind fsync)", Path("/dev/shm"))):
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            median, slow = append_seconds(Path(scratch))
            rows.append((f"append, store on {name}", f"median {median * 1e3:.2f} ms, 95 % {slow * 1e3:.2f} ms"))
            rows.append((f"take and release the lease, {name}", f"{lease_seconds(Path(scratch)) * 1e3:.1f} ms"))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        store = LocalStore(scratch)
        log = LedgerLog(store, "c")
        for entry, item in zip(made, data, strict=True):
            store.put_if_absent(log.key(entry.seq), item)
        rows.append(
            (f"read {EVENTS:,} objects from a folder and fold", f"{best(lambda: LedgerLog(store, 'c').state(), times=3):.2f} s")
        )
    print("| what | time |\n|---|---|")
    print("\n".join(f"| {what} | {figure} |" for what, figure in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd())
