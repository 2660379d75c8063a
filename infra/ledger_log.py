"""The ledger in a store: one object per event, written put-if-absent under contiguous numbers, with a writer's epoch.

Why this is enough: to write event n a writer has to win the object `<n>.json`, and to know that n is next it has to have read
all before it. Taking the lease is itself an event, so whoever was passed finds its next number taken by a newer epoch and is
refused (StaleWriter), however long it slept. Heartbeats only decide *when* a lease may be taken over, never who may write.

A lease may be taken over when it was released, when its holder's process on this same machine is gone (or another process
has its number), or when its heartbeat is older than `ttl`. Heartbeats lie in one object per epoch, so that a woken stale
writer cannot spoil its successor's.

Gaps: heartbeat ages compare wall clocks of hosts (a skew beyond `ttl` costs double work, never a wrong ledger); the whole
ledger is read at start (figures in docs/results/ledger.md), snapshots are not needed below some 100,000 events.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil

from data_contracts.errors import CampaignHeld, ConfigError, LedgerError, StaleWriter
from data_contracts.ledger import CampaignState, fold
from data_contracts.ledger_events import AnyEvent, Created, Entry, Holder, LeaseReleased, LeaseTaken, decode, encode
from data_contracts.protocols import Store, to_json
from data_contracts.records import Record

TTL_SECONDS = 60.0
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_READERS = 16
_LOG = logging.getLogger(__name__)


class Heartbeat(Record, frozen=True, kw_only=True):
    """The holder of `epoch` was alive at `at` (seconds since the Unix epoch) and beats at least every `ttl`."""

    epoch: int
    at: float
    ttl: float


def check_campaign_name(name: str) -> str:
    """Raises ConfigError: the name becomes part of store keys, version labels and run names."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"campaign name {name!r} is not allowed",
            field="name",
            remedy="Use at most 63 lower-case letters, digits, '-', '_' and '.', beginning with a letter or digit.",
        )
    return name


def campaigns(store: Store) -> list[str]:
    """Names of all campaigns in the store, sorted."""
    found = (re.fullmatch(r"campaigns/([^/]+)/ledger/0{8}\.json", key) for key in store.list("campaigns"))
    return [match.group(1) for match in found if match]


def this_process(run: str) -> Holder:
    """The calling process as a holder. `machine` is this boot and process namespace: only there do process ids mean much."""
    boot, namespace = "", ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    host, pid = socket.gethostname(), os.getpid()
    started = psutil.Process(pid).create_time()
    return Holder(run=run, host=host, machine=f"{boot} {namespace}".strip() or host, pid=pid, pid_started=started)


def holder_is_gone(holder: Holder) -> bool:
    """Whether the holder's process is surely dead: same machine, and no such process, a zombie, or one that started later."""
    if holder.machine != this_process("").machine:
        return False
    try:
        process = psutil.Process(holder.pid)
        return process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - holder.pid_started) > 2.0
    except psutil.NoSuchProcess:
        return True


