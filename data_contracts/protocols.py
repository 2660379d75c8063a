"""The seams between the packages. Interfaces are short; implementations live one per file beside a shipped fake.

| protocol | implemented in | fake |
|---|---|---|
| Store | infra/store.py | infra/store.py `MemoryStore` |
| Sandbox, SandboxBackend | environments/sandbox/ | environments/sandbox/fake.py |
| Sampler | models/serving/vllm_sampler.py | models/serving/replay.py (recorded tokens), tasks/scripted.py (scripted policies) |
| Engine | models/serving/vllm_engine.py | models/serving/fake_engine.py |
| Trainer | models/training/client.py | models/training/fake.py |
| Codec | models/codec/ | - |
| Tracker | infra/tracking.py | infra/tracking.py `NullTracker` |
| Judge | injected by tasks/ | - |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from data_contracts.records import (
    Artifact,
    CheckpointRef,
    EpisodesRef,
    EvalReport,
    Message,
    PublishResult,
    Record,
    SampleRequest,
    SampleResult,
    SandboxSpec,
    ToolSpec,
    TrainJob,
    TrainResult,
)

# ------------------------------------------------------------------------------------------------------------------- store


@runtime_checkable
class Store(Protocol):
    """Immutable objects by key ("/"-separated, relative). Writes are atomic: a reader sees all of an object or none."""

    root: str
    """URL or folder that the keys are relative to (fsspec URL for object storage, a path for a folder)."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """True when this call created the object; False when it existed already (its bytes are left alone)."""

    def put(self, key: str, data: bytes) -> None:
        """Create or replace. Only for objects that are not part of any digest (heartbeats, telemetry)."""

    def get(self, key: str) -> bytes:
        """Raises FileNotFoundError naming the key."""

    def exists(self, key: str) -> bool: ...

    def list(self, prefix: str) -> list[str]:
        """Keys below `prefix`, sorted."""

    def delete(self, prefix: str) -> int:
        """Remove the object, or everything below a prefix; returns how many objects went."""

    def local_path(self, key: str) -> str:
        """A folder or file path on this machine for readers that need one (safetensors, vLLM); remote stores fetch."""

    def publish_folder(self, folder: str, key: str) -> None:
        """Move a finished local folder to `key` atomically; a no-op when `key` exists already with a manifest."""


# ----------------------------------------------------------------------------------------------------------------- sandbox


class Preload(Record, frozen=True, kw_only=True):
    """Leave for a backend to run the Python script that `argv` ends with in a fork of an interpreter that was started with
    `options`, and has imported `modules`, before any box existed. Isolation and result stay the same; only the start is saved.
    Such a script sees `sys.flags` of `options` and takes no arguments."""

    options: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


class ExecRequest(Record, frozen=True, kw_only=True):
    """One command inside a box. `deadline_seconds` is wall clock, enforced from outside on the whole process tree."""

    argv: tuple[str, ...]
    deadline_seconds: float
    cwd: str | None = None
    env: dict[str, str] = {}
    stdin: bytes = b""
    user: str = "box"
    """The box's one unprivileged user. Any other name is refused with InputError: no command in a box has more rights."""
    max_output_bytes: int = 64 * 1024
    """Cap on each of stdout and stderr; head and tail are kept, the middle is dropped and flagged."""
    preload: Preload | None = None


class ExecResult(Record, frozen=True, kw_only=True):
    """`exit_code` is None when the command was stopped from outside. `stdout`/`stderr` may hold any bytes."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    timed_out: bool = False
    oom_killed: bool = False
    wall_seconds: float = 0.0


class ShellResult(ExecResult, frozen=True, kw_only=True):
    """One turn of a shell. `exit_code` is that of the turn's last command, None when the turn was stopped from outside."""

    alive: bool = True
    """Whether the session goes on. False: the policy ended its shell (`exit`, `exec`, `kill`; then `exit_code` is the
    shell's), or the deadline could not be kept without killing it (`timed_out`)."""


class Shell(Protocol):
    """A stateful session: bash, with working directory, variables, functions and background jobs kept from turn to turn.

    Commands see an empty stdin. Output of background jobs comes with the turn in which, or after which, it was written. What a
    turn prints cannot end it. At its deadline everything the turn started is killed, background jobs of earlier turns are not.
    Use as an async context manager, or `close` it: that kills all it holds. A session also ends with the freeze of its box.
    """

    alive: bool

    async def run(self, command: str, deadline_seconds: float, *, max_output_bytes: int = 64 * 1024) -> ShellResult:
        """One turn; turns of one session queue. Raises InputError for a session that has ended; errors else as for `exec`."""

    async def close(self) -> None: ...


