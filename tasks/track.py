"""Track: ledger events -> experiment tracking and people's eyes. It watches a campaign and never holds it up.

`CampaignWatch.on_event` takes the events of one advance as they are written, builds the iteration's report when its version is
published, and hands it to the tracker in a background thread; `close` waits for what is queued. A version that beats every
earlier mean held-out reward is registered as a candidate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from data_contracts.config import CampaignConfig
from data_contracts.ledger import CampaignState
from data_contracts.ledger_events import Entry, Evaluated, Published, Sealed
from data_contracts.protocols import Store, Tracker
from data_contracts.records import EvalReport
from tasks.evaluate import read_report
from tasks.report import IterationReport, iteration_report

_LOG = logging.getLogger(__name__)
OnReport = Callable[[int, IterationReport], None]
OnEvaluation = Callable[[EvalReport], None]


@dataclass(kw_only=True)
class CampaignWatch:
    """One instance an advance. `started` maps an iteration to the Unix second at which it could begin: the batch before it
    sealed, its policy published and, where the rollout waits for that, evaluated. Curating and whatever else happens before
    the first token count as overhead. An iteration whose batch an earlier advance sealed has no start."""

    config: CampaignConfig
    store: Store
    tracker: Tracker
    on_report: OnReport = lambda iteration, report: None
    on_evaluation: OnEvaluation = lambda report: None
    started: dict[int, float] = field(default_factory=dict)
    reports: dict[int, IterationReport] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    _moment: float = 0.0
    _background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="tracking"))

    def __post_init__(self) -> None:
        self._moment = self.clock()

    def on_event(self, entry: Entry, state: CampaignState) -> None:
        """`tasks.campaign.OnEvent`: called once an event, in order."""
        event, now = entry.event, self.clock()
        if isinstance(event, Sealed):
            self.started[event.iteration] = self._moment
        if isinstance(event, Published) and event.version > 0:
            self._queue(self._report_iteration, event.version - 1, state, now)
        if isinstance(event, Evaluated):
            self._queue(self._report_evaluation, event, state)
        if isinstance(event, Sealed | Published) or (isinstance(event, Evaluated) and not state.max_staleness):
            self._moment = now

    def close(self) -> None:
        """Wait for everything queued."""
        self._background.shutdown(wait=True)

    def _queue(self, work: Callable[..., None], *arguments: Any) -> None:
        self._background.submit(self._guarded, work, *arguments)

    @staticmethod
    def _guarded(work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception:  # noqa: BLE001  (monitoring never stops training, rule 10; it is reported instead)
            _LOG.exception("a report of the campaign could not be made; training goes on")

    def _report_iteration(self, iteration: int, state: CampaignState, finished: float) -> None:
        sealed = state.sealed[iteration]
        report = iteration_report(
            sealed.episodes,
            state.trained[iteration].result,
            state.published[iteration + 1].result,
            store=self.store,
            started=self.started.get(iteration),
            finished=finished,
        )
        self.reports[iteration] = report
        self.on_report(iteration, report)
        self.tracker.log_iteration(
            iteration,
            metrics=report.metrics,
            per_domain=report.per_domain,
            datasets={
                state.curated[iteration].problems.uri: state.curated[iteration].problems.sha256,
                sealed.episodes.uri: sealed.episodes.sha256,
                state.scored[iteration].scores.uri: state.scored[iteration].scores.sha256,
            },
            artifacts={},
        )
        self.tracker.log_episodes(iteration, sealed.episodes, store=self.store, sample=self.config.track.traces_per_iteration)

    def _report_evaluation(self, event: Evaluated, state: CampaignState) -> None:
        report = read_report(self.store, event.report)
        self.on_evaluation(report)
        self.tracker.log_evaluation(report, step=event.version)
        if event.version > 0 and _overall(event) > max(
            (_overall(other) for version, other in state.evaluated.items() if version < event.version), default=-1.0
        ):
            self.tracker.register_candidate(state.checkpoint(event.version), report=report)


def _overall(event: Evaluated) -> float:
    """Mean of the domains' held-out means."""
    return sum(event.means.values()) / len(event.means) if event.means else 0.0
