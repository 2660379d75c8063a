"""What the bound stages refuse before anything runs, and how a campaign goes on after a quarantine."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from data_contracts import gate
from data_contracts.config import RewardConfig
from data_contracts.errors import ConfigError, ContractError
from data_contracts.protocols import Codec
from data_contracts.records import SampleRequest, SampleResult
from data_contracts.tables import read_manifest
from infra.store import LocalStore, MemoryStore
from models.serving.fake_engine import FakeEngine
from models.training.fake import FakeTrainer, fake_base
from tasks import runtime
from tasks.campaign import advance, open_or_create
from tasks.runtime import SamplerSpec, WorkerSpec
from tasks.stages import LoopStages
from tests.tasks.campaign_fakes import config
from tests.tasks.campaign_real_stages import DigestSampler, make, no_docs, settings


def test_an_unknown_reward_component_is_refused_before_a_rollout(tmp_path: Path):
    store = MemoryStore()
    worker = WorkerSpec(
        store_url=store.root, model_folder="", campaign="c", sampler=SamplerSpec(), sandbox="{}", reward="{}", max_model_len=64
    )
    with pytest.raises(ConfigError, match=r"unknown reward component 'verdikt'"):
        LoopStages(
            campaign="c",
            config=config().model_copy(update={"reward": RewardConfig(weights={"verdikt": 1.0})}),
            store=store,
            engine=FakeEngine(),
            trainer=FakeTrainer(store),
            open_pool=lambda: pytest.fail("nothing may start"),
            worker=worker,
            docs_folder=tmp_path,
        )


class Broken(DigestSampler):
    """An engine that answers NaN for one group of the named table."""

    def __init__(self, codec: Codec, table: str) -> None:
        super().__init__(codec, d=0)
        self._table = table

    async def sample(self, request: SampleRequest, *, deadline_seconds: float) -> SampleResult:
        result = await super().sample(request, deadline_seconds=deadline_seconds)
        broken = f"/{self._table}/0000-" in request.session
        return msgspec.structs.replace(result, logprobs=(math.nan,)) if broken else result


@pytest.mark.parametrize("table", ["iterations/000000", "evaluations/v000000"])
def test_a_quarantine_that_stops_the_campaign_does_not_stop_it_for_ever(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gate, "warm", lambda: None)
    monkeypatch.setattr(gate, "check_batch", no_docs)
    store = LocalStore(tmp_path / "store")
    log = open_or_create(store, "c", settings(0), lambda: fake_base(store, "c"))

    def go(sampler: type[DigestSampler], argument: object):
        monkeypatch.setattr(runtime, "_open_sampler", lambda spec, *, codec: sampler(codec, argument))
        with closing(make(store, settings(0), tmp_path / "unused")) as stages:
            return advance(log, stages, until=1)

    with pytest.raises(ContractError, match=r"of \d+ groups break their contract"):
        go(Broken, table)
    assert log.state().paused is not None
    kept = store.list("campaigns/c/quarantine")
    assert len(kept) == 2, "the broken group and its reasons"
    state = go(DigestSampler, 0)
    assert len(state.trained) == 1
    assert not [s for s in read_manifest(store, state.sealed[0].episodes).discarded if s.disposition == "quarantined"]
    assert store.list("campaigns/c/quarantine") == kept
