"""An episode as a tree of spans, before any tracking library sees it: a span per model turn, tool call and verification.

Pure. Times are seconds since the Unix epoch and come from the episode's telemetry: sampling intervals are the turns in order,
what lies between two of them is that turn's tool calls, grading is the verification. Without telemetry (or when its intervals
do not match the turns) the episode's span is cut into equal parts and `timed` is false.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

from data_contracts.records import Episode, EpisodeTelemetry, GroupShard, Message, Record, Turn

TEXT_LIMIT = 8_000
"""Characters of one text in a span; longer ones keep head and tail (a trace is for reading, the store has it all)."""


class SpanPlan(Record, frozen=True, kw_only=True):
    """One span. `kind` is AGENT, CHAT_MODEL, TOOL or EVALUATOR; `failed` marks a parse error or a verdict that found none."""

    name: str
    kind: str
    start: float
    stop: float
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    failed: bool = False
    children: tuple[SpanPlan, ...] = ()


class TracePlan(Record, frozen=True, kw_only=True):
    """One episode to show. `reward` is None for an infra_failure; `timed` tells whether the times were measured."""

    episode_id: str
    root: SpanPlan
    reward: float | None
    rationale: str
    timed: bool
    tags: dict[str, str] = {}


def rewards_of(shard: GroupShard) -> list[float | None]:
    """Reward of each member of a group in member order; None where the member has none (infra_failure)."""
    rewards = iter(shard.rewards_G)
    return [None if outcome == "infra_failure" else next(rewards, None) for outcome in shard.outcomes_G]


def choose(rewards: Mapping[str, float | None], domains: Mapping[str, str], count: int) -> list[str]:
    """Episode ids worth showing: domains take turns, each giving its best, its worst, its second best, and so on."""
    queues = []
    for domain in sorted(set(domains.values())):
        ids = [episode for episode in rewards if domains[episode] == domain]
        ids.sort(key=lambda e: (-(rewards[e] if rewards[e] is not None else -1.0), e))  # type: ignore[operator]
        queues.append([ids[-(n // 2) - 1] if n % 2 else ids[n // 2] for n in range(len(ids))])
    rounds = zip_longest(*queues)
    return [episode for row in rounds for episode in row if episode is not None][:count]


def plan(episode: Episode, *, telemetry: EpisodeTelemetry | None, reward: float | None, now: float) -> TracePlan:
    """The trace of one episode. `now` dates it when there is no telemetry."""
    start, stop = (telemetry.started_at, telemetry.finished_at) if telemetry else (now, now + 0.001)
    windows = _windows(episode, telemetry)
    timed = windows is not None
    if windows is None:
        width = max(stop - start, 0.001) / (len(episode.turns) + 1)
        cuts = [start + width * n for n in range(len(episode.turns) + 2)]
        windows = [(a, a + width / 2, b) for a, b in pairwise(cuts)]
    children: list[SpanPlan] = []
    context: Sequence[Message] = episode.prompt
    for turn, window in zip(episode.turns, windows, strict=False):
        children.append(_model_span(episode, turn, context, window))
        children.extend(_tool_spans(turn, window))
        context = turn.observations
    if episode.verdict is not None:
        children.append(_verdict_span(episode, windows[-1]))
    root = SpanPlan(
        name=f"{episode.domain} {episode.problem_id} #{episode.member}",
        kind="AGENT",
        start=min([start, *(child.start for child in children)]),
        stop=max([stop, *(child.stop for child in children)]),
        inputs={"messages": [message_view(m) for m in episode.prompt]},
        outputs={
            "answer": clip(episode.turns[-1].message.content) if episode.turns else "",
            "stop_reason": episode.stop_reason,
            "outcome": episode.outcome,
            "reward": reward,
        },
        attributes={
            "bessemer.tokens": len(episode.token_ids_T),
            "bessemer.sampled_tokens": sum(episode.loss_mask_T),
            "bessemer.versions": json.dumps(sorted({span.version for span in episode.spans})),
        },
        failed=episode.outcome != "scored",
        children=tuple(children),
    )
    tags = {
        "bessemer.episode": episode.id,
        "bessemer.campaign": episode.campaign,
        "bessemer.iteration": str(episode.iteration),
        "bessemer.domain": episode.domain,
        "bessemer.problem": episode.problem_id,
        "bessemer.outcome": episode.outcome,
    }
    return TracePlan(episode_id=episode.id, root=root, reward=reward, rationale=_rationale(episode), timed=timed, tags=tags)


def message_view(message: Message) -> dict[str, Any]:
    """A chat message in the OpenAI form that trace viewers render."""
    view: dict[str, Any] = {"role": message.role, "content": clip(message.content)}
    if message.tool_calls:
        view["tool_calls"] = [
            {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": clip(c.arguments)}}
            for c in message.tool_calls
        ]
    if message.tool_call_id is not None:
        view["tool_call_id"] = message.tool_call_id
    return view


def clip(text: str, limit: int = TEXT_LIMIT) -> str:
    """Head and tail of a text that is longer than `limit`, with the number of characters left out between them."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def _windows(episode: Episode, telemetry: EpisodeTelemetry | None) -> list[tuple[float, float, float]] | None:
    """(turn starts, turn's sampling ends, next begins) for every turn, then the grading's; None when it does not fit."""
    if telemetry is None:
        return None
    intervals = sorted(telemetry.intervals, key=lambda interval: interval.start)
    turns = [i for i in intervals if i.kind == "sampling"]
    grading = [i for i in intervals if i.kind == "grading"]
    if len(turns) != len(episode.turns):
        return None
    end = grading[0].start if grading else telemetry.finished_at
    follows = [turn.start for turn in turns[1:]] + [end]
    windows = [(turn.start, turn.stop, max(turn.stop, after)) for turn, after in zip(turns, follows, strict=True)]
    last = (grading[0].start, grading[0].start, grading[-1].stop) if grading else (end, end, end)
    return [*windows, last]


