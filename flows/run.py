"""`bessemer run` and `resume`: an advance in this process, through the same Prefect flow, with a live view in the terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from data_contracts.config import Profile
from data_contracts.errors import BessemerError
from data_contracts.ledger import CampaignState
from data_contracts.ledger_events import Entry, Evaluated, Published, Trained
from data_contracts.profiles import load_profile
from flows.overview import heldout_gains, store_url
from infra.store import open_store
from infra.supervisor import ProcessState

if TYPE_CHECKING:
    from tasks.report import IterationReport


@dataclass
class View:
    """What the terminal shows. Lines that stay are printed above; the live part is the current stage and the links."""

    console: Console
    campaign: str
    started: float = field(default_factory=time.monotonic)
    stage: str = "starting"
    done: int = 0
    wanted: int = 0
    tokens: int = 0
    links: dict[str, str] = field(default_factory=dict)

    def line(self, text: str) -> None:
        self.console.print(f"{time.monotonic() - self.started:7.1f} s  {text}", soft_wrap=True, markup=False)

    def on_process(self, process: ProcessState) -> None:
        detail = f" ({process.detail})" if process.detail else ""
        self.line(f"{process.name}: {process.state}{detail}")

    def on_links(self, links: dict[str, str]) -> None:
        self.links = links

    def on_progress(self, stage: str, done: int, wanted: int, tokens: int) -> None:
        self.stage, self.done, self.wanted, self.tokens = stage, done, wanted, tokens

    def on_event(self, entry: Entry, state: CampaignState) -> None:
        event = entry.event
        name = type(event).__name__.lower()
        self.stage, self.done, self.wanted = f"after {name}", 0, 0
        if isinstance(event, Evaluated):
            means = ", ".join(f"{domain} {mean:.3f}" for domain, mean in sorted(event.means.items()))
            self.line(f"held-out reward of version {event.version}: {means}")
        elif isinstance(event, Trained):
            shown = {
                key: event.result.metrics[key] for key in ("loss", "kl", "entropy", "grad_norm") if key in event.result.metrics
            }
            figures = ", ".join(f"{key} {value:.4g}" for key, value in shown.items())
            self.line(f"iteration {event.iteration} {event.result.outcome}: {figures}")
        elif isinstance(event, Published):
            accepted = sum(proof.accepted for proof in event.result.proofs)
            self.line(f"version {event.version} serves, proven on {accepted} of {len(event.result.proofs)} replicas")

    def on_report(self, iteration: int, report: IterationReport) -> None:
        rewards = {name: figures["mean_reward"] for name, figures in report.per_domain.items() if "mean_reward" in figures}
        shown = ", ".join(f"{name} {value:.3f}" for name, value in sorted(rewards.items()))
        self.line(f"training reward of iteration {iteration}: {shown or 'no groups'}")

    def __rich__(self) -> RenderableType:
        progress = f"{self.done}/{self.wanted} groups, {self.tokens} tokens" if self.wanted else ""
        head = Text(f"{time.monotonic() - self.started:7.1f} s  {self.campaign}: {self.stage} {progress}", style="bold")
        return Group(head, *(Text(f"           {name}: {url}", overflow="fold") for name, url in sorted(self.links.items())))


def run_here(profile_name: str, campaign: str, *, iterations: int | None, overrides: Sequence[str], console: Console) -> None:
    """Bring the stack up when needed, advance the campaign, print what it gained and where to look. Raises BessemerError."""
    from infra import prefect_server
    from infra.ledger_log import check_campaign_name
    from infra.paths import home

    check_campaign_name(campaign)
    profile = load_profile(profile_name, overrides)
    view = View(console=console, campaign=campaign)
    from flows.stack import ensure

    places = ensure(profile, on_change=view.on_process)
    prefect_server.use(home(), api_url=places.prefect_api, heartbeat_seconds=profile.stack.heartbeat_seconds)
    if not os.environ.get("BESSEMER_DEBUG"):  # Prefect's own lines go to its server; the terminal shows ours
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    final, error = _advance(profile_name, campaign, iterations, list(overrides), view)
    if isinstance(error, BessemerError):
        raise error
    if not final.is_completed():
        final.result()  # raises what went wrong, with its traceback
    _summary(view, profile, console)


def _advance(
    profile_name: str, campaign: str, iterations: int | None, overrides: list[str], view: View
) -> tuple[Any, BaseException | None]:
    from flows.campaign import Watcher, advance, watching

    watcher = Watcher(
        on_event=view.on_event,
        on_progress=view.on_progress,
        on_report=view.on_report,
        on_links=view.on_links,
        on_wait=view.line,
    )
    live = Live(view, console=view.console, refresh_per_second=4, transient=True)
    with watching(watcher), live if view.console.is_terminal else _Plain():
        final = advance(
            profile=profile_name,
            campaign=campaign,
            iterations=iterations,
            overrides=overrides,
            return_state=True,
        )
    return final, watcher.error


class _Plain:
    """No live part when the output is not a terminal: the lines are enough."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _summary(view: View, profile: Profile, console: Console) -> None:
    """Held-out reward of the base model and of the newest evaluated version, paired by problem; then where to look."""
    store = open_store(store_url(profile.stack.store))
    gains = heldout_gains(store, view.campaign)
    if gains:
        before, after, rows = gains
        title = f"held-out mean reward, version {before} -> version {after} (95 % bootstrap interval of the difference)"
        table = Table(box=None, pad_edge=False, title=title, title_justify="left")
        for column in ("domain", "problems", "before", "after", "difference", "interval"):
            table.add_column(column, justify="left" if column == "domain" else "right")
        for row in rows:
            interval = f"[{row.low:+.3f}, {row.high:+.3f}]"
            figures = (f"{row.before:.3f}", f"{row.after:.3f}", f"{row.difference:+.3f}", Text(interval))
            table.add_row(row.domain, str(row.problems), *figures)
        console.print(table)
    for name, url in sorted(view.links.items()):
        console.print(f"{name}: {url}", soft_wrap=True, markup=False)
