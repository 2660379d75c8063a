"""One episode, on a Dask worker: act turn by turn, collect, grade in a fresh sandbox. Free of Prefect and Dask.

Deadlines nest: tool call (environment) < turn < episode < group. The three outcomes are decided here and nowhere else:
`policy_failure` when the policy spent its own budgets or killed its box, `infra_failure` only for an InfraError raised by the
control plane (and for queueing, sampling and grading deadlines), `scored` otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, TypeVar

import msgspec

from data_contracts.errors import InfraError, SandboxLost, VersionMismatch
from data_contracts.records import (
    Budgets,
    Episode,
    EpisodeTelemetry,
    Failure,
    InfraCause,
    Interval,
    IntervalKind,
    Message,
    Outcome,
    Problem,
    Record,
    SampleRequest,
    StopReason,
    Turn,
    Verdict,
    VersionSpan,
)
from environments.base import Action, Collected, Environment, EnvironmentContext
from environments.registry import domain_of, verifier
from tasks.runtime import ConversationAware, Runtime

POLICY_STOPS: Final[frozenset[StopReason]] = frozenset(
    {"turn_budget", "token_budget", "tool_budget", "time_budget", "box_killed"}
)
T = TypeVar("T")
_LOG = logging.getLogger(__name__)
STEP_SLACK_SECONDS: Final = 60.0
"""Queueing for a box and the environment's own work, on top of the tool calls of one turn."""


class GroupJob(Record, frozen=True, kw_only=True):
    """One attempt at one group. `keep_equal` keeps groups whose rewards are all equal (evaluation)."""

    problem: Problem
    group_id: str
    order: int
    campaign: str
    iteration: int
    attempt: int
    attempt_id: str
    group_size: int
    temperature: float
    min_version: int
    max_version: int
    max_episode_tokens: int | None
    sampling_seconds: float
    grading_seconds: float
    episode_seconds: float
    group_seconds: float
    keep_equal: bool
    shard_uri: str
    """Store key of the shard without its ending."""

    def budgets(self) -> Budgets:
        """What an episode may spend: the problem's budgets under the run's cap. Stored with it, since shaping depends on it."""
        budgets, cap = self.problem.budgets, self.max_episode_tokens
        if cap is None or cap >= budgets.max_episode_tokens:
            return budgets
        return msgspec.structs.replace(budgets, max_episode_tokens=cap)


@dataclass(kw_only=True)
class _Trace:
    """What one running episode has written so far; array-likes on the token axis T."""

    token_ids_T: list[int] = field(default_factory=list)
    loss_mask_T: list[int] = field(default_factory=list)
    logprobs_T: list[float] = field(default_factory=list)
    prompt_length: int = 0
    spans: list[VersionSpan] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    prompt: tuple[Message, ...] = ()
    conversation: list[Message] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    sampled: int = 0
    tool_calls: int = 0
    engine: str = ""

    def append_context(self, ids: Sequence[int]) -> None:
        self.token_ids_T.extend(ids)
        self.loss_mask_T.extend([0] * len(ids))
        self.logprobs_T.extend([0.0] * len(ids))

    @contextmanager
    def measured(self, kind: IntervalKind) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self.intervals.append(Interval(kind=kind, start=start, stop=time.time()))


async def run_episode(job: GroupJob, member: int, runtime: Runtime) -> tuple[Episode, EpisodeTelemetry]:
    """One attempt, graded. Never raises for anything the policy or the infrastructure did."""
    trace = _Trace()
    deadline = asyncio.timeout(job.episode_seconds)
    try:
        async with deadline:
            return await _attempt(job, member, runtime, trace)
    except TimeoutError:
        if not deadline.expired():
            raise
        detail = f"the episode was not finished after {job.episode_seconds:g} s"
        return _result(job, member, trace, "infra", "infra_failure", Failure(cause="queue_deadline", detail=detail))
    except InfraError as error:
        return _result(job, member, trace, "infra", "infra_failure", Failure(cause=error.cause, detail=error.detail))


