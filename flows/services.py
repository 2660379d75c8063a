"""What an advance works with, opened from a profile: the bound stages, the tracker, the base checkpoint.

Heavy imports happen when a part is opened; nothing is contacted before it is used, but for the Dask scheduler. The words
"scripted:POLICY", "fake" and "local" (flows/stack.py) open shipped stand-ins.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_contracts.config import Profile
from data_contracts.protocols import Engine, Store, Tracker, Trainer
from data_contracts.records import CheckpointRef
from flows.stack import FAKE, LOCAL, SCRIPTED, Addresses

if TYPE_CHECKING:
    from tasks.group_pool import GroupPool
    from tasks.rollout import OnWait
    from tasks.runtime import WorkerSpec
    from tasks.stages import LoopStages, OnProgress

_LOG = logging.getLogger("prefect.bessemer")


@dataclass(frozen=True, kw_only=True)
class Services:
    """Opened once an advance."""

    stages: LoopStages
    tracker: Tracker
    store: Store
    model_folder: Path

    def base(self) -> CheckpointRef:
        """Policy version 0, imported into the campaign's store by the first caller."""
        from models.training.checkpoint import import_base

        return import_base(self.model_folder, store=self.store, campaign=self.stages.campaign)


@contextmanager
def open_services(
    profile: Profile,
    campaign: str,
    addresses: Addresses,
    *,
    store: Store,
    on_progress: OnProgress,
    on_wait: OnWait = _LOG.warning,
) -> Iterator[Services]:
    """Everything one advance of `campaign` needs; closed at the end of the block."""
    from infra.paths import home
    from infra.tracking import open_tracker
    from models.base_model import resolve
    from tasks.stages import LoopStages

    folder = resolve(profile.campaign.base_model)
    trainer = _trainer(profile, addresses, store)
    stages = LoopStages(
        campaign=campaign,
        config=profile.campaign,
        store=store,
        engine=_engine(profile, addresses, store, trainer),
        trainer=trainer,
        open_pool=lambda: closing(_pool(addresses.dask)),
        worker=_worker(profile, campaign, addresses, store, folder),
        docs_folder=docs_folder(campaign),
        on_progress=on_progress,
        on_wait=on_wait,
    )
    tracker = open_tracker(addresses.mlflow, profile.campaign.track, home())
    with closing(stages):
        yield Services(stages=stages, tracker=tracker, store=store, model_folder=folder)


def docs_folder(campaign: str) -> Path:
    """Data Docs are pages for a browser on this machine, so they lie in the state folder, not in the store."""
    from infra.paths import home

    return home() / "docs" / campaign


def _pool(address: str) -> GroupPool:
    from tasks.group_pool import DaskPool, LocalPool

    return LocalPool() if address == LOCAL else DaskPool(address)


def _worker(profile: Profile, campaign: str, addresses: Addresses, store: Store, folder: Path) -> WorkerSpec:
    from tasks.runtime import SamplerSpec, WorkerSpec

    first = addresses.engines[0]
    sampler = (
        SamplerSpec(kind="scripted", policy=first.removeprefix(SCRIPTED))
        if first.startswith(SCRIPTED)
        else SamplerSpec(addresses=addresses.engines)
    )
    return WorkerSpec(
        store_url=store.root,
        model_folder=str(folder),
        campaign=campaign,
        sampler=sampler,
        sandbox=profile.stack.sandbox.model_dump_json(),
        reward=profile.campaign.reward.model_dump_json(),
        max_model_len=profile.stack.engine.max_model_len,
        max_num_seqs=profile.stack.engine.max_num_seqs,
    )


def _trainer(profile: Profile, addresses: Addresses, store: Store) -> Trainer:
    if addresses.trainer == FAKE:
        from models.training.fake import FakeTrainer

        return FakeTrainer(store)
    from models.training.client import HttpTrainer

    return HttpTrainer(addresses.trainer, seconds=profile.campaign.train.seconds)


def _engine(profile: Profile, addresses: Addresses, store: Store, trainer: Trainer) -> Engine:
    if addresses.engines[0].startswith(SCRIPTED):
        from models.serving.fake_engine import FakeEngine

        return FakeEngine()
    from models.serving.vllm_engine import VllmEngine

    return VllmEngine(
        addresses.engines,
        store=store,
        trainer=trainer,
        config=profile.campaign.publish,
        dtype=profile.stack.engine.dtype,
    )
