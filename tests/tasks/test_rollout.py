"""Rollouts through the real codec, environments, boxes, grading and shards; scripted policies stand in for the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from data_contracts.config import RewardConfig, RolloutConfig, SandboxConfig
from data_contracts.errors import CapabilityError, InfraError, TooManyInfraFailures
from data_contracts.records import CheckpointRef, Problem, SampleRequest, SampleResult, SandboxSpec
from data_contracts.services import ServiceSpec
from data_contracts.tables import put_problems, read_episodes, read_manifest
from environments.registry import domain
from infra.store import LocalStore
from models.base_model import resolve
from models.rewards.overlong import overlong
from models.serving.fake_engine import FakeEngine
from tasks import runtime
from tasks.group_pool import DaskPool, LocalPool
from tasks.rollout import Serving, rollout
from tasks.runtime import SamplerSpec, WorkerSpec

BASE = CheckpointRef(uri="campaigns/c/checkpoints/v000000", sha256="0" * 64, version=0, size=0)
QUICK = RolloutConfig(group_size=2, drop_zero_variance=False, refill_budget=2, infra_retries=1)


@pytest.fixture
def local_pool() -> Iterator[LocalPool]:
    pool = LocalPool()
    yield pool
    pool.close()


def serving(engine: FakeEngine | None = None) -> Serving:
    return Serving(engine=engine or FakeEngine(), checkpoint=BASE, parent=None, oldest=0)


def worker(store: LocalStore, policy: str, backend: str = "bubblewrap") -> WorkerSpec:
    return WorkerSpec(
        store_url=store.root,
        model_folder=str(resolve("tiny")),
        campaign="c",
        sampler=SamplerSpec(kind="scripted", policy=policy),
        sandbox=SandboxConfig(backend=backend).model_dump_json(),
        reward=RewardConfig().model_dump_json(),
        max_model_len=16384,
    )


def few(name: str, count: int) -> list[Problem]:
    stream = domain(name).problems("train", seed=3)
    return [next(stream) for _ in range(count)]


def roomy(problems: list[Problem]) -> list[Problem]:
    """The tiny model's tokenizer spends a token a character: scripted policies need more room than a real model's."""
    return [
        msgspec.structs.replace(
            problem,
            budgets=msgspec.structs.replace(problem.budgets, max_episode_tokens=16000, max_tokens_per_turn=4000),
        )
        for problem in problems
    ]


def run(store: LocalStore, pool, problems: list[Problem], spec: WorkerSpec, *, config: RolloutConfig = QUICK, engine=None):
    ref = put_problems(store, "campaigns/c/iterations/000000/problems.jsonl", problems)
    return rollout(
        config,
        ref,
        campaign="c",
        iteration=0,
        groups=len(problems),
        serving=serving(engine),
        worker=spec,
        pool=pool,
        store=store,
        prefix="campaigns/c/iterations/000000",
    )


@pytest.mark.parametrize("backend", ["bubblewrap", "docker"])
def test_the_oracle_scores_one_in_every_domain(
    backend: str, tmp_path: Path, local_pool: LocalPool, request: pytest.FixtureRequest
):
    request.getfixturevalue(f"{backend}_backend")
    store = LocalStore(tmp_path)
    problems = roomy(few("arithmetic", 2) + few("calculator", 2) + few("code_repair", 1))
    ref = run(store, local_pool, problems, worker(store, "oracle", backend))
    manifest = read_manifest(store, ref)
    assert [shard.rewards_G for shard in manifest.shards] == [(1.0, 1.0)] * 5
    for episode in read_episodes(store, ref):
        assert episode.outcome == "scored"
        assert episode.verdict is not None
        assert episode.verdict.trust in ("cases", "proxied", "in_process")
        assert len(episode.token_ids_T) == len(episode.loss_mask_T) == len(episode.logprobs_T)
        assert sum(episode.loss_mask_T) == sum(turn.token_stop - turn.token_start for turn in episode.turns)
        for turn in episode.turns:  # only what the policy wrote is trained on
            assert all(episode.loss_mask_T[turn.token_start : turn.token_stop])


def test_a_policy_that_says_nothing_scores_nothing(tmp_path: Path, local_pool: LocalPool, bubblewrap_backend):
    store = LocalStore(tmp_path)
    ref = run(store, local_pool, roomy(few("calculator", 1) + few("code_repair", 1)), worker(store, "noop"))
    assert [shard.rewards_G for shard in read_manifest(store, ref).shards] == [(0.0, 0.0)] * 2


def test_a_spent_token_budget_is_the_policys_failure(tmp_path: Path, local_pool: LocalPool, bubblewrap_backend):
    store = LocalStore(tmp_path)
    (problem,) = roomy(few("calculator", 1))
    tight = msgspec.structs.replace(problem, budgets=msgspec.structs.replace(problem.budgets, max_episode_tokens=10))
    (episode, _) = read_episodes(store, run(store, local_pool, [tight], worker(store, "oracle")))
    assert (episode.outcome, episode.stop_reason) == ("policy_failure", "token_budget")
    assert episode.verdict is None


def test_the_runs_cap_is_the_budget_that_is_stored_and_shaped_by(tmp_path: Path, local_pool: LocalPool, bubblewrap_backend):
    store = LocalStore(tmp_path)
    config = QUICK.model_copy(update={"max_episode_tokens": 200})
    (episode, _) = read_episodes(
        store, run(store, local_pool, roomy(few("arithmetic", 1)), worker(store, "oracle"), config=config)
    )
    assert episode.budgets.max_episode_tokens == 200
    written, room = sum(episode.loss_mask_T), 200 - episode.prompt_length
    assert overlong(episode, RewardConfig(overlong_buffer=room)) == pytest.approx(-written / room)


@pytest.mark.parametrize("missing", ["all", "one"])
def test_an_observation_cannot_carry_an_episode_over_its_token_budget(
    missing: str, tmp_path: Path, local_pool: LocalPool, bubblewrap_backend
):
    """A policy that reads a large file must not make the trainer's sequences longer than agreed."""
    store = LocalStore(tmp_path)
    (problem,) = roomy(few("calculator", 1))
    (whole, _) = read_episodes(store, run(store, local_pool, [problem], worker(store, "oracle")))
    budget = whole.turns[0].token_stop if missing == "all" else whole.turns[1].token_start - 1
    tight = msgspec.structs.replace(problem, budgets=msgspec.structs.replace(problem.budgets, max_episode_tokens=budget))
    again = LocalStore(tmp_path / "tight")
    (episode, _) = read_episodes(again, run(again, local_pool, [tight], worker(again, "oracle")))
    assert (episode.outcome, episode.stop_reason) == ("policy_failure", "token_budget")
    assert len(episode.token_ids_T) <= budget
    assert episode.turns[0].observations


