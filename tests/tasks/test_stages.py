"""What the bound stages refuse before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_contracts.config import RewardConfig
from data_contracts.errors import ConfigError
from infra.store import MemoryStore
from models.serving.fake_engine import FakeEngine
from models.training.fake import FakeTrainer
from tasks.runtime import SamplerSpec, WorkerSpec
from tasks.stages import LoopStages
from tests.tasks.campaign_fakes import config


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
