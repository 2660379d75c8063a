"""What makes the boxes goes away in the middle of a run: it waits, goes on, and no group shows it; a policy gains nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest

from data_contracts.config import RolloutConfig, SandboxConfig
from data_contracts.errors import TooManyInfraFailures
from data_contracts.protocols import Codec, ExecRequest, ExecResult
from data_contracts.records import BatchManifest, Message, Problem
from data_contracts.tables import put_problems, read_manifest, read_telemetry
from environments.base import Policy
from environments.registry import domain_of
from environments.sandbox.base import Box
from environments.sandbox.bubblewrap_box import BubblewrapBox
from environments.sandbox.docker_box import DockerBox
from environments.scripted import calls, plays, says
from infra.store import LocalStore
from tasks import runtime
from tasks.group_pool import LocalPool
from tasks.rollout import rollout
from tasks.scripted import ScriptedSampler
from tests.plugins.engine import PrivateEngine
from tests.tasks.test_rollout import few, roomy, serving, worker

PREFIX = "campaigns/c/iterations/000000"
CONFIG = RolloutConfig(group_size=2, drop_zero_variance=False, refill_budget=0)
WRONG = plays(calls("run_tests", {}), says("Done."))
TESTS, VERDICT = "pytest", "-P"
"""Words of the commands that run the visible tests in an episode's box, and the candidate in a verdict's."""


class Mixed(ScriptedSampler):
    """Members with even numbers solve the problem, the others play `other`; `attempts` counts the episodes begun."""

    def __init__(self, codec: Codec, other: Callable[[Problem], Policy]) -> None:
        super().__init__(codec, policy="oracle")
        self._other = other
        self.attempts: dict[str, int] = {}

    def observe(self, session: str, problem: Problem, conversation: Sequence[Message], *, version: int) -> None:
        if len(conversation) == len(problem.messages):
            self.attempts[session] = self.attempts.get(session, 0) + 1
            solves = int(session.rpartition("/")[2]) % 2 == 0
            self._policies[session] = (domain_of(problem).oracle if solves else self._other)(problem)
        super().observe(session, problem, conversation, version=version)


class Run:
    """One rollout in a store of its own."""

    def __init__(self, folder: Path, backend: str, *, warm: int = 0, wait: float = 60.0) -> None:
        self.store = LocalStore(folder)
        self.sandbox = SandboxConfig(backend=backend, warm=warm, outage_wait_seconds=wait)  # type: ignore[arg-type]
        self.said: list[str] = []
        self.sampler: Mixed | None = None

    def __call__(
        self,
        problems: list[Problem],
        other: Callable[[Problem], Policy] = lambda problem: WRONG,
        *,
        config: RolloutConfig = CONFIG,
    ) -> BatchManifest:
        def sampler(spec: object, *, codec: Codec) -> Mixed:
            self.sampler = self.sampler or Mixed(codec, other)
            return self.sampler

        pool = LocalPool()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(runtime, "_open_sampler", sampler)
                ref = rollout(
                    config,
                    put_problems(self.store, f"{PREFIX}/problems.jsonl", problems),
                    campaign="c",
                    iteration=0,
                    groups=len(problems),
                    serving=serving(),
                    worker=msgspec.structs.replace(worker(self.store, "oracle"), sandbox=self.sandbox.model_dump_json()),
                    pool=pool,
                    store=self.store,
                    prefix=PREFIX,
                    on_wait=self.said.append,
                )
        finally:
            pool.close()
        return read_manifest(self.store, ref)

    @property
    def attempts(self) -> list[int]:
        assert self.sampler is not None
        return list(self.sampler.attempts.values())


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return roomy(few("code_repair", 2))


@pytest.fixture(scope="module")
def undisturbed(
    problems: list[Problem], private_engine: PrivateEngine, tmp_path_factory: pytest.TempPathFactory
) -> BatchManifest:
    with private_engine.chosen():
        return Run(tmp_path_factory.mktemp("undisturbed"), "docker")(problems)


@pytest.fixture
def strike(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`strike(word, act)`: the first time that a command with `word` in its argv runs in a box, `act(box)` runs beside it."""
    struck: list[threading.Thread] = []

    def arm(kind: type[Box], word: str, act: Callable[[Box], None], *, delay: float = 0.2) -> None:
        original = kind._exec

        async def watched(self: Box, request: ExecRequest, env: dict[str, str]) -> ExecResult:
            if not struck and any(word in part for part in request.argv):
                struck.append(threading.Timer(delay, act, (self,)))
                struck[0].start()
            return await original(self, request, env)  # type: ignore[arg-type]

        monkeypatch.setattr(kind, "_exec", watched)

    yield arm
    assert struck, "nothing was struck"
    struck[0].join()


def away(engine: PrivateEngine, how: str, seconds: float, box: Box) -> None:
    getattr(engine, how)()
    time.sleep(seconds)
    engine.start()


