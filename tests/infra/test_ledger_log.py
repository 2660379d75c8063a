"""Leases, epochs and the append: one winner, a dead holder passed at once, a paused one refused when it wakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_contracts.errors import CampaignHeld, ConfigError, LedgerError, StaleWriter
from data_contracts.ledger_events import Created, Curated, Holder, LeaseReleased, LeaseTaken, Paused, Resumed
from data_contracts.records import CheckpointRef, ProblemsRef
from infra.ledger_log import LedgerLog, campaigns, check_campaign_name, holder_is_gone, this_process
from infra.store import LocalStore, MemoryStore

CREATED = Created(
    campaign="c",
    config={"iterations": 2, "max_staleness": 0, "evaluate": {"every": 1}},
    base=CheckpointRef(uri="base", sha256="0", version=0, size=1),
)
ELSEWHERE = Holder(run="far", host="other", machine="another boot", pid=1, pid_started=0.0)


def curated(iteration: int) -> Curated:
    return Curated(iteration=iteration, problems=ProblemsRef(uri=str(iteration), sha256="0", rows=1))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.fixture
def log(store: LocalStore) -> Iterator[LedgerLog]:
    log = LedgerLog(store, "c")
    assert log.create(CREATED)
    yield log
    log.release()


def test_created_once(store: LocalStore, log: LedgerLog) -> None:
    assert log.exists()
    assert not LedgerLog(store, "c").create(CREATED)
    assert campaigns(store) == ["c"]
    with pytest.raises(FileNotFoundError, match="no campaign 'none'"):
        LedgerLog(store, "none").state()


@pytest.mark.parametrize("name", ["", "A", "a/b", "../x", "a..b", "-a", "a" * 64, "a b", "a@1"])
def test_names_that_cannot_be_keys_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="campaign name"):
        check_campaign_name(name)


def test_appends_are_numbered_and_read_back(log: LedgerLog) -> None:
    assert log.take_lease(this_process("r1")) == 1
    log.append(curated(0))
    log.release()
    assert [type(entry.event) for entry in log.read()] == [Created, LeaseTaken, Curated, LeaseReleased]
    assert [entry.seq for entry in log.read()] == [0, 1, 2, 3]
    assert log.state().holder is None
    assert log.take_lease(this_process("r2")) == 2


def test_a_contradicting_event_is_not_written(log: LedgerLog) -> None:
    log.take_lease(this_process("r1"))
    with pytest.raises(LedgerError, match="the one before is not curated"):
        log.append(curated(3))
    assert len(log.read()) == 2
    log.append(curated(0))


def test_nothing_is_written_without_a_lease(log: LedgerLog) -> None:
    with pytest.raises(StaleWriter, match="no lease"):
        log.append(curated(0))


def test_a_living_holder_is_named(store: LocalStore, log: LedgerLog) -> None:
    log.take_lease(this_process("nightly-7"))
    with pytest.raises(
        CampaignHeld, match=rf"'c' is held by run nightly-7 \(process {os.getpid()} on .*\) since 20..-"
    ) as caught:
        LedgerLog(store, "c").take_lease(this_process("other"))
    assert caught.value.campaign == "c"


def test_a_holder_elsewhere_is_passed_only_when_its_heart_stops(store: LocalStore, log: LedgerLog) -> None:
    log.take_lease(ELSEWHERE, ttl=0.6)
    second = LedgerLog(store, "c")
    time.sleep(1.0)
    with pytest.raises(CampaignHeld):  # it beats on, well past its ttl
        second.take_lease(this_process("r2"))
    log._stop_beating.set()
    time.sleep(1.0)
    assert second.take_lease(this_process("r2")) == 2
    with pytest.raises(StaleWriter, match=r"epoch 1.*epoch 2, held by run r2"):
        log.append(curated(0))
    second.append(curated(0))
    second.release()


def test_a_woken_writers_heartbeat_does_not_hide_its_successors(store: LocalStore, log: LedgerLog) -> None:
    log.take_lease(ELSEWHERE, ttl=0.2)
    log._stop_beating.set()
    time.sleep(0.4)
    second = LedgerLog(store, "c")
    second.take_lease(Holder(run="far2", host="h2", machine="m2", pid=1, pid_started=0.0), ttl=30)
    log._beat(1, 0.2)
    time.sleep(0.4)
    with pytest.raises(CampaignHeld, match="far2"):
        LedgerLog(store, "c").take_lease(this_process("r3"))
    second.release()


def test_a_process_number_used_again_is_not_the_holder() -> None:
    me = this_process("r")
    assert not holder_is_gone(me)
    assert holder_is_gone(Holder(run="r", host=me.host, machine=me.machine, pid=me.pid, pid_started=me.pid_started - 100))
    assert not holder_is_gone(ELSEWHERE)


def test_one_winner_among_racing_takers(store: LocalStore, log: LedgerLog) -> None:
    logs = [LedgerLog(store, "c") for _ in range(8)]
    barrier, outcomes = threading.Barrier(8), []

    def race(contender: LedgerLog) -> None:
        barrier.wait()
        try:
            outcomes.append(contender.take_lease(this_process("r")))
        except CampaignHeld:
            outcomes.append(0)

    threads = [threading.Thread(target=race, args=(contender,)) for contender in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [0] * 7 + [1]
    for contender in logs:
        contender.release()
    assert log.state().holder is None


def test_a_gap_or_damage_is_named(store: LocalStore, log: LedgerLog) -> None:
    log.take_lease(this_process("r1"))
    log.append(Paused(iteration=0, reason="x"))
    log.append(Resumed())
    store.put(log.key(2), b"{}")
    with pytest.raises(LedgerError, match=r"ledger/00000002\.json is not a ledger entry"):
        LedgerLog(store, "c").state()
    store.delete(log.key(2))
    with pytest.raises(LedgerError, match=r"lacks campaigns/c/ledger/00000002\.json"):
        LedgerLog(store, "c").state()


class Forgetful(MemoryStore):
    """Writes, but answers as a driver whose first request's answer was lost and whose retry met its own object."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        super().put_if_absent(key, data)
        return False


