"""What the policy acts in: the environment protocol, the verifier protocol, and the domain that names both.

An environment is single use: `reset` once, `step` until `done`, `collect` once, `close` always. It owns every resource it
acquires through its context and never sees token ids, rewards or the policy. All methods are coroutines that must not block
the event loop for more than 5 ms; blocking work goes to `asyncio.to_thread` or into the sandbox.

A domain is data plus small functions; judges and simulated users are *declared* by a domain (`services`) and injected through
the context by tasks/, because environments/ never imports models/.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from data_contracts.errors import InputError
from data_contracts.protocols import Sandbox
from data_contracts.records import (
    Artifact,
    Message,
    Problem,
    Record,
    SandboxSpec,
    Split,
    StopReason,
    Verdict,
)


class Action(Record, frozen=True, kw_only=True):
    """One assistant message; `parse_error` says why a tool call in it could not be read (an observation to recover from)."""

    message: Message
    parse_error: str | None = None


class Step(Record, frozen=True, kw_only=True):
    """What the environment answers: messages for the policy, and whether the episode is over."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    stop_reason: StopReason | None = None


class Collected(Record, frozen=True, kw_only=True):
    """What a verifier may look at: declared regular files, and state and audit log owned by the environment.

    `transcript` holds every message of the episode, the prompt first.
    """

    artifacts: tuple[Artifact, ...] = ()
    state: dict[str, Any] = {}
    transcript: tuple[Message, ...] = ()


Acquire = Callable[[SandboxSpec], Awaitable[Sandbox]]
Service = Callable[[Sequence[Message]], Awaitable[Message]]


@dataclass(frozen=True, kw_only=True)
class EnvironmentContext:
    """What an environment may use. `seed` derives from the episode id; `services` maps declared names to callables."""

    episode_id: str
    seed: int
    acquire: Acquire
    services: Mapping[str, Service] = field(default_factory=dict)


class Environment(ABC):
    """One episode's world."""

    def __init__(self, problem: Problem, context: EnvironmentContext) -> None:
        self.problem, self.context = problem, context

    @abstractmethod
    async def reset(self) -> tuple[Message, ...]:
        """Acquire what is needed and return the first prompt (usually `problem.messages`)."""

    @abstractmethod
    async def step(self, action: Action) -> Step:
        """Answer one assistant message. A tool's failure or a malformed call is a message, never an exception."""

    @abstractmethod
    async def collect(self) -> Collected:
        """Freeze the box, then copy the declared files. `transcript` is filled in by the caller."""

    async def attachment(self, sha256: str) -> bytes:
        """The bytes of an attachment that a message of this episode named (a rendered image, a page), until `close`.

        The caller asks once a digest and keeps the bytes beside the episode. Environments without attachments leave this alone.
        """
        raise InputError(f"no attachment {sha256} in this episode", remedy="Ask for digests that a message named")

    @abstractmethod
    async def close(self) -> None:
        """Idempotent; destroys the box."""


class Verifier(ABC):
    """Decides what really worked, from collected files and environment-owned state; runs code in a fresh sandbox."""

    kind: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()
    """Keys of `Collected.state` without which nothing can be graded: `regrade` names the one that was not stored."""
    opinion: ClassVar[bool] = False
    """A graded opinion (a judge) and not a fact: by default never the only component (verifiers/composite.py)."""

    def check(self, problem: Problem) -> None:  # noqa: B027  a verifier without settings has nothing to check
        """Raises InputError (with the field) for a problem that this verifier could not grade, or would pass without cause.

        Called for problems from outside before anything starts: afterwards a mistake costs a rollout to find.
        """

    def check_part(self, problem: Problem) -> None:
        """As `check`, where other verifiers stand beside this one (verifiers/composite.py)."""
        self.check(problem)

    def passes_untouched(self, problem: Problem) -> bool:
        """Whether an episode passes that calls nothing and answers nothing: such a verifier may hold others back, never pay."""
        return False

    def needs(self, problem: Problem) -> tuple[str, ...]:
        """`reads`, for this problem."""
        return self.reads

    @abstractmethod
    async def verify(self, problem: Problem, collected: Collected, *, acquire: Acquire, deadline_seconds: float) -> Verdict:
        """Deterministic. Raises InfraError for backend faults; everything the policy did is a verdict."""


Policy = Callable[[Sequence[Message]], Message]
"""A scripted policy: the conversation so far (prompt first) -> the next assistant message."""


@dataclass(frozen=True, kw_only=True)
class Exploit:
    """One attempt to earn a reward without solving the problem; must score 0."""

    name: str
    policy: Callable[[Problem], Policy]


class Domain(ABC):
    """A named family of problems with environment, verifier, oracle and exploit pack."""

    name: ClassVar[str]
    summary: ClassVar[str]
    family: ClassVar[str] = ""
    """The kind of work that this domain is an instance of, for lists."""
    levels: ClassVar[Mapping[str, str]] = {"default": "the only level"}
    floor: ClassVar[float] = 0.0
    """The mean score that a no-op or random policy may reach."""
    services: ClassVar[tuple[str, ...]] = ()
    images: ClassVar[tuple[str, ...]] = ()
    """Root file system variants beside "base" that its problems name (infra/rootfs.py); `python -m environments.images` builds
    those of every installed domain."""

    @abstractmethod
    def problems(self, split: Split, *, seed: int, level: str = "default", **settings: Any) -> Iterator[Problem]:
        """An endless or finite, deterministic stream of distinct problems; splits are disjoint by construction."""

    @abstractmethod
    def environment(self, problem: Problem, context: EnvironmentContext) -> Environment: ...

    @abstractmethod
    def oracle(self, problem: Problem) -> Policy:
        """Scores 1 on every problem."""

    @abstractmethod
    def exploits(self) -> Sequence[Exploit]: ...

    def noop(self, problem: Problem) -> Policy:
        """Says nothing useful; scores at most `floor`."""
        return lambda conversation: Message(role="assistant", content="")
