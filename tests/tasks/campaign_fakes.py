"""Stages that write small deterministic tables through a store, stores that die at a chosen write, and a runner that forks.

`python -m tests.tasks.campaign_fakes MODE ...` runs one mode in a process of its own; see `main`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_contracts.config import CampaignConfig, CurateConfig, DomainConfig, EvaluateConfig
from data_contracts.errors import BessemerError
from data_contracts.ledger import CampaignState, finished
from data_contracts.ledger_events import Curated, Evaluated, Published, Scored, Sealed, Trained
from data_contracts.protocols import Store, to_json
from data_contracts.records import (
    CheckpointRef,
    EpisodesRef,
    EvalRef,
    ProblemsRef,
    PublishResult,
    ReplicaProof,
    ScoresRef,
    TrainResult,
)
from infra.ledger_log import LedgerLog, this_process
from infra.store import LocalStore
from tasks.campaign import Stages, StepContext, advance, open_or_create

APART = ("/ledger/", "/lease/", ".telemetry.", ".job.json", "/training-epochs/")
MakeStages = Callable[[Store, CampaignConfig], Stages]
MakeBase = Callable[[Store], CheckpointRef]


def config(*, d: int = 0, iterations: int = 3, every: int = 2, groups: int = 2) -> CampaignConfig:
    return CampaignConfig(
        domains=[DomainConfig(name="echo")],
        iterations=iterations,
        max_staleness=d,
        curate=CurateConfig(groups=groups),
        evaluate=EvaluateConfig(every=every),
    )


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def base(store: Store) -> CheckpointRef:
    key = "campaigns/c/checkpoints/v000000"
    store.put_if_absent(f"{key}/weights", b"base")
    store.put_if_absent(f"{key}/manifest.json", b"{}")
    return CheckpointRef(uri=key, sha256=sha(b"base"), version=0, size=4)


class FakeStages:
    """Every table is a function of its inputs alone, and of all of them: a wrong version or peeked score changes bytes."""

    def __init__(self, store: Store, *, seconds: float = 0.0, log: Path | None = None) -> None:
        self.store, self.seconds, self.log = store, seconds, log

    def _put(self, key: str, value: Any) -> tuple[str, str]:
        data = to_json(value) if not isinstance(value, bytes) else value
        self.store.put_if_absent(key, data)
        assert self.store.get(key) == data, f"{key} was written differently before"
        return key, sha(data)

    def _said(self, what: str) -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{what}\n")
        time.sleep(self.seconds)

    def curate(self, context: StepContext, iteration: int) -> Curated:
        self._said(f"curate {iteration}")
        state = context.state
        seen = {str(i): self.store.get(event.scores.uri).decode() for i, event in state.scored.items()}
        before = state.curated[iteration - 1].sampler_state if iteration else {"draws": 0}
        table = {"iteration": iteration, "before": before, "seen": sha(to_json(seen)), "problems": ["a", "b"]}
        key, digest = self._put(f"campaigns/c/iterations/{iteration:06d}/problems.jsonl", table)
        after = {"draws": before["draws"] + 2, "seen": len(seen)}
        return Curated(iteration=iteration, problems=ProblemsRef(uri=key, sha256=digest, rows=2), sampler_state=after)

    def rollout(self, context: StepContext, iteration: int) -> Sealed:
        self._said(f"rollout {iteration}")
        state = context.state
        assert state.serving is not None
        problems = self.store.get(state.curated[iteration].problems.uri)
        weights = self.store.get(f"{state.checkpoint(state.serving).uri}/weights")
        shards = []
        for order in range(2):
            key = f"campaigns/c/iterations/{iteration:06d}/groups/{order:04d}"
            self.store.put(f"{key}.telemetry.json", to_json({"at": time.time()}))
            shards.append(self._put(f"{key}.parquet", sha(problems + weights + bytes([order])).encode()))
        manifest = {"version": state.serving, "shards": shards}
        key, digest = self._put(f"campaigns/c/iterations/{iteration:06d}/episodes.json", manifest)
        return Sealed(iteration=iteration, episodes=EpisodesRef(uri=key, sha256=digest, rows=2), counts={"kept": 2})

    def score(self, context: StepContext, iteration: int) -> Scored:
        self._said(f"score {iteration}")
        episodes = context.state.sealed[iteration].episodes
        table = f"scores of {episodes.sha256}".encode()
        key, digest = self._put(f"campaigns/c/iterations/{iteration:06d}/scores.parquet", table)
        return Scored(iteration=iteration, scores=ScoresRef(uri=key, sha256=digest, rows=2))

    def train(self, context: StepContext, iteration: int) -> Trained:
        self._said(f"train {iteration}")
        state, version = context.state, iteration + 1
        parent = state.checkpoint(iteration)
        episodes, scores = state.sealed[iteration].episodes, state.scored[iteration].scores
        weights = sha(self.store.get(f"{parent.uri}/weights") + (episodes.sha256 + scores.sha256).encode()).encode()
        uri = f"campaigns/c/checkpoints/v{version:06d}"
        root = Path(self.store.root)
        with tempfile.TemporaryDirectory(prefix="fake-trainer-", dir=root / ".tmp" if root.is_dir() else None) as scratch:
            folder = Path(scratch, "checkpoint")
            folder.mkdir()
            (folder / "weights").write_bytes(weights)
            (folder / "manifest.json").write_text("{}")
            self.store.publish_folder(str(folder), uri)
        checkpoint = CheckpointRef(uri=uri, sha256=sha(weights), version=version, size=len(weights))
        key = sha(f"{iteration} {parent.sha256} {episodes.sha256}".encode())[:16]
        result = TrainResult(key=key, checkpoint=checkpoint, outcome="trained", metrics={"loss": 1 / version})
        self._put(f"campaigns/c/training/{key}.json", result)
        return Trained(iteration=iteration, result=result)

    def publish(self, context: StepContext, version: int) -> Published:
        self._said(f"publish {version}")
        proof = ReplicaProof(
            replica="r0",
            version=version,
            tokens=1,
            distance_new=0.0,
            distance_old=1.0,
            step_distance=1.0,
            accepted=True,
            checksum_only=False,
        )
        return Published(version=version, result=PublishResult(version=version, proofs=(proof,)))

    def evaluate(self, context: StepContext, version: int) -> Evaluated:
        self._said(f"evaluate {version}")
        assert context.state.serving == version
        weights = self.store.get(f"{context.state.checkpoint(version).uri}/weights")
        key, digest = self._put(f"campaigns/c/evaluations/v{version:06d}/report.json", {"weights": weights.decode()})
        return Evaluated(version=version, report=EvalRef(uri=key, sha256=digest, rows=1), means={"echo": version / 10})


class MortalStore(LocalStore):
    """A LocalStore whose process dies (kill -9) before or after its n-th write; `ledger_only` counts ledger events alone."""

    def __init__(self, root: str, *, kill_at: int = 0, after: bool = False, ledger_only: bool = True) -> None:
        super().__init__(root)
        self.kill_at, self.after, self.ledger_only = kill_at, after, ledger_only
        self.writes = 0
        self._counting = threading.Lock()

    def _mortal(self, key: str, write: Callable[[], object]) -> object:
        if self.ledger_only and "/ledger/" not in key:
            return write()
        with self._counting:
            self.writes += 1
            now = self.writes == self.kill_at
            if now and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            done = write()
            if now:
                os.kill(os.getpid(), signal.SIGKILL)
        return done

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return bool(self._mortal(key, lambda: super(MortalStore, self).put_if_absent(key, data)))

    def put(self, key: str, data: bytes) -> None:
        self._mortal(key, lambda: super(MortalStore, self).put(key, data))

    def publish_folder(self, folder: str, key: str) -> None:
        self._mortal(key, lambda: super(MortalStore, self).publish_folder(folder, key))


def tables(root: str) -> dict[str, str]:
    """Digests of everything that has to be reproduced: not the ledger and the trainer's jobs and fences (they count epochs),
    leases and telemetry."""
    store = LocalStore(root)
    keys = [key for key in store.list("campaigns") if not any(part in key for part in APART)]
    return {key: sha(store.get(key)) for key in keys}


def outcome(root: str) -> dict[str, object]:
    state = LedgerLog(LocalStore(root), "c").state()
    names = ("config", "base", "curated", "sealed", "scored", "trained", "published", "evaluated", "paused")
    return {name: getattr(state, name) for name in names}


def make_fakes(store: Store, settings: CampaignConfig) -> Stages:
    return FakeStages(store)


def run_once(
    store: LocalStore, settings: CampaignConfig, make: MakeStages = make_fakes, make_base: MakeBase = base
) -> CampaignState:
    log = open_or_create(store, "c", settings, lambda: make_base(store))
    return advance(log, make(store, settings), holder=this_process(f"process-{os.getpid()}"), ttl=60)


def forked(action: Callable[[], object]) -> int:
    """Run `action` in a forked child; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException as error:  # noqa: BLE001
            print(f"child failed: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def crash_everywhere(
    root: Path, settings: CampaignConfig, *, ledger_only: bool, make: MakeStages = make_fakes, make_base: MakeBase = base
) -> dict[str, object]:
    """Kill at every write, before and after it, resume, and compare with an uninterrupted run. The seams for other stages
    are `make` and `make_base`. Returns the number of kills and what differed."""
    whole = str(root / "whole")
    assert forked(lambda: run_once(LocalStore(whole), settings, make, make_base)) == 0
    expected, expected_outcome = tables(whole), outcome(whole)
    kills, different, number, exhausted = 0, [], 0, False
    while not exhausted:
        number += 1
        for after in (False, True):
            path = str(root / f"{number}-{after}")
            status = forked(
                lambda path=path, number=number, after=after: run_once(
                    MortalStore(path, kill_at=number, after=after, ledger_only=ledger_only), settings, make, make_base
                )
            )
            if status == 0:  # fewer writes than that: every one was tried
                exhausted = True
                continue
            if status != -signal.SIGKILL:
                different.append(f"write {number} after={after}: exit {status}")
                continue
            kills += 1
            resumed = forked(lambda path=path: run_once(LocalStore(path), settings, make, make_base))
            if resumed != 0 or tables(path) != expected or outcome(path) != expected_outcome:
                different.append(f"write {number} after={after}: resume exit {resumed}")
    return {"kills": kills, "tables": len(expected), "different": different}