class LedgerLog:
    """One process's handle on one campaign's ledger. Thread-safe; all appends of a process go through one handle."""

    def __init__(self, store: Store, campaign: str) -> None:
        self.store, self.campaign = store, check_campaign_name(campaign)
        self.prefix = f"campaigns/{self.campaign}"
        self.writer = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self.epoch: int | None = None
        """The lease's epoch while this handle holds it."""
        self.lost = threading.Event()
        """Set when another writer was seen to have taken over: stop working, nothing more can be written."""
        self._state = CampaignState(campaign=campaign)
        self._lock = threading.RLock()
        self._beating: threading.Thread | None = None
        self._stop_beating = threading.Event()

    # ------------------------------------------------------------------------------------------------------------- reading

    def key(self, seq: int) -> str:
        return f"{self.prefix}/ledger/{seq:08d}.json"

    def read(self, start: int = 0) -> list[Entry]:
        """All entries from `start` on. Raises LedgerError for a gap or a damaged object, FileNotFoundError when the campaign
        does not exist."""
        keys = self._keys(start)
        if not keys and start == 0:
            raise FileNotFoundError(f"no campaign '{self.campaign}' in the store {self.store.root}")
        if len(keys) <= _READERS:
            return [decode(self.store.get(key), key=key) for key in keys]
        with ThreadPoolExecutor(_READERS) as pool:
            return [decode(data, key=key) for key, data in zip(keys, pool.map(self.store.get, keys), strict=True)]

    def _keys(self, start: int) -> list[str]:
        while True:
            keys = [key for key in self.store.list(f"{self.prefix}/ledger") if key >= self.key(start)]
            lacking = next((self.key(start + k) for k, key in enumerate(keys) if key != self.key(start + k)), None)
            if lacking is None:
                return keys
            if not self.store.exists(lacking):  # else it was written while the listing ran: list again
                raise LedgerError(f"the ledger of '{self.campaign}' lacks {lacking}: restore that object from a backup")

    def exists(self) -> bool:
        return self.store.exists(self.key(0))

    def state(self) -> CampaignState:
        """The state after everything in the store now. Do not change it; a later call returns another object."""
        with self._lock:
            entries = self.read(self._state.next_seq)
            if entries:
                self._state = fold(entries, self._state)
            return self._state

    @property
    def known(self) -> CampaignState:
        """The state as this handle last saw it, without a look at the store: current while it holds the lease."""
        return self._state

    # ------------------------------------------------------------------------------------------------------------- writing

    def create(self, event: Created) -> bool:
        """Write event 0; False when the campaign exists already."""
        return self._put(Entry(seq=0, epoch=0, writer=self.writer, event=event))

    def append(self, event: AnyEvent) -> Entry:
        """Write the next event. Raises StaleWriter when the lease is gone, LedgerError when the event contradicts the ledger
        (nothing is written then)."""
        with self._lock:
            if self.epoch is None or self.lost.is_set():
                raise self._stale()
            entry = Entry(seq=self._state.next_seq, epoch=self.epoch, writer=self.writer, event=event)
            after = fold([entry], self._state)
            if not self._put(entry):
                self.lost.set()
                raise self._stale()
            self._state = after
            return entry

    def _put(self, entry: Entry) -> bool:
        data = encode(entry)
        if self.store.put_if_absent(self.key(entry.seq), data):
            return True
        # a driver that repeats a request whose answer was lost reports our own object as somebody else's
        return self.store.get(self.key(entry.seq)) == data

    def _stale(self) -> StaleWriter:
        newest = fold(self.read(self._state.next_seq), self._state)
        now = f"the lease is at epoch {newest.epoch}, held by {newest.holder}" if newest.holder else "the lease is free"
        mine = "no lease" if self.epoch is None else f"the lease of epoch {self.epoch}"
        return StaleWriter(
            f"campaign '{self.campaign}': this writer ({self.writer}) has {mine}, and {now}; nothing was written. "
            "Stop this run; the campaign goes on elsewhere or with a new advance"
        )

    # --------------------------------------------------------------------------------------------------------------- leases

    def take_lease(self, holder: Holder, *, ttl: float = TTL_SECONDS) -> int:
        """The new epoch. Raises CampaignHeld when somebody else holds the campaign and is alive. Starts the heartbeat."""
        with self._lock:
            while True:
                state = self.state()
                if state.holder is not None and not self._may_take_over(state):
                    since = datetime.fromtimestamp(state.since, tz=UTC).isoformat(timespec="seconds")
                    raise CampaignHeld(self.campaign, str(state.holder), since)
                event = LeaseTaken(holder=holder, since=time.time())
                entry = Entry(seq=state.next_seq, epoch=state.epoch + 1, writer=self.writer, event=event)
                if self._put(entry):
                    break
            self._state = fold([entry], state)
            self.epoch = entry.epoch
            self.lost.clear()
            self._stop_beating = threading.Event()
            self._beat(entry.epoch, ttl)
            for key in self.store.list(f"{self.prefix}/lease"):
                if key < self._heartbeat_key(entry.epoch):
                    self.store.delete(key)
            self._beating = threading.Thread(
                target=self._keep_beating, args=(entry.epoch, ttl, self._stop_beating), name="ledger-heartbeat", daemon=True
            )
            self._beating.start()
            return entry.epoch

    def release(self, reason: str = "finished") -> None:
        """Give the lease back; without effect for a handle that holds none or was passed."""
        with self._lock:
            if self.epoch is None:
                return
            try:
                self.append(LeaseReleased(reason=reason))
            except StaleWriter:
                pass  # passed: there is nothing to give back
            except OSError as error:
                _LOG.warning("campaign '%s': could not write the release (%s); free in %s s", self.campaign, error, TTL_SECONDS)
            epoch, self.epoch = self.epoch, None
            self._stop_beating.set()
        if self._beating is not None:
            self._beating.join()
        with contextlib.suppress(OSError):
            self.store.delete(self._heartbeat_key(epoch))

    @contextlib.contextmanager
    def lease(self, holder: Holder, *, ttl: float = TTL_SECONDS) -> Iterator[int]:
        """`take_lease` and `release` around a block; the reason of the release names the error that left it, if any."""
        epoch = self.take_lease(holder, ttl=ttl)
        try:
            yield epoch
        except BaseException as error:
            self.release(type(error).__name__)
            raise
        self.release()

    def _may_take_over(self, state: CampaignState) -> bool:
        if state.holder is None or holder_is_gone(state.holder):
            return True
        at, ttl = state.since, TTL_SECONDS
        with contextlib.suppress(FileNotFoundError):
            beat = msgspec.json.decode(self.store.get(self._heartbeat_key(state.epoch)), type=Heartbeat)
            at, ttl = beat.at, beat.ttl
        return time.time() - at > ttl

    def _heartbeat_key(self, epoch: int) -> str:
        return f"{self.prefix}/lease/{epoch:08d}.json"

    def _beat(self, epoch: int, ttl: float) -> None:
        self.store.put(self._heartbeat_key(epoch), to_json(Heartbeat(epoch=epoch, at=time.time(), ttl=ttl)))

    def _keep_beating(self, epoch: int, ttl: float, stop: threading.Event) -> None:
        while not stop.wait(ttl / 3):
            try:
                if self.store.exists(self.key(self._state.next_seq)) and self._passed(epoch):
                    self.lost.set()
                    return
                self._beat(epoch, ttl)
            except OSError as error:  # an outage of the store: fencing keeps the ledger right, so go on trying
                _LOG.warning("campaign '%s': heartbeat failed (%s); trying again in %.0f s", self.campaign, error, ttl / 3)

    def _passed(self, epoch: int) -> bool:
        with self._lock:
            return self.epoch != epoch or fold(self.read(self._state.next_seq), self._state).epoch != epoch
