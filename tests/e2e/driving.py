"""A campaign driven without Prefect on the session's stack, through the services that the flow opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from data_contracts.config import Profile
from data_contracts.ledger import CampaignState
from data_contracts.ledger_events import Entry
from data_contracts.tables import read_episodes, read_manifest, read_problem_set, read_scores
from flows.services import Services, open_services
from infra.ledger_log import LedgerLog
from infra.store import LocalStore
from infra.tracking import NullTracker
from tasks.campaign import advance, open_or_create
from tasks.report import IterationReport
from tasks.track import CampaignWatch
from tests.plugins.stack import RunningStack


@dataclass
class Drive:
    """One advance after the other of one campaign, in this process. `reports` by iteration."""

    log: LedgerLog
    services: Services
    profile: Profile
    reports: dict[int, IterationReport] = field(default_factory=dict)

    def advance(self, until: int, *, on_event: Callable[[Entry, CampaignState], None] | None = None) -> CampaignState:
        watch = CampaignWatch(
            config=self.profile.campaign,
            store=self.services.store,
            tracker=NullTracker(),
            on_report=self.reports.__setitem__,
        )

        def seen(entry: Entry, state: CampaignState) -> None:
            watch.on_event(entry, state)
            if on_event is not None:
                on_event(entry, state)

        with closing(watch):
            return advance(self.log, self.services.stages, until=until, on_event=seen)


@contextmanager
def driving(stack: RunningStack, campaign: str, profile: Profile) -> Iterator[Drive]:
    """Needs BESSEMER_HOME at the stack's folder (fixture `stack`)."""
    with open_services(
        profile, campaign, stack.addresses, store=stack.store, on_progress=lambda stage, done, wanted, tokens: None
    ) as services:
        yield Drive(open_or_create(stack.store, campaign, profile.campaign, services.base), services, profile)


def check_intact(store: LocalStore, campaign: str, *, iterations: int) -> CampaignState:
    """Every iteration happened once and every table reads with the digest that the ledger names."""
    log = LedgerLog(store, campaign)
    done = [type(entry.event).__name__ for entry in log.read()]
    for name in ("Curated", "Sealed", "Scored", "Trained"):
        assert done.count(name) == iterations, (name, done)
    state = log.state()
    assert state.holder is None
    assert sorted(state.published) == list(range(iterations + 1))
    trained = [key for key in store.list(f"campaigns/{campaign}/training") if not key.endswith(".job.json")]
    assert len(trained) == iterations, trained
    for iteration in range(iterations):
        assert read_problem_set(store, state.curated[iteration].problems)
        manifest = read_manifest(store, state.sealed[iteration].episodes)
        episodes = read_episodes(store, state.sealed[iteration].episodes)
        scores = read_scores(store, state.scored[iteration].scores)
        assert [score.episode_id for score in scores] == [episode.id for episode in episodes]
        assert {span.version for episode in episodes for span in episode.spans} == {iteration}
        assert len({shard.problem_id for shard in manifest.shards}) == len(manifest.shards)
        assert state.trained[iteration].result.checkpoint.version == iteration + 1
    return state