def test_our_own_object_is_not_taken_for_somebody_elses() -> None:
    log = LedgerLog(Forgetful(), "c")
    assert log.create(CREATED)
    assert log.take_lease(this_process("r1")) == 1
    log.append(curated(0))
    log.release()
    assert len(log.read()) == 4


CHILD = """
import sys, time
from data_contracts.errors import StaleWriter
from data_contracts.ledger_events import Curated
from data_contracts.records import ProblemsRef
from infra.ledger_log import LedgerLog, this_process
from infra.store import LocalStore
log = LedgerLog(LocalStore(sys.argv[1]), "c")
log.take_lease(this_process("child"), ttl=float(sys.argv[2]))
print("held", flush=True)
sys.stdin.readline()
try:
    log.append(Curated(iteration=0, problems=ProblemsRef(uri="0", sha256="0", rows=1)))
    print("wrote", flush=True)
except StaleWriter as error:
    print("StaleWriter", error, flush=True)
"""


def child(store: LocalStore, ttl: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, store.root, str(ttl)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_killed_holder_is_passed_at_once(store: LocalStore, log: LedgerLog) -> None:
    process = child(store, ttl=600)
    with pytest.raises(CampaignHeld, match="child"):
        log.take_lease(this_process("r2"))
    process.kill()  # not waited for: the number still exists, as a zombie
    deadline = time.monotonic() + 10
    while not holder_is_gone(log.state().holder or this_process("")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert log.take_lease(this_process("r2")) == 2
    process.communicate()


def test_a_paused_writer_is_refused_when_it_wakes(store: LocalStore, log: LedgerLog) -> None:
    process = child(store, ttl=0.6)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    assert log.take_lease(this_process("r2")) == 2
    log.append(curated(0))
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate("go\n", timeout=30)
    assert out.startswith("StaleWriter campaign 'c': this writer")
    assert "epoch 2, held by run r2" in out
    assert [type(entry.event) for entry in log.read()] == [Created, LeaseTaken, LeaseTaken, Curated]


def test_a_passed_handle_learns_of_it_from_its_heartbeat(store: LocalStore, log: LedgerLog) -> None:
    log.take_lease(Holder(run="gone", host="h", machine=this_process("").machine, pid=2**22 - 1, pid_started=0.0), ttl=0.3)
    second = LedgerLog(store, "c")
    second.take_lease(this_process("r2"))
    assert log.lost.wait(5)
    second.release()