def crash_forever(root: Path, settings: CampaignConfig) -> dict[str, object]:
    """Every advance dies after two events of its own (its lease and one more); it still gets there, to equal tables."""
    whole, path = str(root / "whole"), str(root / "mortal")
    assert forked(lambda: run_once(LocalStore(whole), settings)) == 0
    kills = 0
    while kills < 200:
        status = forked(lambda: run_once(MortalStore(path, kill_at=3, after=False), settings))
        if status == 0:
            break
        kills += 1
    state = LedgerLog(LocalStore(path), "c").state()
    done = finished(state, until=settings.iterations)
    return {"kills": kills, "finished": done, "epochs": state.epoch, "equal": tables(path) == tables(whole)}


def main(mode: str, root: str, *arguments: str) -> None:
    """`crash ROOT D ledger|any`, `forever ROOT D`, or `advance ROOT TTL SECONDS` (prints its end or its error)."""
    if mode == "crash":
        report = crash_everywhere(Path(root), config(d=int(arguments[0])), ledger_only=arguments[1] == "ledger")
        print(json.dumps(report))
    elif mode == "forever":
        print(json.dumps(crash_forever(Path(root), config(d=int(arguments[0])))))
    else:
        store = LocalStore(root)
        log = open_or_create(store, "c", config(), lambda: base(store))
        stages = FakeStages(store, seconds=float(arguments[1]), log=Path(root, "said"))
        print("started", flush=True)
        try:
            state = advance(log, stages, holder=this_process(f"process-{os.getpid()}"), ttl=float(arguments[0]))
            print("finished", len(state.trained), flush=True)
        except BessemerError as error:
            print(type(error).__name__, error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