def _model_span(episode: Episode, turn: Turn, context: Sequence[Message], window: tuple[float, float, float]) -> SpanPlan:
    attributes: dict[str, Any] = {
        "bessemer.turn": turn.index,
        "bessemer.sampled_tokens": turn.token_stop - turn.token_start,
        "bessemer.finish_reason": turn.finish_reason,
    }
    if turn.parse_error is not None:
        attributes["bessemer.parse_error"] = clip(turn.parse_error)
    if turn.index == 0 and episode.tools:
        attributes["bessemer.tools"] = json.dumps([tool.name for tool in episode.tools])
    return SpanPlan(
        name=f"turn {turn.index}",
        kind="CHAT_MODEL",
        start=window[0],
        stop=window[1],
        inputs={"messages": [message_view(m) for m in context]},
        outputs={"choices": [{"message": message_view(turn.message)}]},
        attributes=attributes,
        failed=turn.parse_error is not None,
    )


def _tool_spans(turn: Turn, window: tuple[float, float, float]) -> list[SpanPlan]:
    calls = turn.message.tool_calls
    answers = {m.tool_call_id: m for m in turn.observations if m.tool_call_id is not None}
    width = (window[2] - window[1]) / max(len(calls), 1)
    spans = []
    for n, call in enumerate(calls):
        answer = answers.get(call.call_id)
        spans.append(
            SpanPlan(
                name=call.name,
                kind="TOOL",
                start=window[1] + n * width,
                stop=window[1] + (n + 1) * width,
                inputs={"arguments": clip(call.arguments)},
                outputs={"content": clip(answer.content) if answer else ""},
                attributes={"bessemer.call_id": call.call_id},
                failed=answer is None,
            )
        )
    return spans


def _verdict_span(episode: Episode, window: tuple[float, float, float]) -> SpanPlan:
    verdict = episode.verdict
    if verdict is None:
        raise ValueError(f"episode {episode.id} has no verdict")
    return SpanPlan(
        name=f"verify: {verdict.verifier}",
        kind="EVALUATOR",
        start=window[0],
        stop=window[2],
        inputs={"artifacts": [f"{a.name} ({a.size} bytes)" for a in episode.artifacts]},
        outputs={
            "score": verdict.score,
            "passed": verdict.passed,
            "checks": [{"id": c.id, "passed": c.passed, "message": clip(c.message, 500)} for c in verdict.checks[:50]],
            "evidence": clip(verdict.evidence),
        },
        attributes={"bessemer.trust": verdict.trust, "bessemer.tampering": verdict.tampering or ""},
    )


def _rationale(episode: Episode) -> str:
    if episode.failure is not None:
        return f"{episode.failure.cause}: {clip(episode.failure.detail, 1000)}"
    if episode.verdict is None:
        return f"no verdict; the episode stopped with {episode.stop_reason}"
    verdict = episode.verdict
    passed = sum(check.passed for check in verdict.checks)
    return f"{verdict.verifier}: {passed} of {len(verdict.checks)} checks passed. {clip(verdict.evidence, 1000)}"