@pytest.mark.parametrize(
    ("how", "word", "warm"), [("stop", TESTS, 0), ("kill", VERDICT, 2)], ids=["stopped-in-episodes", "killed-in-verdicts"]
)
def test_an_engine_that_goes_away_leaves_no_trace_in_the_groups(
    how: str,
    word: str,
    warm: int,
    problems: list[Problem],
    undisturbed: BatchManifest,
    private_engine: PrivateEngine,
    strike: Callable[..., None],
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, "docker", warm=warm)
    strike(DockerBox, word, partial(away, private_engine, how, 1.5))
    with private_engine.chosen():
        disturbed = run(problems)
    assert disturbed == undisturbed  # rewards, outcomes, and the digest of every group
    assert [shard.rewards_G for shard in disturbed.shards] == [(1.0, 0.0)] * 2
    assert max(run.attempts) > 1, "no group was run again: the outage hit nothing"
    assert any("no Docker engine answers" in said and "stack.sandbox.outage_wait_seconds" in said for said in run.said), (
        run.said
    )
    assert "goes on" in run.said[-1]


def test_an_engine_that_stays_away_stops_the_run_which_is_resumed_when_it_is_back(
    problems: list[Problem], undisturbed: BatchManifest, private_engine: PrivateEngine, tmp_path: Path
) -> None:
    run = Run(tmp_path, "docker", wait=2.0)
    with private_engine.chosen():
        private_engine.stop()
        with pytest.raises(
            TooManyInfraFailures, match=r"away for more than 2 s .*systemctl start docker.* `bessemer resume c`"
        ):
            run(problems)
        assert not run.store.list(f"{PREFIX}/groups")
        assert run.sampler is None or not run.sampler.attempts, "nothing is sampled for boxes that cannot be made"
        starter = threading.Timer(1.5, private_engine.start)
        starter.start()
        assert Run(tmp_path, "docker")(problems) == undisturbed
        starter.join()


def test_a_spawner_that_dies_leaves_no_trace_in_the_groups(
    problems: list[Problem], bubblewrap_backend: object, strike: Callable[..., None], tmp_path: Path
) -> None:
    def kill(box: Box) -> None:
        assert isinstance(box, BubblewrapBox)
        os.kill(box._host.spawner.pid, signal.SIGKILL)

    undisturbed = Run(tmp_path / "undisturbed", "bubblewrap")(problems)
    run = Run(tmp_path / "disturbed", "bubblewrap")
    strike(BubblewrapBox, TESTS, kill)
    assert run(problems) == undisturbed
    assert max(run.attempts) > 1


# --------------------------------------------------------------------------------------------------- what a policy may try

FILL = """
for folder in ("/dev/shm", "/tmp", "."):
    try:
        with open(f"{folder}/fill", "wb") as file:
            while True: file.write(b"x" * (1 << 20))
    except OSError: pass
held = []
while True: held.append(b"x" * (1 << 24))
"""


def bombs_its_box(problem: Problem) -> Policy:
    return plays(calls("write_file", {"path": "solution.py", "text": FILL}), calls("run_tests", {}), says("Done."))


def hands_in_a_bomb(problem: Problem) -> Policy:
    return plays(calls("write_file", {"path": "solution.py", "text": FILL}), says("Done."))


def kills_its_box(problem: Problem) -> Policy:
    """What it would take is not to be had in a box: the test does it from outside, at its only call of this tool."""
    return plays(calls("list_files", {}), calls("run_tests", {}), says("Done."))


def end_box(box: Box) -> None:
    if isinstance(box, DockerBox):
        box.container.kill()
    elif isinstance(box, BubblewrapBox):
        os.kill(box.pid, signal.SIGKILL)


@pytest.mark.parametrize(("backend", "kind"), [("bubblewrap", BubblewrapBox), ("docker", DockerBox)])
def test_a_policy_that_ends_its_box_when_it_would_be_wrong_gets_what_it_gets_for_being_wrong(
    backend: str, kind: type[Box], strike: Callable[..., None], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(f"{backend}_backend")
    strike(kind, "find .", end_box, delay=0.0)
    problem = roomy(few("code_repair", 1))
    outcomes = {}
    for other in (lambda problem: WRONG, bombs_its_box, hands_in_a_bomb, kills_its_box):
        run = Run(tmp_path / other.__name__, backend)
        (shard,) = run(problem, other).shards
        assert shard.rewards_G == (1.0, 0.0), other.__name__
        assert run.attempts == [1, 1], "a policy that ends its box gets no second try"
        assert [row.attempt for row in read_telemetry(run.store.get(shard.telemetry_uri))] == [0, 0]
        outcomes[other.__name__] = shard.outcomes_G[1]
    assert outcomes["kills_its_box"] == "policy_failure"
