"""The boundary records: frozen, small, versioned, in one file. Behaviour lives elsewhere.

Every record is a frozen `msgspec.Struct`: it pickles, compares by value, and converts strictly from and to builtins, so a
malformed row fails with the path of the offending field. Array-like fields carry their axis in the docstring: T is the
token axis of one episode. `SCHEMA_VERSION` names the layout of every stored table.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from data_contracts.services import ServiceSpec, check_services

SCHEMA_VERSION = 1

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "heldout"]
FinishReason = Literal["stop", "length", "abort"]
TrustLevel = Literal["cases", "proxied", "in_process"]
Outcome = Literal["scored", "policy_failure", "infra_failure"]
StopReason = Literal[
    "answered",  # the environment accepted a final answer
    "environment_done",  # the environment ended the episode
    "turn_budget",
    "token_budget",
    "tool_budget",
    "time_budget",  # seconds inside the policy's own tool calls
    "box_killed",  # the policy destroyed its own box (out of memory included)
    "infra",  # the control plane saw a positive cause; see Episode.failure
]
InfraCause = Literal[
    "engine_unreachable",
    "engine_stale",
    "node_lost",
    "image_missing",
    "sandbox_backend",
    "sandbox_unreachable",  # what makes the boxes was away: waited for, not counted as one of a group's retries
    "host_out_of_memory",
    "queue_deadline",
    "sampling_deadline",
    "grading_deadline",
    "group_deadline",
    "verifier_error",
    "environment_error",  # a bug of the environment: never a reward of 0, and never the end of a campaign
]
IntervalKind = Literal["sampling", "environment", "grading", "train_step", "publish"]
Disposition = Literal["kept", "zero_variance", "infra_failure", "quarantined", "surplus"]
TrainOutcome = Literal["trained", "no_signal"]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every boundary record."""


# ---------------------------------------------------------------------------------------------------------------- messages


class ToolSpec(Record, frozen=True, kw_only=True):
    """One tool in the OpenAI function format; `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: dict[str, Any]


class ToolCall(Record, frozen=True, kw_only=True):
    """A call the policy asked for. `arguments` is JSON text as the policy wrote it, parsed only by the environment."""

    call_id: str
    name: str
    arguments: str


class Attachment(Record, frozen=True, kw_only=True):
    """Non-text content of a message (a rendered image, a page), by name and digest; the bytes travel as an artifact."""

    name: str
    media_type: str
    sha256: str


class Message(Record, frozen=True, kw_only=True):
    """One chat message. `tool` messages answer `tool_call_id` and carry the tool's `name`."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    attachments: tuple[Attachment, ...] = ()


# ---------------------------------------------------------------------------------------------------------------- problems


class Budgets(Record, frozen=True, kw_only=True):
    """What one episode may spend before it becomes a `policy_failure`. Deadlines nest: tool call < turn < episode.

    `max_episode_tokens` counts everything the trainer will see: prompt, sampled tokens and observations.
    """

    max_turns: int = 1
    max_tokens_per_turn: int = 64
    max_episode_tokens: int = 2048
    max_tool_calls: int = 16
    tool_call_seconds: float = 10.0
    tool_seconds_total: float = 60.0


class SandboxLimits(Record, frozen=True, kw_only=True):
    """Hard limits of one box. What a host cannot enforce is refused at start, never ignored."""

    memory_bytes: int = 512 * 1024 * 1024
    pids: int = 64
    disk_bytes: int = 64 * 1024 * 1024
    cpus: float = 1.0
    lifetime_seconds: float = 300.0


class SandboxSpec(Record, frozen=True, kw_only=True):
    """The box an episode or a grading needs. `image` names a declared root file system variant."""

    image: str = "base"
    workdir: str = "/work"
    env: dict[str, str] = {}
    clock: str | None = "2025-01-15T12:00:00Z"
    """Date and time, with its zone, that the box's first command finds; from there the clock runs on. None: the right time."""
    limits: SandboxLimits = SandboxLimits()
    needs: tuple[str, ...] = ()
    """Capability flags checked before a run starts, for example "exec", "files", "freeze", "services"."""
    services: tuple[ServiceSpec, ...] = ()
    """Companions that run beside the box, made with it and destroyed with it; they need the capability "services"."""

    def __post_init__(self) -> None:
        check_services(self.services)


class EnvironmentSpec(Record, frozen=True, kw_only=True):
    """Which environment carries a problem. `settings` is JSON-shaped and visible to the environment only."""

    kind: str
    settings: dict[str, Any] = {}
    sandbox: SandboxSpec | None = None
    """None: the environment needs no box (a single-turn answer)."""


