"""Regrade: stored episodes are verified and scored again; nothing is written. What changed is told episode by episode.

What an episode stores for it: the collected files byte by byte, the state and audit log of its environment, every message, and
its budgets; its problem (with the expected values) is in the iteration's problems.jsonl. The reward configuration is the
campaign's. Episodes without a verdict keep their reward and say why: a `policy_failure` was never collected, an
`infra_failure` has no reward. Where something that grading needs is not stored, the episode is `not graded` and names it;
nothing is guessed.

RUN is `campaign`, `campaign/3` (or `campaign/iterations/000003`), or `campaign/evaluations/3` for the held-out episodes of
version 3. Only sealed batches are read, discarded groups included, quarantined ones (which broke the contract of episodes)
not. `verifier` replaces the kind, or (a JSON file) fields of each problem's verifier; `problems` gives corrected problems by
id.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from data_contracts.config import CampaignConfig, RewardConfig
from data_contracts.errors import InfraError, InputError, SandboxLost
from data_contracts.ledger import CampaignState
from data_contracts.protocols import SandboxBackend, Store, to_json
from data_contracts.records import Episode, EpisodesRef, Problem, Record, Verdict, VerifierSpec
from data_contracts.tables import read_manifest, read_problem_set, read_problems, read_shard
from environments.base import Collected
from environments.registry import check_grading, verifier
from models.rewards import score_group
from tasks.evaluate import read_report
from tasks.grade import DEADLINE_SECONDS, verify

Result = Literal["same", "changed", "kept", "not graded"]


class Regraded(Record, frozen=True, kw_only=True):
    """One episode: `kept` had no verdict, `not graded` could not be graded; `why` says what changed or is missing."""

    episode_id: str
    problem_id: str
    result: Result
    old_reward: float | None
    new_reward: float | None
    why: str


class Batch(NamedTuple):
    """One sealed batch and the problems that it attempted."""

    label: str
    episodes: EpisodesRef
    problems: dict[str, Problem]


class Change(Record, frozen=True, kw_only=True):
    """What replaces parts of every problem's verifier."""

    kind: str | None = None
    fields: dict[str, Any] = {}
    problems: dict[str, Problem] = {}

    def of(self, problem: Problem) -> Problem:
        """Raises InputError when the replaced fields are not those of a verifier."""
        found = self.problems.get(problem.id, problem)
        fields = {**msgspec.to_builtins(found.verifier), **self.fields}
        if self.kind is not None:
            fields["kind"] = self.kind
        if not (self.kind or self.fields):
            return found
        try:
            return msgspec.structs.replace(found, verifier=msgspec.convert(fields, VerifierSpec))
        except msgspec.ValidationError as error:
            raise InputError(str(error), field="verifier", remedy="Write fields of a problem's verifier") from error


def read_change(chosen: str | None, problems: Mapping[str, Problem]) -> Change:
    """`--verifier`: a kind, or a JSON file with fields of a verifier. Raises InputError and ConfigError."""
    if chosen is None:
        return Change(problems=dict(problems))
    if not chosen.endswith(".json"):
        verifier(chosen)
        return Change(kind=chosen, problems=dict(problems))
    try:
        fields = msgspec.json.decode(Path(chosen).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot be read as JSON: {error}", file=chosen, remedy='Write fields of a verifier, as {"settings": {...}}'
        ) from error
    known = VerifierSpec.__struct_fields__
    for name in fields:
        if name not in known:
            raise InputError("is no field of a verifier", file=chosen, field=name, remedy=f"Known: {', '.join(known)}")
    if "kind" in fields:
        verifier(str(fields["kind"]))
    return Change(fields=fields, problems=dict(problems))


def batches(store: Store, state: CampaignState, run: str) -> list[Batch]:
    """The sealed batches that `run` names. Raises InputError naming those there are."""
    campaign, *rest = run.strip("/").split("/")
    kind = rest[0] if len(rest) == 2 else "iterations"
    number = rest[-1] if rest else None
    numbers = sorted(state.evaluated if kind == "evaluations" else state.sealed)
    wrong = len(rest) > 2 or kind not in ("iterations", "evaluations") or (number is not None and not number.isdecimal())
    if wrong or (number is not None and int(number) not in numbers):
        known = ", ".join(map(str, numbers)) or "none"
        raise InputError(
            f"campaign '{campaign}' has no sealed batch of that name", field=run, remedy=f"Its sealed {kind}: {known}"
        )
    chosen = [int(number)] if number is not None else numbers
    return [_batch(store, state, campaign, kind, found) for found in chosen]


def _batch(store: Store, state: CampaignState, campaign: str, kind: str, number: int) -> Batch:
    if kind == "evaluations":
        report = read_report(store, state.evaluated[number].report)
        file = f"campaigns/{campaign}/evaluations/v{number:06d}/problems.jsonl"
        problems: Sequence[Problem] = read_problems(store.get(file), file=file) if store.exists(file) else ()
        return Batch(f"evaluations/{number}", report.episodes, {problem.id: problem for problem in problems})
    problems = read_problem_set(store, state.curated[number].problems)
    return Batch(f"iterations/{number:06d}", state.sealed[number].episodes, {problem.id: problem for problem in problems})


