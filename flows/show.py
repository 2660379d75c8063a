"""Show: one stored episode, readable: turns, tool calls, errors, tests, reward components. Reads the store, nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from data_contracts.config import RewardConfig
from data_contracts.errors import InputError
from data_contracts.protocols import Store
from data_contracts.records import Episode, Message, Score, Turn, Verdict

STYLE = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
LONGEST = 4000
"""Characters of one message shown."""


def find_episode(store: Store, episode_id: str) -> tuple[Episode, tuple[Episode, ...]]:
    """The episode and its group. `episode_id` is "<campaign>/iterations/<i>/<group>/<member>", as in tables, traces and logs.

    Raises InputError with the closest thing that exists.
    """
    from data_contracts.tables import read_group

    parts = episode_id.strip("/").split("/")
    key = f"campaigns/{'/'.join(parts[:3])}/groups/{parts[-2]}.parquet" if len(parts) == 5 else ""
    if not key or not store.exists(key):
        raise InputError("there is no such episode", field=episode_id, remedy=_nearest(store, parts))
    group = read_group(store.get(key), file=key)
    for episode in group:
        if episode.id == episode_id.strip("/"):
            return episode, group
    raise InputError("the group has no such member", field=episode_id, remedy=f"It has {', '.join(e.id for e in group)}")


def _nearest(store: Store, parts: list[str]) -> str:
    prefix = f"campaigns/{parts[0]}" if parts and parts[0] else "campaigns"
    groups = [key for key in store.list(prefix) if "/groups/" in key and key.endswith(".parquet")]
    if not groups:
        return f"No episodes are stored below {prefix} in {store.root}; an id looks like NAME/iterations/000000/0000-1a2b3c4d/0"
    example = groups[-1].removeprefix("campaigns/").removesuffix(".parquet").replace("/groups/", "/")
    return f"For example {example}/0 ({len(groups)} groups are stored below {prefix})"


def score_of(episode: Episode, group: tuple[Episode, ...], reward: RewardConfig) -> Score | None:
    """The episode's score, computed anew from its group; None for an infra_failure."""
    from models.rewards import score_group

    return next((score for score in score_group(reward, group) if score.episode_id == episode.id), None)


def render(episode: Episode, score: Score | None) -> RenderableType:
    """Everything a person needs to see why this attempt got its reward."""
    return Group(
        _head(episode, score),
        *(_message(message) for message in episode.prompt),
        *(part for turn in episode.turns for part in _turn(turn)),
        _verdict(episode.verdict),
        _score(score),
    )


def _head(episode: Episode, score: Score | None) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    versions = ", ".join(str(span.version) for span in episode.spans)
    sampled = sum(episode.loss_mask_T)
    rows = {
        "problem": f"{episode.problem_id} ({episode.split})",
        "policy version": versions or "none",
        "tokens": f"{len(episode.token_ids_T)}, of them {sampled} sampled",
        "turns": str(len(episode.turns)),
        "ended": f"{episode.stop_reason}, {episode.outcome}",
        "reward": "none" if score is None else f"{score.reward:.3f}",
    }
    if episode.failure is not None:
        rows["failure"] = f"{episode.failure.cause}: {episode.failure.detail}"
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return Panel(table, title=Text(episode.id), title_align="left")


def _turn(turn: Turn) -> Iterator[RenderableType]:
    yield _message(turn.message, title=f"assistant, turn {turn.index} ({turn.finish_reason})")
    if turn.parse_error:
        yield Panel(Text(turn.parse_error), title="could not be read as a tool call", title_align="left", border_style="red")
    for observation in turn.observations:
        yield _message(observation)


def _message(message: Message, *, title: str | None = None) -> RenderableType:
    style = STYLE[message.role]
    text = Text(_clip(message.content))
    for call in message.tool_calls:
        text.append(f"\n-> {call.name}({_clip(call.arguments)})", style="bold")
    failed = message.role == "tool" and _is_error(message.content)
    label = title or (f"tool {message.name}" if message.role == "tool" and message.name else message.role)
    label = f"{label}: error" if failed else label
    return Panel(text, title=Text(label), title_align="left", border_style="red" if failed else style)


def _is_error(content: str) -> bool:
    try:
        answer = json.loads(content)
    except ValueError:
        return content.lower().startswith("error")
    return isinstance(answer, dict) and (answer.get("status") == "error" or bool(answer.get("error")))


def _verdict(verdict: Verdict | None) -> RenderableType:
    if verdict is None:
        return Text("not verified", style="red")
    table = Table(title=f"verdict of {verdict.verifier} (trust: {verdict.trust})", title_justify="left", expand=True)
    for column in ("test", "passed", "message"):
        table.add_column(column)
    for check in verdict.checks:
        table.add_row(Text(check.id), Text("yes", "green") if check.passed else Text("no", "red"), Text(_clip(check.message)))
    parts: list[RenderableType] = [table]
    if verdict.tampering:
        parts.append(Text(f"tampering: {verdict.tampering}", style="bold red"))
    if verdict.evidence:
        parts.append(Panel(Text(_clip(verdict.evidence)), title="evidence", title_align="left"))
    return Group(*parts)


def _score(score: Score | None) -> RenderableType:
    table = Table(title="reward", title_justify="left")
    table.add_column("component")
    table.add_column("value", justify="right")
    if score is None:
        table.add_row("none", "infrastructure failure: out of the group's baseline")
        return table
    for name, value in score.components.items():
        table.add_row(Text(name), f"{value:.3f}")
    table.add_row("reward", f"{score.reward:.3f}", style="bold")
    return table


def _clip(text: str) -> str:
    return (
        text
        if len(text) <= LONGEST
        else f"{text[: LONGEST // 2]}\n[... {len(text) - LONGEST} characters ...]\n{text[-LONGEST // 2 :]}"
    )
