"""The six stages as Prefect tasks: one thin wrapper each around a bound stage, with refs as what Prefect sees of them.

A stage may retry where only its surroundings failed (a lost node, an engine or a trainer that restarts): stages are idempotent.
Broken contracts, stale writers and budgets of lost groups are never retried. Nothing is cached or persisted: the ledger is the
record, and Prefect's states are a projection of it for people.

Task runs carry no tags on purpose: Prefect 3.7.7 asks its server for a concurrency slot for every tag of every task run, a
write that waits about 2 s on a busy SQLite (docs/results/prefect.md). Flow runs are tagged; task runs have their stage's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TagsContext

from data_contracts.errors import BessemerError, InfraError, PublishRefused
from data_contracts.ledger_events import Curated, Evaluated, Published, Scored, Sealed, Trained
from data_contracts.records import CheckpointRef, EpisodesRef, ProblemsRef, ScoresRef
from tasks.campaign import Stages, StepContext

RETRIES = 2
RETRY_SECONDS = 5.0
Work = Callable[[], Any]
E = TypeVar("E")


def worth_retrying(error: BaseException) -> bool:
    """Whether the same call may succeed when the surroundings recover."""
    if isinstance(error, InfraError | PublishRefused | ConnectionError | TimeoutError):
        return True
    return isinstance(error, OSError) and not isinstance(error, BessemerError | FileNotFoundError)


def _retry(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, BaseException) and worth_retrying(error)


def _stage(name: str, *, retries: int = 0) -> Callable[[Callable[..., Any]], Task[..., Any]]:
    return task(
        name=name,
        task_run_name=f"{name} {{number}}",
        retries=retries,
        retry_delay_seconds=RETRY_SECONDS,
        retry_condition_fn=_retry if retries else None,
        persist_result=False,
        cache_policy=NO_CACHE,
        log_prints=False,
    )


@_stage("curate", retries=RETRIES)
def curate(number: int, *, work: Work) -> Curated:
    """Problems of iteration `number`."""
    return work()  # type: ignore[no-any-return]


@_stage("rollout", retries=RETRIES)
def rollout(number: int, problems: ProblemsRef, policy: CheckpointRef, *, work: Work) -> Sealed:
    """Attempts at the problems of iteration `number`, graded and sealed."""
    return work()  # type: ignore[no-any-return]


@_stage("score")
def score(number: int, episodes: EpisodesRef, *, work: Work) -> Scored:
    """Rewards of the batch of iteration `number`."""
    return work()  # type: ignore[no-any-return]


@_stage("train", retries=RETRIES)
def train(number: int, episodes: EpisodesRef, scores: ScoresRef, parent: CheckpointRef, *, work: Work) -> Trained:
    """One update from the batch of iteration `number`; a finished job answers from record."""
    return work()  # type: ignore[no-any-return]


@_stage("publish", retries=RETRIES)
def publish(number: int, checkpoint: CheckpointRef, *, work: Work) -> Published:
    """Version `number` on every replica, proven."""
    return work()  # type: ignore[no-any-return]


@_stage("evaluate", retries=RETRIES)
def evaluate(number: int, policy: CheckpointRef, *, work: Work) -> Evaluated:
    """Held-out problems under version `number`."""
    return work()  # type: ignore[no-any-return]


class PrefectStages:
    """`tasks.campaign.Stages` whose every call is a task run of the surrounding flow run."""

    def __init__(self, inner: Stages) -> None:
        self._inner = inner

    def curate(self, context: StepContext, iteration: int) -> Curated:
        return _call(curate, iteration, work=lambda: self._inner.curate(context, iteration))

    def rollout(self, context: StepContext, iteration: int) -> Sealed:
        state = context.state
        policy = state.checkpoint(state.serving or 0)
        problems = state.curated[iteration].problems
        return _call(rollout, iteration, problems, policy, work=lambda: self._inner.rollout(context, iteration))

    def score(self, context: StepContext, iteration: int) -> Scored:
        episodes = context.state.sealed[iteration].episodes
        return _call(score, iteration, episodes, work=lambda: self._inner.score(context, iteration))

    def train(self, context: StepContext, iteration: int) -> Trained:
        state = context.state
        inputs = (state.sealed[iteration].episodes, state.scored[iteration].scores, state.checkpoint(iteration))
        return _call(train, iteration, *inputs, work=lambda: self._inner.train(context, iteration))

    def publish(self, context: StepContext, version: int) -> Published:
        checkpoint = context.state.checkpoint(version)
        return _call(publish, version, checkpoint, work=lambda: self._inner.publish(context, version))

    def evaluate(self, context: StepContext, version: int) -> Evaluated:
        policy = context.state.checkpoint(version)
        return _call(evaluate, version, policy, work=lambda: self._inner.evaluate(context, version))


def _call(stage: Task[..., Any], *inputs: Any, work: Callable[[], E]) -> E:
    call: Callable[..., E] = stage  # a synchronous task called directly answers with its value
    with TagsContext(current_tags=set()):
        return call(*inputs, work=work)