class VerifierSpec(Record, frozen=True, kw_only=True):
    """How an attempt is verified. `settings` holds the expected values and never enters an episode's sandbox."""

    kind: str
    trust: TrustLevel = "cases"
    settings: dict[str, Any] = {}
    sandbox: SandboxSpec | None = None
    collect: tuple[str, ...] = ()
    """Declared regular files (relative to workdir) that the grading sandbox receives."""
    collect_max_bytes: int = 256 * 1024


class Problem(Record, frozen=True, kw_only=True):
    """One thing to solve. `id` is unique over domains: "<domain>/<split>/<local id>"."""

    id: str
    domain: str
    split: Split
    difficulty: float
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    environment: EnvironmentSpec
    verifier: VerifierSpec
    budgets: Budgets = Budgets()
    metadata: dict[str, Any] = {}


# ---------------------------------------------------------------------------------------------------------------- episodes


class VersionSpan(Record, frozen=True, kw_only=True):
    """Tokens [start, stop) of an episode (or of one sample) were drawn from policy `version`."""

    start: int
    stop: int
    version: int


class Artifact(Record, frozen=True, kw_only=True):
    """A regular file collected from a frozen sandbox; `content` is the bytes the verifier saw, kept for regrading."""

    name: str
    sha256: str
    size: int
    content: bytes


class Turn(Record, frozen=True, kw_only=True):
    """What the policy wrote once, as positions [token_start, token_stop) on T, and what the environment answered."""

    index: int
    message: Message
    token_start: int
    token_stop: int
    finish_reason: FinishReason
    parse_error: str | None = None
    observations: tuple[Message, ...] = ()


class Check(Record, frozen=True, kw_only=True):
    """One test of a verdict: exactly the expected ids appear, each with a positive record or a reason."""

    id: str
    passed: bool
    message: str = ""


class Verdict(Record, frozen=True, kw_only=True):
    """What the verifier found. `score` in [0, 1]; `components` are named parts of it; `evidence` is for people."""

    verifier: str
    trust: TrustLevel
    score: float
    passed: bool
    checks: tuple[Check, ...]
    components: dict[str, float] = {}
    evidence: str = ""
    tampering: str | None = None


class Failure(Record, frozen=True, kw_only=True):
    """Why an episode has no score. Only the control plane fills `cause` with an infrastructure cause."""

    cause: InfraCause
    detail: str


class Episode(Record, frozen=True, kw_only=True):
    """One attempt at one problem: the reproducible columns only (the same tokens reproduce all of it).

    `token_ids_T`, `loss_mask_T` (1 on tokens the policy wrote) and `logprobs_T` (the sampler's, 0.0 where the mask is 0)
    have one length T; positions below `prompt_length` are the first prompt. `spans` cover every position with mask 1.
    """

    id: str
    group_id: str
    problem_id: str
    domain: str
    split: Split
    campaign: str
    iteration: int
    member: int
    prompt: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    token_ids_T: tuple[int, ...]
    loss_mask_T: tuple[int, ...]
    logprobs_T: tuple[float, ...]
    prompt_length: int
    spans: tuple[VersionSpan, ...]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    outcome: Outcome
    failure: Failure | None = None
    verdict: Verdict | None = None
    artifacts: tuple[Artifact, ...] = ()
    budgets: Budgets = Budgets()
    """What the episode was allowed to spend: shaping depends on it, so it is stored with it."""
    final_state: dict[str, Any] = {}
    """State and audit log that the environment (not the policy) owns, for the verifier and for regrading."""


class Interval(Record, frozen=True, kw_only=True):
    """Wall-clock seconds since the Unix epoch, spent in one kind of useful work."""

    kind: IntervalKind
    start: float
    stop: float


class EpisodeTelemetry(Record, frozen=True, kw_only=True):
    """What differs between two equal runs: timings, workers, attempts. Outside every digest (rule 9)."""

    episode_id: str
    attempt_id: str
    attempt: int
    worker: str
    engine: str
    started_at: float
    finished_at: float
    sampled_tokens: int
    intervals: tuple[Interval, ...]


class Score(Record, frozen=True, kw_only=True):
    """The reward of one episode with its named components; finite, inside the configured range."""

    episode_id: str
    group_id: str
    problem_id: str
    domain: str
    reward: float
    components: dict[str, float]


# -------------------------------------------------------------------------------------------------------------------- refs


class Ref(Record, frozen=True, kw_only=True):
    """An immutable table in the store: `uri` is a store key, `sha256` the digest of its bytes (or of its manifest)."""

    uri: str
    sha256: str
    rows: int
    schema_version: int = SCHEMA_VERSION


