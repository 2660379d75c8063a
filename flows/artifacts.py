"""What people see in Prefect besides states: a progress bar per stage, a table per iteration, a report with the reward curve.

Artifacts are a projection of the ledger for people and are never read back. The rendering is pure; `Progress` and `publish_*`
are the thin edge that talks to Prefect. Keys are lower-case letters, digits and dashes, as Prefect asks.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from data_contracts.ledger import CampaignState

BARS = "▁▂▃▄▅▆▇█"


def key(*parts: str) -> str:
    """An artifact key from any text."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def sparkline(values: Sequence[float]) -> str:
    """Values in [0, 1] as block characters; others are clipped."""
    return "".join(BARS[round(min(max(value, 0.0), 1.0) * (len(BARS) - 1))] for value in values)


def heldout_rows(state: CampaignState) -> list[dict[str, Any]]:
    """One row an evaluated version: version, then the held-out mean reward of every domain."""
    return [{"version": version, **event.means} for version, event in sorted(state.evaluated.items())]


def iteration_rows(state: CampaignState, metrics: Mapping[int, Mapping[str, float]]) -> list[dict[str, Any]]:
    """One row an iteration that was trained, newest last. `metrics` is what this flow run measured, by iteration."""
    rows = []
    for iteration, event in sorted(state.trained.items()):
        known = {**event.result.metrics, **metrics.get(iteration, {})}
        rows.append(
            {
                "iteration": iteration,
                "version": event.result.checkpoint.version,
                "outcome": event.result.outcome,
                **{name: round(value, 5) for name, value in sorted(known.items())},
                **{f"heldout {name}": round(value, 4) for name, value in _means(state, iteration + 1).items()},
            }
        )
    return rows


def _means(state: CampaignState, version: int) -> dict[str, float]:
    event = state.evaluated.get(version)
    return event.means if event is not None else {}


def report(state: CampaignState, *, links: Mapping[str, str], curve_png: bytes | None = None, note: str = "") -> str:
    """Markdown: how far the campaign is, held-out rewards by version, the curve, and links to MLflow and Data Docs."""
    lines = [
        f"# Campaign {state.campaign}",
        "",
        f"{len(state.trained)} of {state.iterations} iterations trained; version {state.serving} serves."
        if state.serving is not None
        else f"{len(state.trained)} of {state.iterations} iterations trained; nothing serves yet.",
        *(["", f"**{note}**"] if note else []),
        *(["", f"**Paused:** {state.paused.reason}"] if state.paused else []),
        "",
        "## Held-out reward",
        "",
    ]
    rows = heldout_rows(state)
    domains = sorted({name for row in rows for name in row if name != "version"})
    if rows:
        lines += ["| version | " + " | ".join(domains) + " |", "|---" * (len(domains) + 1) + "|"]
        lines += [f"| {row['version']} | " + " | ".join(_cell(row.get(name)) for name in domains) + " |" for row in rows]
        lines += ["", *(f"- `{sparkline([row[name] for row in rows if name in row])}` {name}" for name in domains)]
    else:
        lines.append("No version was evaluated yet.")
    if curve_png:
        lines += ["", f"![reward over iterations](data:image/png;base64,{base64.b64encode(curve_png).decode()})"]
    if links:
        lines += ["", "## Links", "", *(f"- [{name}]({target})" for name, target in sorted(links.items()))]
    return "\n".join(lines) + "\n"


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


class Progress:
    """One progress artifact. `set` returns at once: `send` runs actions one after another in another thread, and a value that
    is overtaken before it was sent is never sent, so a slow server does not hold up a stage."""

    def __init__(self, name: str, description: str, *, send: Callable[[Callable[[], None]], None]) -> None:
        self.done = 0
        self._send, self._name, self._description = send, name, description
        self._id: UUID | None = None
        self._wanted, self._shown, self._queued = 0.0, -1.0, False

    def set(self, done: int, wanted: int) -> None:
        self.done = done
        self._wanted = 100.0 if wanted <= 0 else min(100.0, float(100 * done // wanted))
        if not self._queued and self._wanted != self._shown:
            self._queued = True
            self._send(self._update)

    def _update(self) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        self._queued = False
        self._shown = value = self._wanted
        if self._id is None:
            self._id = _now(create_progress_artifact(progress=value, key=self._name, description=self._description))
        else:
            _now(update_progress_artifact(self._id, progress=value))


def publish_table(state: CampaignState, iteration: int, metrics: Mapping[int, Mapping[str, float]]) -> None:
    """The table of all iterations so far; one version of the same key an iteration, so the UI keeps the history."""
    from prefect.artifacts import create_table_artifact

    rows = iteration_rows(state, metrics)
    _now(create_table_artifact(table=rows, key=key(state.campaign, "iterations"), description=f"After iteration {iteration}"))


def publish_report(state: CampaignState, text: str) -> None:
    from prefect.artifacts import create_markdown_artifact

    _now(create_markdown_artifact(markdown=text, key=key(state.campaign, "report"), description=f"Campaign {state.campaign}"))


def _now(answer: Any) -> Any:
    """Prefect's artifact functions answer at once in synchronous code; their types also allow a coroutine."""
    return answer