async def _attempt(job: GroupJob, member: int, runtime: Runtime, trace: _Trace) -> tuple[Episode, EpisodeTelemetry]:
    problem = job.problem
    episode_id = f"{job.group_id}/{member}"
    seed = int.from_bytes(sha256(episode_id.encode()).digest()[:8])
    context = EnvironmentContext(episode_id=episode_id, seed=seed, acquire=runtime.backend.acquire)
    environment = domain_of(problem).environment(problem, context)
    try:
        try:
            stop = await _act(job, episode_id, environment, runtime, trace)
            if stop in POLICY_STOPS:
                return _result(job, member, trace, stop, "policy_failure")
            with trace.measured("environment"):
                work = _guarded(environment.collect(), problem)
                collected = await _within(work, STEP_SLACK_SECONDS, "sandbox_backend", "collecting the files")
            collected = msgspec.structs.replace(collected, transcript=tuple(trace.conversation))
            verdict = await _grade(job, problem, collected, runtime, trace)
        except SandboxLost:
            return _result(job, member, trace, "box_killed", "policy_failure")
        return _result(job, member, trace, stop, "scored", verdict=verdict, collected=collected)
    finally:
        await _close(environment)


async def _act(job: GroupJob, episode_id: str, environment: Environment, runtime: Runtime, trace: _Trace) -> StopReason:
    """The turns of one episode: sample, parse, step; returns why it stopped."""
    problem, budgets, codec = job.problem, job.budgets(), runtime.codec
    trace.prompt = await _reset(environment, trace)
    trace.conversation.extend(trace.prompt)
    trace.append_context(codec.encode_prompt(trace.prompt, problem.tools))
    trace.prompt_length = len(trace.token_ids_T)
    limit = min(budgets.max_episode_tokens, runtime.spec.max_model_len - 1)
    for index in range(budgets.max_turns):
        if trace.turns:
            last = trace.turns[-1]
            sampled = trace.token_ids_T[last.token_start : last.token_stop]
            context = codec.encode_observations(sampled, last.observations)
            if len(trace.token_ids_T) + len(context) >= limit:  # what nothing is sampled after, the trainer need not see
                return "token_budget"
            trace.append_context(context)
        room = min(
            budgets.max_tokens_per_turn,
            limit - len(trace.token_ids_T),
        )
        if room <= 0:
            return "token_budget"
        turn = await _sample_turn(job, episode_id, index, room, runtime, trace)
        trace.turns.append(turn)
        calls = turn.message.tool_calls
        trace.tool_calls += len(calls)
        if trace.tool_calls > budgets.max_tool_calls:
            return "tool_budget"
        allowance = budgets.tool_call_seconds * max(1, len(calls)) + STEP_SLACK_SECONDS
        with trace.measured("environment"):
            action = Action(message=turn.message, parse_error=turn.parse_error)
            work = _guarded(environment.step(action), problem)
            step = await _within(work, allowance, "sandbox_backend", "a tool call and its box")
        trace.turns[-1] = msgspec.structs.replace(turn, observations=step.messages)
        trace.conversation.extend(step.messages)
        if step.done:
            return step.stop_reason or "environment_done"
    return "turn_budget"


async def _reset(environment: Environment, trace: _Trace) -> tuple[Message, ...]:
    with trace.measured("environment"):
        try:
            return await _within(environment.reset(), STEP_SLACK_SECONDS, "sandbox_backend", "resetting the environment")
        except SandboxLost as error:  # the policy has not acted yet
            raise InfraError("sandbox_backend", f"the box was lost before the first turn: {error}") from error


async def _close(environment: Environment) -> None:
    """What cannot be cleaned up is reported and left to the reaper; it never changes a result."""
    try:
        await _within(environment.close(), STEP_SLACK_SECONDS, "sandbox_backend", "closing the environment")
    except (InfraError, SandboxLost) as error:
        _LOG.warning("an environment of %s was not closed in good order: %s", environment.problem.id, error)