async def regrade(
    found: Sequence[Batch],
    *,
    store: Store,
    reward: RewardConfig,
    backend: SandboxBackend,
    concurrency: int,
    change: Change | None = None,
    seconds: float = DEADLINE_SECONDS,
) -> AsyncIterator[tuple[Regraded, ...]]:
    """Group by group in stored order. Raises MissingRequirement, CapabilityError, ContractError (a shard was changed)."""
    turns = asyncio.Semaphore(concurrency)
    chosen = change or Change()

    async def again(episode: Episode, problems: Mapping[str, Problem]) -> Verdict | str:
        """The new verdict, or why there is none."""
        if episode.outcome == "infra_failure":
            cause = f": {episode.failure.cause}" if episode.failure else ""
            return f"infra_failure{cause}; nothing was collected"
        if episode.outcome == "policy_failure":
            return f"policy_failure ({episode.stop_reason}); nothing was collected, the reward stays 0"
        original = problems.get(episode.problem_id)
        if original is None and episode.problem_id not in chosen.problems:
            return "!its problem is not stored with the batch; give it with --problems"
        problem = chosen.of(original or chosen.problems[episode.problem_id])
        if missing := what_is_missing(episode, problem, original or problem):
            return f"!{missing}"
        async with turns:
            try:
                return await verify(problem, stored(episode), acquire=backend.acquire, seconds=seconds)
            except (InfraError, SandboxLost) as error:
                return f"!grading failed: {error}"

    for batch in found:
        manifest = read_manifest(store, batch.episodes)
        for shard in (*manifest.shards, *manifest.discarded):
            if shard.disposition == "quarantined":
                continue
            group = read_shard(store, shard.uri, sha256=shard.sha256)
            results = await asyncio.gather(*(again(episode, batch.problems) for episode in group))
            yield _compared(group, results, reward)


def stored(episode: Episode) -> Collected:
    """What the verifier saw, from what is stored."""
    said = [*episode.prompt]
    for turn in episode.turns:
        said += [turn.message, *turn.observations]
    return Collected(artifacts=episode.artifacts, state=episode.final_state, transcript=tuple(said))


def what_is_missing(episode: Episode, problem: Problem, original: Problem) -> str:
    """What grading by `problem` needs and the episode does not hold; empty when nothing is."""
    for kept in episode.artifacts:
        if hashlib.sha256(kept.content).hexdigest() != kept.sha256 or len(kept.content) != kept.size:
            return f"the stored bytes of '{kept.name}' are not those of its digest"
    had = {kept.name for kept in episode.artifacts}
    new = [name for name in problem.verifier.collect if name not in original.verifier.collect and name not in had]
    if new:
        return f"'{new[0]}' was not collected when the episode ran (collected were {', '.join(sorted(had)) or 'no files'})"
    judge = verifier(problem.verifier.kind)
    try:
        for key in judge.needs(problem):
            if key not in episode.final_state:
                return f"final_state.{key} is not stored, and {judge.kind} reads it"
        check_grading(problem)
    except InputError as error:
        return f"{judge.kind} cannot grade {problem.id}: {error}"
    return ""


def _compared(group: Sequence[Episode], results: Sequence[Verdict | str], reward: RewardConfig) -> tuple[Regraded, ...]:
    """Old and new rewards, both by the campaign's reward function over the whole group."""
    old = {score.episode_id: score.reward for score in score_group(reward, group)}
    changed = [
        msgspec.structs.replace(episode, verdict=result) if isinstance(result, Verdict) else episode
        for episode, result in zip(group, results, strict=True)
    ]
    new = {score.episode_id: score.reward for score in score_group(reward, changed)}
    rows = []
    for episode, result in zip(group, results, strict=True):
        before, after = old.get(episode.id), new.get(episode.id)
        if isinstance(result, str):
            kind: Result = "not graded" if result.startswith("!") else "kept"
            after, why = (None, result.removeprefix("!")) if kind == "not graded" else (before, result)
        else:
            why = difference(episode.verdict, result)
            kind = "changed" if why or before != after else "same"
        rows.append(
            Regraded(
                episode_id=episode.id, problem_id=episode.problem_id, result=kind, old_reward=before, new_reward=after, why=why
            )
        )
    return tuple(rows)


def difference(old: Verdict | None, new: Verdict) -> str:
    """What differs between two verdicts, for people; empty when their bytes are equal."""
    if old is None:
        return "there was no verdict"
    if to_json(old) == to_json(new):
        return ""
    parts = []
    if (old.verifier, old.trust) != (new.verifier, new.trust):
        parts.append(f"{old.verifier} ({old.trust}) -> {new.verifier} ({new.trust})")
    if old.tampering != new.tampering:
        parts.append(f"tampering: {old.tampering or 'none'} -> {new.tampering or 'none'}")
    before, after = ({check.id: check for check in verdict.checks} for verdict in (old, new))
    for name in [*before, *(name for name in after if name not in before)]:
        was, now = before.get(name), after.get(name)
        if was is None or now is None:
            parts.append(f"test {name} {'is new' if was is None else 'is gone'}")
        elif was.passed != now.passed:
            parts.append(f"{name} {'passes' if now.passed else f'fails: {now.message[:120]}'}")
    if not parts and old.score != new.score:
        parts.append(f"score {old.score:g} -> {new.score:g}")
    if not parts:
        parts.append(f"only the words: {new.evidence[:120]!r}")
    return "; ".join(parts[:4]) + (f" and {len(parts) - 4} more" if len(parts) > 4 else "")


def counts(rows: Sequence[Regraded]) -> dict[str, int]:
    """Episodes by result."""
    return dict(Counter(row.result for row in rows))


def reward_of(state: CampaignState) -> RewardConfig:
    """The campaign's own reward configuration."""
    return CampaignConfig.model_validate(state.config).reward
