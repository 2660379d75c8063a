"""What people see while an advance runs: Prefect artifacts and the CLI's lines. Nothing here may stop the loop.

Tracking itself is tasks/track.py; this adds Prefect's side of it. A failure of Prefect's artifact API is logged and the run
goes on (rule 10). Artifacts of the campaign belong to the advance's flow run, progress bars to the task run of their stage.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx

from data_contracts.errors import BessemerError
from data_contracts.ledger import CampaignState
from data_contracts.ledger_events import Entry
from data_contracts.records import DomainEval, EvalReport
from flows import artifacts
from flows.iteration import Body, run_as_subflow

if TYPE_CHECKING:
    from flows.campaign import Watcher
    from flows.services import Services
    from tasks.report import IterationReport
    from tasks.track import CampaignWatch

_LOG = logging.getLogger("prefect.bessemer")


class Observer:
    """One advance's eyes. Methods may be called from the campaign's threads."""

    def __init__(self, *, campaign: str, watcher: Watcher) -> None:
        self._campaign, self._watcher = campaign, watcher
        self._services: Services | None = None
        self._state = CampaignState(campaign=campaign)
        self._reports: dict[int, IterationReport] = {}
        self._evaluations: dict[int, tuple[DomainEval, ...]] = {}
        self._bars: dict[str, artifacts.Progress] = {}
        self._context = contextvars.copy_context()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="progress")

    def begin(self, services: Services, state: CampaignState) -> None:
        """Called in the advance's flow run, before anything is driven."""
        self._services, self._state = services, state
        self._context = contextvars.copy_context()
        self._watcher.on_links(self.links())

    def links(self) -> dict[str, str]:
        """Pages for people, by name."""
        found: dict[str, str] = {}
        if self._services is not None:
            found |= self._services.tracker.links()
            if self._services.stages.data_docs:
                found["data_docs"] = f"file://{self._services.stages.data_docs}"
        return found | self._context.copy().run(_prefect_link)

    def on_progress(self, stage: str, done: int, wanted: int, tokens: int) -> None:
        self._watcher.on_progress(stage, done, wanted, tokens)
        self._bar(stage, done).set(done, wanted)

    def on_wait(self, message: str) -> None:
        """A stage waits for something that is away: to its own run's log, where people look, and to the CLI."""
        from prefect.exceptions import MissingContextError
        from prefect.logging import get_run_logger

        self._watcher.on_wait(message)
        try:
            get_run_logger().warning(message)
        except MissingContextError:
            _LOG.warning(message)

    def on_event(self, watch: CampaignWatch) -> Callable[[Entry, CampaignState], None]:
        """`tasks.campaign.OnEvent`: tracking first, then the CLI."""

        def seen(entry: Entry, state: CampaignState) -> None:
            self._state = state
            watch.on_event(entry, state)
            self._watcher.on_event(entry, state)

        return seen

    def run_iteration(self, iteration: int, body: Body) -> None:
        """`tasks.campaign.RunIteration`: the body in a subflow run."""
        run_as_subflow(self._campaign, iteration, body)

    def on_report(self, iteration: int, report: IterationReport) -> None:
        """From the tracking thread: the table and the report of the campaign so far."""
        self._reports[iteration] = report
        self._watcher.on_report(iteration, report)
        metrics = {number: found.metrics for number, found in self._reports.items()}
        state = self._state
        self._publish(lambda: artifacts.publish_table(state, iteration, metrics))
        self._publish(lambda: artifacts.publish_report(state, artifacts.report(state, links=self.links())))

    def on_evaluation(self, report: EvalReport) -> None:
        self._evaluations[report.version] = report.domains

    def end(self, state: CampaignState, status: str) -> None:
        """The last report of this run, with the reward curve. `status` is how it ended, for people."""
        self._sender.shutdown(wait=True)
        text = artifacts.report(state, links=self.links(), curve_png=self._curve(state), note=f"This run ended: {status}.")
        self._publish(lambda: artifacts.publish_report(state, text))
        self._watcher.on_links(self.links())

    def _publish(self, action: Callable[[], None]) -> None:
        """In the advance's flow run, whatever thread this is."""
        self._context.copy().run(_quietly, action)

    def _bar(self, stage: str, done: int) -> artifacts.Progress:
        if stage not in self._bars or done < self._bars[stage].done:
            context = contextvars.copy_context()  # the stage's task run: the artifact belongs to it

            def send(action: Callable[[], None]) -> None:
                self._sender.submit(context.copy().run, _quietly, action)

            name = artifacts.key(self._campaign, stage)
            self._bars[stage] = artifacts.Progress(name, f"{stage}: groups graded", send=send)
        return self._bars[stage]

    def _curve(self, state: CampaignState) -> bytes | None:
        if not state.evaluated:
            return None
        from infra.tracking import plots

        training = [
            {"iteration": iteration, "domain": domain, "mean_reward": figures["mean_reward"]}
            for iteration, report in self._reports.items()
            for domain, figures in report.per_domain.items()
            if "mean_reward" in figures
        ]
        return plots.over_iterations(training, self._heldout(state))

    def _heldout(self, state: CampaignState) -> list[dict[str, Any]]:
        """With intervals where this run evaluated, else the ledger's means alone."""
        rows: list[dict[str, Any]] = []
        for version, event in sorted(state.evaluated.items()):
            known = {found.domain: found for found in self._evaluations.get(version, ())}
            for domain, mean in event.means.items():
                low, high = (known[domain].low, known[domain].high) if domain in known else (mean, mean)
                rows.append({"version": version, "domain": domain, "mean_reward": mean, "low": low, "high": high})
        return rows


def _prefect_link() -> dict[str, str]:
    from prefect.runtime import flow_run

    url: Any = flow_run.ui_url
    return {"prefect_run": str(url)} if url else {}


def _quietly(action: Callable[[], None]) -> None:
    """Monitoring never stops training: what Prefect's API refuses or cannot answer is a line in the log."""
    from prefect.exceptions import PrefectException

    try:
        action()
    except (httpx.HTTPError, PrefectException, OSError, ValueError, BessemerError) as error:
        _LOG.warning("an artifact was not written: %s", error)
