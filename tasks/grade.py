"""Grade: one candidate, or many, by a problem's verifier in the configured sandbox. No model, no campaign, no store.

A solution is files, an answer, or tool calls. Files go to the verifier as if they had been collected from a frozen box: only
names that the problem declares, regular files only, under its byte cap. An answer is the policy's final message, played
through the domain's environment (so that what the environment takes out of a message is graded, too). Tool calls are played
through the environment in one message, in their order, before the answer; its budgets and its audit log are those of an
episode. In a solutions file a plain text is the file where the problem collects exactly one, else an answer. The outcomes are
those of an episode: `scored`, `policy_failure` (reward 0), `infra_failure` (no reward); `invalid` is a row that could not be
graded as it was written. The reward is the verifier's score; a campaign's own components are the business of `regrade`.

Gap: calls are fixed beforehand, so a solution cannot react to what a tool answers; a policy that does is a domain's oracle, and
`bessemer domains check` runs it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from typing import Literal, TypeVar

from data_contracts.errors import CapabilityError, InfraError, InputError, MissingRequirement, SandboxLost
from data_contracts.protocols import Sandbox, SandboxBackend
from data_contracts.records import Artifact, Message, Outcome, Problem, Record, SandboxSpec, ToolCall, TrustLevel, Verdict
from environments.base import Acquire, Collected
from environments.registry import domain_of, verifier
from environments.sandbox.files import artifact, check_name
from environments.scripted import plays, run_scripted, says

DEADLINE_SECONDS = 60.0
QUEUE_SECONDS = 600.0
"""What one grading may wait for its turn and its box, on top of its own deadline."""


class Played(Record, frozen=True, kw_only=True):
    """Tool calls in order, arguments as a policy would write them (JSON), and the final message after them."""

    calls: tuple[tuple[str, str], ...]
    answer: str = ""


Solution = str | Mapping[str, bytes] | Played
T = TypeVar("T")


class Test(Record, frozen=True, kw_only=True):
    """One test of a verdict, as `--json` writes it."""

    id: str
    passed: bool
    message: str = ""


class Graded(Record, frozen=True, kw_only=True):
    """What came of one solution; one JSON line of `bessemer grade --json`."""

    problem_id: str
    outcome: Outcome | Literal["invalid"]
    reward: float | None
    trust: TrustLevel | None
    tests: tuple[Test, ...]
    evidence: str


class Boxes:
    """A backend that is checked when the first box is asked for: an answer that needs no box needs no sandbox on the host."""

    def __init__(self, backend: SandboxBackend) -> None:
        self.backend = backend
        self.name, self.capabilities = backend.name, backend.capabilities
        self._checked: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Raises MissingRequirement; once for all who wait."""
        if self._checked is None:
            self._checked = asyncio.ensure_future(self.backend.check())
        await asyncio.shield(self._checked)

    async def acquire(self, spec: SandboxSpec) -> Sandbox:
        await self.check()
        return await self.backend.acquire(spec)

    async def close(self) -> None:
        await self.backend.close()

    async def era(self) -> int:
        return await self.backend.era()

    def reap(self) -> int:
        return self.backend.reap()


# ------------------------------------------------------------------------------------------------------------------ grading


async def verify(problem: Problem, collected: Collected, *, acquire: Acquire, seconds: float) -> Verdict:
    """The verdict on what was collected, as an episode gets it. Raises InfraError; SandboxLost is the candidate's doing."""
    judge = verifier(problem.verifier.kind)
    return await _timed(
        judge.verify(problem, collected, acquire=acquire, deadline_seconds=seconds), seconds, f"{judge.kind} on {problem.id}"
    )


async def grade(problem: Problem, solution: Solution, *, backend: SandboxBackend, seconds: float = DEADLINE_SECONDS) -> Graded:
    """One solution: a text is the policy's final message, a mapping the collected files, `Played` calls and a message.

    Raises InputError for files or calls that do not fit the problem, MissingRequirement and CapabilityError for the host and
    the backend; all else is in the result.
    """
    try:
        if isinstance(solution, Mapping):
            found = await verify(problem, collected(problem, solution), acquire=backend.acquire, seconds=seconds)
        else:
            policy, domain = plays(*_messages(problem, solution)), domain_of(problem)
            played = await _timed(
                run_scripted(domain, problem, policy, backend=backend, deadline_seconds=seconds), seconds, problem.id
            )
            if played.verdict is None:
                return _failed(problem, "policy_failure", f"the episode ended without a verdict: {played.stop_reason}")
            found = played.verdict
    except SandboxLost as error:
        return _failed(problem, "policy_failure", str(error))
    except InfraError as error:
        return _failed(problem, "infra_failure", str(error))
    return graded(problem, found)


