"""The flow `advance`: a lease to bring a campaign further. Cron, `bessemer run`, `resume` and the UI's button are this call.

No retries and no caching: calling it again is the resume, and the ledger alone says where to go on (Prefect names a subflow
by its call order, so a retried parent would write one iteration into another's record). A campaign that another run holds ends
this run as Cancelled with the holder's name, which is no failure.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any

from prefect import flow, tags
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled
from pydantic import Field

from data_contracts.errors import BessemerError, CampaignHeld
from data_contracts.ledger import CampaignState
from data_contracts.ledger_events import Entry
from data_contracts.profiles import load_profile

TAG = "bessemer"
HELD = "Held"
_LOG = logging.getLogger("prefect.bessemer")


@dataclass
class Watcher:
    """How the CLI, in the same process, looks into a running advance. `error` is what ended it."""

    on_event: Callable[[Entry, CampaignState], None] = lambda entry, state: None
    on_progress: Callable[[str, int, int, int], None] = lambda stage, done, wanted, tokens: None
    on_report: Callable[[int, Any], None] = lambda iteration, report: None
    on_links: Callable[[dict[str, str]], None] = lambda links: None
    on_wait: Callable[[str], None] = lambda message: None
    error: BaseException | None = None


_watcher: ContextVar[Watcher | None] = ContextVar("bessemer_watcher", default=None)


@contextmanager
def watching(watcher: Watcher) -> Iterator[Watcher]:
    token = _watcher.set(watcher)
    try:
        yield watcher
    finally:
        _watcher.reset(token)


@flow(
    name="advance",
    flow_run_name="{campaign}",
    retries=0,
    persist_result=False,
    description="Advance a campaign by some iterations; running it again resumes where its ledger ends.",
)
def advance(
    profile: str,
    campaign: str,
    iterations: Annotated[int | None, Field(ge=1)] = None,
    base_model: str | None = None,
    groups: Annotated[int | None, Field(ge=1)] = None,
    group_size: Annotated[int | None, Field(ge=1)] = None,
    temperature: Annotated[float | None, Field(ge=0)] = None,
    learning_rate: Annotated[float | None, Field(gt=0)] = None,
    kl_coef: Annotated[float | None, Field(ge=0)] = None,
    max_staleness: Annotated[int | None, Field(ge=0)] = None,
    evaluate_every: Annotated[int | None, Field(ge=1)] = None,
    seed: int | None = None,
    overrides: list[str] | None = None,
) -> State[Any] | dict[str, Any]:
    """Every empty field leaves the profile's value. The campaign keeps the configuration it was created with.

    Args:
        profile: Name of a run profile (flows/profiles) or path to a YAML file
        campaign: Campaign to advance; a new name starts a new campaign
        iterations: Iterations to add; empty means up to the profile's number
        base_model: tiny, smollm2-135m, a local path or a Hugging Face id
        groups: Graded groups (problems) one iteration trains on
        group_size: Episodes per problem
        temperature: Sampling temperature of training rollouts
        learning_rate: AdamW learning rate
        kl_coef: Weight of the KL penalty to the base model
        max_staleness: Iterations rolled out while one trains; 0 is strictly on-policy
        evaluate_every: Evaluate held-out problems every so many iterations
        seed: Root of every generator's seed
        overrides: Further values, each dotted.path=value
    """
    fields = {
        "base_model": base_model,
        "curate.groups": groups,
        "rollout.group_size": group_size,
        "rollout.temperature": temperature,
        "train.learning_rate": learning_rate,
        "algorithm.kl_coef": kl_coef,
        "max_staleness": max_staleness,
        "evaluate.every": evaluate_every,
        "seed": seed,
    }
    chosen = [f"{path}={json.dumps(value)}" for path, value in fields.items() if value is not None]
    chosen += overrides or []
    watcher = _watcher.get() or Watcher()
    try:
        with tags(TAG, f"campaign:{campaign}"):
            return _advance(profile, campaign, iterations, chosen, watcher)
    except CampaignHeld as error:
        watcher.error = error
        _LOG.warning("%s", error)
        return Cancelled(name=HELD, message=str(error))
    except BessemerError as error:
        watcher.error = error
        raise


def _advance(
    profile_name: str, campaign: str, iterations: int | None, overrides: list[str], watcher: Watcher
) -> dict[str, Any]:
    from flows.observe import Observer
    from flows.overview import Origin, remember_origin, store_url
    from flows.services import open_services
    from flows.stack import addresses
    from flows.stages import PrefectStages
    from infra.ledger_log import this_process
    from infra.store import open_store
    from tasks.campaign import advance as drive
    from tasks.campaign import open_or_create
    from tasks.track import CampaignWatch

    profile = load_profile(profile_name, overrides)
    places = addresses(profile)
    store = open_store(store_url(profile.stack.store))
    observer = Observer(campaign=campaign, watcher=watcher)
    with open_services(
        profile, campaign, places, store=store, on_progress=observer.on_progress, on_wait=observer.on_wait
    ) as services:
        log = open_or_create(store, campaign, profile.campaign, services.base)
        remember_origin(store, campaign, Origin(profile=profile_name, overrides=tuple(overrides)))
        state = log.state()
        tracker = services.tracker
        watch = CampaignWatch(
            config=profile.campaign,
            store=store,
            tracker=tracker,
            on_report=observer.on_report,
            on_evaluation=observer.on_evaluation,
        )
        tracker.start_campaign(campaign, config=profile.campaign.model_dump(mode="json"), resumed=bool(state.curated))
        observer.begin(services, state)
        status = "FAILED"
        try:
            state = drive(
                log,
                PrefectStages(services.stages),
                until=None if iterations is None else len(state.trained) + iterations,
                holder=this_process(str(flow_run.name or "advance")),
                run_iteration=observer.run_iteration,
                on_event=observer.on_event(watch),
            )
            status = "FINISHED"
        except CampaignHeld:
            status = ""  # the run in the tracker is the holder's
            raise
        finally:
            watch.close()
            if status:
                tracker.finish_campaign(status)
                observer.end(log.known, status.lower())
    return {"campaign": campaign, "iterations": len(state.trained), "serving": state.serving}