async def _sample_turn(job: GroupJob, episode_id: str, index: int, room: int, runtime: Runtime, trace: _Trace) -> Turn:
    if isinstance(runtime.sampler, ConversationAware):
        runtime.sampler.observe(episode_id, job.problem, trace.conversation, version=job.max_version)
    request = SampleRequest(
        request_id=f"{job.attempt_id}/{episode_id}/{index}",
        session=episode_id,
        token_ids=tuple(trace.token_ids_T),
        max_tokens=room,
        temperature=job.temperature,
        stop_token_ids=runtime.codec.stop_token_ids,
        together=job.group_id if job.problem.budgets.max_turns == 1 else "",
    )
    with trace.measured("sampling"):
        result = await runtime.sampler.sample(request, deadline_seconds=job.sampling_seconds)
    for span in result.spans:
        if not job.min_version <= span.version <= job.max_version:
            raise VersionMismatch(
                f"{result.engine} sampled from version {span.version}, this batch admits {job.min_version} to {job.max_version}"
            )
    start = len(trace.token_ids_T)
    trace.token_ids_T.extend(result.token_ids)
    trace.loss_mask_T.extend([1] * len(result.token_ids))
    trace.logprobs_T.extend(result.logprobs)
    trace.spans.extend(VersionSpan(start=start + s.start, stop=start + s.stop, version=s.version) for s in result.spans)
    trace.sampled += len(result.token_ids)
    trace.engine = result.engine
    parsed = runtime.codec.parse(result.token_ids, job.problem.tools)
    trace.conversation.append(parsed.message)
    return Turn(
        index=index,
        message=parsed.message,
        token_start=start,
        token_stop=len(trace.token_ids_T),
        finish_reason=result.finish_reason,
        parse_error=parsed.parse_error,
    )


async def _grade(job: GroupJob, problem: Problem, collected: Collected, runtime: Runtime, trace: _Trace) -> Verdict:
    judge = verifier(problem.verifier.kind)
    with trace.measured("grading"):
        work = judge.verify(problem, collected, acquire=runtime.backend.acquire, deadline_seconds=job.grading_seconds)
        try:
            return await _within(work, job.grading_seconds + STEP_SLACK_SECONDS, "grading_deadline", "grading")
        except (InfraError, SandboxLost):  # a lost grading box is the candidate's doing: it ran in there
            raise
        except Exception as error:  # a verifier's own bug must never become a reward of 0
            raise InfraError("verifier_error", f"{problem.verifier.kind} on {problem.id}: {error!r}") from error


async def _guarded(work: Awaitable[T], problem: Problem) -> T:
    """An environment's own bug becomes an infrastructure failure: a policy that finds one must not end the campaign."""
    try:
        return await work
    except (InfraError, SandboxLost):
        raise
    except Exception as error:
        raise InfraError("environment_error", f"{problem.environment.kind} on {problem.id}: {error!r}") from error


async def _within(work: Awaitable[T], seconds: float, cause: InfraCause, what: str) -> T:
    """Await under a deadline whose passing is an infrastructure failure; other TimeoutErrors pass through unchanged."""
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            return await work
    except TimeoutError:
        if timeout.expired():
            raise InfraError(cause, f"{what} took longer than {seconds:g} s") from None
        raise


def lost_episode(job: GroupJob, member: int, failure: Failure) -> tuple[Episode, EpisodeTelemetry]:
    """An episode of which nothing is known but why it was given up."""
    return _result(job, member, _Trace(), "infra", "infra_failure", failure)


def _result(
    job: GroupJob,
    member: int,
    trace: _Trace,
    stop: StopReason,
    outcome: Outcome,
    failure: Failure | None = None,
    *,
    verdict: Verdict | None = None,
    collected: Collected | None = None,
) -> tuple[Episode, EpisodeTelemetry]:
    problem = job.problem
    episode_id = f"{job.group_id}/{member}"
    episode = Episode(
        id=episode_id,
        group_id=job.group_id,
        problem_id=problem.id,
        domain=problem.domain,
        split=problem.split,
        campaign=job.campaign,
        iteration=job.iteration,
        member=member,
        prompt=trace.prompt,
        tools=problem.tools,
        token_ids_T=tuple(trace.token_ids_T),
        loss_mask_T=tuple(trace.loss_mask_T),
        logprobs_T=tuple(trace.logprobs_T),
        prompt_length=trace.prompt_length,
        spans=tuple(trace.spans),
        turns=tuple(trace.turns),
        stop_reason=stop,
        outcome=outcome,
        failure=failure,
        verdict=verdict,
        artifacts=collected.artifacts if collected else (),
        budgets=job.budgets(),
        final_state=collected.state if collected else {},
    )
    times = [moment for interval in trace.intervals for moment in (interval.start, interval.stop)] or [time.time()]
    telemetry = EpisodeTelemetry(
        episode_id=episode_id,
        attempt_id=job.attempt_id,
        attempt=job.attempt,
        worker=f"{socket.gethostname()}:{os.getpid()}",
        engine=trace.engine,
        started_at=min(times),
        finished_at=max(times),
        sampled_tokens=trace.sampled,
        intervals=tuple(trace.intervals),
    )
    return episode, telemetry