class ProblemsRef(Ref, frozen=True, kw_only=True):
    """A ProblemSet: the ordered surplus of problems curated for one iteration (JSON lines of Problem)."""


class EpisodesRef(Ref, frozen=True, kw_only=True):
    """A sealed batch: a JSON manifest of group shards; `rows` counts episodes."""


class ScoresRef(Ref, frozen=True, kw_only=True):
    """The scores of one sealed batch, one row an episode (Parquet)."""


class EvalRef(Ref, frozen=True, kw_only=True):
    """An EvalReport (JSON)."""


class CheckpointRef(Record, frozen=True, kw_only=True):
    """Weights of one policy version: `uri` is a store key prefix that holds manifest.json; `sha256` is the manifest's."""

    uri: str
    sha256: str
    version: int
    size: int


class GroupShard(Record, frozen=True, kw_only=True):
    """One graded group as it lies in the store. `rewards_G` has one entry a scored member, in member order."""

    group_id: str
    problem_id: str
    domain: str
    order: int
    """Position of the problem in the curated order; sealing walks this order."""
    uri: str
    sha256: str
    rows: int
    telemetry_uri: str
    disposition: Disposition
    rewards_G: tuple[float, ...]
    outcomes_G: tuple[Outcome, ...]
    sampled_tokens: int
    reason: str = ""


class BatchManifest(Record, frozen=True, kw_only=True):
    """What a sealed EpisodesRef points at. `discarded` groups are counted, never trained."""

    campaign: str
    iteration: int
    shards: tuple[GroupShard, ...]
    discarded: tuple[GroupShard, ...]
    unused_problem_ids: tuple[str, ...]
    schema_version: int = SCHEMA_VERSION


# ---------------------------------------------------------------------------------------------------------------- sampling


class SampleRequest(Record, frozen=True, kw_only=True):
    """Token ids in. `session` is the episode id: one session sticks to one engine replica.

    `together` names a group whose members wait for each other's answers to one prompt: a sampler may ask the engine once for
    all of them, as n choices of one request.
    """

    request_id: str
    session: str
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    together: str = ""


class SampleResult(Record, frozen=True, kw_only=True):
    """Token ids out: ids and processed logprobs of one length, spans relative to the first sampled token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    engine: str = ""


# ---------------------------------------------------------------------------------------------------------------- training


class TrainJob(Record, frozen=True, kw_only=True):
    """One training transaction. `key` = digest of (campaign, iteration, parent checkpoint, batch hash)."""

    key: str
    campaign: str
    iteration: int
    epoch: int
    """Fencing token: the ledger epoch of the campaign's lease holder; a lower one than seen before is refused."""
    parent: CheckpointRef
    episodes: EpisodesRef
    scores: ScoresRef
    new_version: int
    checkpoint_uri: str
    save_full_state: bool
    train: dict[str, Any]
    """TrainConfig and AlgorithmConfig as builtins: {"train": ..., "algorithm": ...}."""


class TrainResult(Record, frozen=True, kw_only=True):
    """What a finished key answers, now and for ever."""

    key: str
    checkpoint: CheckpointRef
    outcome: TrainOutcome
    metrics: dict[str, float]
    intervals: tuple[Interval, ...] = ()


class ReplicaProof(Record, frozen=True, kw_only=True):
    """The proof of one weight update on one engine replica (STACK: the proof of an update)."""

    replica: str
    version: int
    tokens: int
    distance_new: float
    distance_old: float
    step_distance: float
    accepted: bool
    checksum_only: bool
    reason: str = ""


class PublishResult(Record, frozen=True, kw_only=True):
    """A version that serves: at least one replica accepted it; failing replicas were taken out and are named."""

    version: int
    proofs: tuple[ReplicaProof, ...]
    intervals: tuple[Interval, ...] = ()


class DomainEval(Record, frozen=True, kw_only=True):
    """Held-out figures of one domain; `low`/`high` bound the 95 % bootstrap interval of the mean reward."""

    domain: str
    episodes: int
    mean_reward: float
    low: float
    high: float
    pass_rate: float
    rewards: dict[str, float]
    """problem id -> mean reward, so that two reports can be paired."""


class EvalReport(Record, frozen=True, kw_only=True):
    """Fixed held-out problems under one policy version."""

    campaign: str
    version: int
    domains: tuple[DomainEval, ...]
    episodes: EpisodesRef


class Paired(Record, frozen=True, kw_only=True):
    """Difference of two EvalReports over the same problems: mean of b - a with its 95 % bootstrap interval."""

    domain: str
    problems: int
    before: float
    after: float
    difference: float
    low: float
    high: float