class Sandbox(Protocol):
    """One isolated, single-use box. No network, read-only root, non-root user, hard limits; `workdir` is writable.

    Errors: `SandboxLost` when the policy destroyed the box (its own doing); `InfraError("sandbox_backend")` when the backend
    itself failed. A command's own failure (exit code, timeout, OOM of a child) is a result, not an error.
    """

    id: str
    spec: SandboxSpec

    @property
    def services(self) -> Mapping[str, Sandbox]:
        """Where the companion services of this box run, by name: for environments and verifiers, never for the policy."""

    async def exec(self, request: ExecRequest) -> ExecResult: ...

    async def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Shell:
        """Open a session in `cwd` (relative to workdir) with `env` on top of the box's variables."""

    def rewind(self) -> None:
        """The next command or shell finds the clock at `spec.clock` again, as the first one did."""

    async def put_files(self, files: Mapping[str, bytes]) -> None:
        """Write regular files (relative to workdir, no "..", no links followed), creating folders."""

    async def freeze(self) -> None:
        """Stop every process in the box, for ever: nothing can change a file after this."""

    async def collect(self, names: Sequence[str], *, max_bytes: int) -> tuple[Artifact, ...]:
        """Regular files only, after `freeze`; missing names are left out; over the cap raises InputError."""

    async def destroy(self) -> None:
        """Idempotent; leaves nothing behind (processes, mounts, cgroups, folders, containers, volumes)."""


class SandboxBackend(Protocol):
    """Where boxes come from. Never falls back to anything weaker: what it cannot enforce it refuses in `check`."""

    name: str
    capabilities: frozenset[str]

    async def check(self) -> None:
        """Raises MissingRequirement naming what is missing, why, and the command that fixes it."""

    async def acquire(self, spec: SandboxSpec) -> Sandbox:
        """A fresh box. Raises CapabilityError for unmet `spec.needs`, InfraError for backend faults."""

    async def era(self) -> int:
        """A number that changes when what makes the boxes was away: boxes of an earlier era may have ended with it, through
        nobody's fault inside. Raises InfraError("sandbox_unreachable") with the remedy while it is away."""

    async def close(self) -> None:
        """Destroy every box this backend still owns."""

    def reap(self) -> int:
        """Remove what dead owners (by host, pid, start time) left; returns how many boxes went."""


# ------------------------------------------------------------------------------------------------------------------- codec


class ParsedTurn(Record, frozen=True, kw_only=True):
    """An assistant message read from sampled tokens. A malformed tool call is `parse_error`, never an exception."""

    message: Message
    parse_error: str | None = None


class Codec(Protocol):
    """Chat messages <-> token ids, append-only: sampled ids are never re-encoded (rule 1)."""

    name: str
    stop_token_ids: tuple[int, ...]

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Ids of the first prompt, ending where the assistant's turn begins."""

    def encode_observations(self, sampled: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Ids to append after the sampled ids: close the assistant turn if the policy did not, add `messages` (tool, user
        or system), open the next assistant turn. Never changes what is before."""

    def parse(self, sampled: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedTurn: ...

    def encode_assistant(self, message: Message) -> list[int]:
        """Ids a policy would have to sample to write `message`, stop token included (scripted policies, imports)."""


# --------------------------------------------------------------------------------------------------------- serving, training


class Sampler(Protocol):
    """Token ids in, token ids out. Refuses tokens whose version label is not this campaign's."""

    async def sample(self, request: SampleRequest, *, deadline_seconds: float) -> SampleResult:
        """Raises InfraError("engine_unreachable" | "sampling_deadline") or VersionMismatch."""

    async def close(self) -> None: ...


class Engine(Protocol):
    """The control side of the serving replicas."""

    def ensure_serving(self, checkpoint: CheckpointRef, *, campaign: str, parent: CheckpointRef | None) -> PublishResult:
        """Make every healthy replica serve `checkpoint` and prove it; a no-op for replicas that already do.
        `parent` is the previous version, for the proof's second half. Raises PublishRefused when none can prove it."""


class Trainer(Protocol):
    """The long-lived, leased worker group that holds weights and optimizer."""

    def train(self, job: TrainJob) -> TrainResult:
        """Idempotent by `job.key`. Raises StaleWriter for an old epoch, TrainerError for the rest."""

    def logprobs(self, checkpoint: CheckpointRef, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every token given the ones before it, one list a sequence (first entry 0.0); temperature 1."""


# ---------------------------------------------------------------------------------------------------------------- monitoring


class Tracker(Protocol):
    """Experiment tracking. Never raises into the loop: an outage is buffered and reported (rule 10)."""

    def start_campaign(self, campaign: str, *, config: Mapping[str, Any], resumed: bool) -> None: ...

    def log_iteration(
        self,
        iteration: int,
        *,
        metrics: Mapping[str, float],
        per_domain: Mapping[str, Mapping[str, float]],
        datasets: Mapping[str, str],
        artifacts: Mapping[str, bytes],
    ) -> None: ...

    def log_episodes(self, iteration: int, episodes: EpisodesRef, *, store: Store, sample: int) -> None:
        """Sampled episodes as traces: a span per model turn, tool call, verification; the reward as feedback."""

    def log_evaluation(self, report: EvalReport, *, step: int) -> None: ...

    def register_candidate(self, checkpoint: CheckpointRef, *, report: EvalReport) -> None: ...

    def finish_campaign(self, status: str) -> None: ...

    def links(self) -> dict[str, str]: ...


class Judge(Protocol):
    """A graded opinion, injected by tasks/ where a domain declares one; never the only component by default."""

    async def grade(self, question: str, answer: str, *, rubric: str, deadline_seconds: float) -> float: ...


def to_json(record: msgspec.Struct | Mapping[str, Any] | Iterable[Any]) -> bytes:
    """Canonical JSON bytes of a record: stable key order, so that equal records have equal digests."""
    return msgspec.json.encode(record, order="sorted")