def _messages(problem: Problem, solution: str | Played) -> tuple[Message, ...]:
    """What the policy says. Raises InputError for calls to a problem without tools."""
    if isinstance(solution, str):
        return (says(solution),)
    if not problem.tools:
        raise InputError(
            f"problem {problem.id} has no tools to call", field="solution", remedy="Give an answer, or the files it collects"
        )
    made = tuple(
        ToolCall(call_id=f"call_{number}", name=name, arguments=text) for number, (name, text) in enumerate(solution.calls)
    )
    return (Message(role="assistant", content="", tool_calls=made), says(solution.answer)) if made else (says(solution.answer),)


async def _timed(work: Awaitable[T], seconds: float, what: str) -> T:
    """Await; a bug of a verifier or an environment is an InfraError, as in an episode."""
    timeout = asyncio.timeout(seconds + QUEUE_SECONDS)
    try:
        async with timeout:
            return await work
    except (InfraError, SandboxLost, MissingRequirement, CapabilityError):
        raise
    except Exception as error:
        if timeout.expired():
            raise InfraError("grading_deadline", f"{what} took longer than {seconds + QUEUE_SECONDS:g} s") from None
        raise InfraError("verifier_error", f"{what}: {error!r}") from error


def _failed(problem: Problem, outcome: Outcome, evidence: str) -> Graded:
    reward = 0.0 if outcome == "policy_failure" else None
    return Graded(problem_id=problem.id, outcome=outcome, reward=reward, trust=None, tests=(), evidence=evidence)


def graded(problem: Problem, verdict: Verdict) -> Graded:
    """A verdict as one line."""
    tampering = f"tampering: {verdict.tampering}\n" if verdict.tampering else ""
    return Graded(
        problem_id=problem.id,
        outcome="scored",
        reward=verdict.score,
        trust=verdict.trust,
        tests=tuple(Test(id=check.id, passed=check.passed, message=check.message) for check in verdict.checks),
        evidence=tampering + verdict.evidence,
    )


def as_solution(problem: Problem, text: str) -> Solution:
    """A text of a solutions file: the one file that the problem collects, else an answer."""
    names = problem.verifier.collect
    return {names[0]: text.encode("utf-8", errors="replace")} if len(names) == 1 else text


def collected(problem: Problem, solution: Mapping[str, bytes]) -> Collected:
    """What the verifier gets for these files. Raises InputError for files that the problem does not collect."""
    names = problem.verifier.collect
    if not names:
        raise InputError(
            f"problem {problem.id} takes an answer, not files", field="solution", remedy="Give the answer as a text"
        )
    unknown = sorted(set(solution) - set(names))
    if unknown:
        raise InputError(
            f"{unknown[0]!r} is not a file that problem {problem.id} collects", field="solution",
            remedy=f"Give only {', '.join(names)}",
        )  # fmt: skip
    artifacts: list[Artifact] = []
    left = problem.verifier.collect_max_bytes
    for name in names:
        if name in solution:
            check_name(name)
            left -= len(solution[name])
            if left < 0:  # an episode's environment leaves such files out, too
                return Collected(state={"not_collected": f"more than {problem.verifier.collect_max_bytes} bytes"})
            artifacts.append(artifact(name, solution[name]))
    return Collected(artifacts=tuple(artifacts))


# ------------------------------------------------------------------------------------------------------------------ batches


async def grade_all(
    jobs: Iterable[tuple[Problem, Solution] | Graded],
    *,
    backend: SandboxBackend,
    concurrency: int,
    seconds: float = DEADLINE_SECONDS,
) -> AsyncIterator[Graded]:
    """Results in the order of the jobs, `concurrency` at once; a job that is a result already is passed on.

    A solution that does not fit its problem becomes an `invalid` result. Raises MissingRequirement and CapabilityError.
    """

    async def one(job: tuple[Problem, Solution]) -> Graded:
        problem, solution = job
        try:
            return await grade(problem, solution, backend=backend, seconds=seconds)
        except InputError as error:
            return invalid(problem.id, error)

    waiting: deque[Graded | asyncio.Task[Graded]] = deque()
    running: set[asyncio.Task[Graded]] = set()
    try:
        for job in jobs:
            if isinstance(job, Graded):
                waiting.append(job)
            else:
                task = asyncio.ensure_future(one(job))
                running.add(task)
                waiting.append(task)
            while len(running) >= concurrency:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            while waiting and (isinstance(waiting[0], Graded) or waiting[0].done()):
                first = waiting.popleft()
                yield first if isinstance(first, Graded) else first.result()
        for entry in waiting:
            yield entry if isinstance(entry, Graded) else await entry
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def invalid(problem_id: str, error: InputError) -> Graded:
    """A row that could not be graded as it was written."""
    return Graded(problem_id=problem_id, outcome="invalid", reward=None, trust=None, tests=(), evidence=str(error))