def test_a_bug_of_an_environment_ends_neither_the_campaign_nor_in_a_reward(
    tmp_path: Path, local_pool: LocalPool, bubblewrap_backend, monkeypatch: pytest.MonkeyPatch
):
    async def step(self: object, action: object) -> object:
        raise ZeroDivisionError("a bug that a policy found")

    monkeypatch.setattr("environments.tools.ToolEnvironment.step", step)
    with pytest.raises(TooManyInfraFailures, match="environment_error"):
        run(LocalStore(tmp_path), local_pool, few("calculator", 4), worker(LocalStore(tmp_path), "oracle"))


def test_finished_groups_are_taken_over_by_the_next_run(tmp_path: Path, local_pool: LocalPool, bubblewrap_backend):
    store = LocalStore(tmp_path)
    problems = few("arithmetic", 3)
    first = run(store, local_pool, problems, worker(store, "oracle"))
    store.delete("campaigns/c/iterations/000000/episodes.json")
    engine = FakeEngine()
    again = run(store, local_pool, problems, worker(store, "noop"), engine=engine)
    assert again == first
    assert engine.calls == 0, "nothing was left to sample"


class Unreachable:
    """A sampler whose engine is gone for the first `times` requests."""

    def __init__(self, inner, times: int) -> None:
        self.inner, self.left = inner, times

    def observe(self, *arguments, **keywords) -> None:
        self.inner.observe(*arguments, **keywords)

    async def sample(self, request: SampleRequest, *, deadline_seconds: float) -> SampleResult:
        if self.left > 0:
            self.left -= 1
            raise InfraError("engine_unreachable", "connection refused")
        return await self.inner.sample(request, deadline_seconds=deadline_seconds)

    async def close(self) -> None:
        await self.inner.close()


def broken(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    original = runtime._open_sampler
    monkeypatch.setattr(runtime, "_open_sampler", lambda spec, **kw: Unreachable(original(spec, **kw), times))


def test_an_engine_failure_is_retried_after_serving_is_proven_again(
    tmp_path: Path, local_pool: LocalPool, bubblewrap_backend, monkeypatch: pytest.MonkeyPatch
):
    store, engine = LocalStore(tmp_path), FakeEngine()
    broken(monkeypatch, times=1)
    ref = run(store, local_pool, few("arithmetic", 2), worker(store, "oracle"), engine=engine)
    assert [shard.rewards_G for shard in read_manifest(store, ref).shards] == [(1.0, 1.0)] * 2
    assert engine.calls == 2


def test_an_outage_is_never_a_reward_of_zero(
    tmp_path: Path, local_pool: LocalPool, bubblewrap_backend, monkeypatch: pytest.MonkeyPatch
):
    store = LocalStore(tmp_path)
    broken(monkeypatch, times=1000)
    with pytest.raises(TooManyInfraFailures, match="engine_unreachable"):
        run(store, local_pool, few("arithmetic", 4), worker(store, "oracle"))
    assert not store.list("campaigns/c/iterations/000000/groups")


def test_groups_run_as_coroutines_on_dask(tmp_path: Path, bubblewrap_backend):
    from distributed import LocalCluster

    store = LocalStore(tmp_path)
    with LocalCluster(n_workers=1, threads_per_worker=16, processes=True, dashboard_address=None) as cluster:
        pool = DaskPool(cluster.scheduler_address)
        try:
            ref = run(store, pool, few("arithmetic", 6), worker(store, "oracle"))
        finally:
            pool.close()
    assert [shard.rewards_G for shard in read_manifest(store, ref).shards] == [(1.0, 1.0)] * 6


def test_a_box_that_the_backend_cannot_make_is_refused_before_anything_starts(tmp_path: Path, local_pool: LocalPool):
    engine = FakeEngine()
    plain, other = roomy(few("arithmetic", 2))
    service = ServiceSpec(name="shop", port=8080, argv=("server",))
    verifier = msgspec.structs.replace(other.verifier, sandbox=SandboxSpec(services=(service,)))
    problems = [plain, msgspec.structs.replace(other, verifier=verifier)]
    with pytest.raises(CapabilityError, match=rf"problem {other.id}: .*'fake' does not offer services"):
        run(LocalStore(tmp_path), local_pool, problems, worker(LocalStore(tmp_path), "oracle", "fake"), engine=engine)
    assert engine.calls == 0
