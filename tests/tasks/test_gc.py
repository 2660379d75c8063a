"""`collect` on real stores: what goes, what stays, and beside a running advance."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from data_contracts.config import RetentionConfig
from data_contracts.errors import LedgerError
from data_contracts.ledger import finished
from infra.ledger_log import LedgerLog
from infra.store import LocalStore, MemoryStore
from tasks.campaign import StepContext, advance, create_campaign
from tasks.gc import collect
from tests.tasks.campaign_fakes import FakeStages, base, config

KEEP = RetentionConfig(last=2, every=50)


def key(version: int) -> str:
    return f"campaigns/c/checkpoints/v{version:06d}"


def campaign(store: MemoryStore | LocalStore, iterations: int) -> LedgerLog:
    log = create_campaign(store, "c", config(iterations=iterations, every=50), base(store))
    advance(log, FakeStages(store))
    return log


def versions(store: MemoryStore | LocalStore) -> set[int]:
    return {int(name.split("/")[3][1:]) for name in store.list("campaigns/c/checkpoints")}


def test_collects_and_says_what_and_why(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    campaign(store, 7)
    store.put(f"{key(3)}/optimizer.json", b"{}")
    before = store.list("campaigns/c/iterations")
    dry = collect(store, "c", KEEP, named={key(1)}, dry_run=True)
    assert versions(store) == set(range(8))
    report = collect(store, "c", KEEP, named={key(1)})
    assert versions(store) == {0, 1, 3, 6, 7}
    assert report.removed == dry.removed == (key(2), key(4), key(5))
    assert report.bytes == 3 * 64
    assert report.kept[key(3)] == "newest full optimizer state"
    assert "removed 3 checkpoints" in report.lines()[-1]
    assert "would remove 3 checkpoints" in dry.lines()[-1]
    assert store.list("campaigns/c/iterations") == before
    assert collect(store, "c", KEEP, named={key(1)}).removed == ()


def test_a_collected_campaign_goes_on() -> None:
    store = MemoryStore()
    log = campaign(store, 6)
    collect(store, "c", KEEP, named=set())
    assert finished(advance(log, FakeStages(store), until=9), until=9)


def test_beside_a_running_advance_nothing_needed_goes(tmp_path: Path) -> None:
    """A collection before every step of every stage; each step reads the weights it needs."""
    store = LocalStore(tmp_path)
    removed: list[str] = []
    lock = threading.Lock()

    class Collecting(FakeStages):
        def _said(self, what: str) -> None:
            with lock:
                removed.extend(collect(store, "c", RetentionConfig(last=1, every=50), named=set()).removed)

        def publish(self, context: StepContext, version: int):  # type: ignore[no-untyped-def]
            done = super().publish(context, version)
            for needed in {version, max(0, version - 1)}:
                assert store.exists(f"{context.state.checkpoint(needed).uri}/weights")
            return done

    log = create_campaign(store, "c", config(d=1, iterations=6, every=2), base(store))
    assert finished(advance(log, Collecting(store)), until=6)
    assert removed
    assert len(removed) == len(set(removed))


def test_orphans_and_unknown_campaigns_are_left_alone() -> None:
    store = MemoryStore()
    campaign(store, 2)
    store.put(f"{key(9)}/weights", b"a trainer is writing this")
    collect(store, "c", RetentionConfig(last=1, every=50), named=set())
    assert 9 in versions(store)
    with pytest.raises(FileNotFoundError, match="no campaign 'none'"):
        collect(store, "none", KEEP, named=set())


def test_a_uri_outside_the_checkpoints_is_never_deleted() -> None:
    store = MemoryStore()
    log = create_campaign(store, "c", config(iterations=5, every=50), base(store))

    class Elsewhere(FakeStages):
        def train(self, context: StepContext, iteration: int):  # type: ignore[no-untyped-def]
            event = super().train(context, iteration)
            import msgspec

            elsewhere = msgspec.structs.replace(event.result.checkpoint, uri="campaigns/c/checkpoints/other")
            if iteration == 1:
                store.put("campaigns/c/checkpoints/other/weights", store.get(f"{key(2)}/weights"))
                result = msgspec.structs.replace(event.result, checkpoint=elsewhere)
                return msgspec.structs.replace(event, result=result)
            return event

    advance(log, Elsewhere(store))
    with pytest.raises(LedgerError, match="refusing to delete"):
        collect(store, "c", RetentionConfig(last=1, every=50), named=set())
