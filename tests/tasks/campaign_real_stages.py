"""The shipped stages over fakes and recorded tokens, for the crash tests: real rollout, grading, scoring, contracts and keys.

`python -m tests.tasks.campaign_real_stages ROOT D ledger|any` records a campaign with a sampler that draws tokens from digests,
then runs `crash_everywhere` on a replay of that recording and prints its report. Left out is what makes no table: Data Docs.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

from data_contracts import gate
from data_contracts.config import CampaignConfig, CurateConfig, DomainConfig, EvaluateConfig, RolloutConfig, SandboxConfig
from data_contracts.protocols import Codec, Store
from data_contracts.records import Message, SampleRequest, SampleResult, VersionSpan
from environments.registry import domain, verifier
from infra.store import LocalStore
from models.base_model import resolve
from models.codec import open_codec
from models.serving.fake_engine import FakeEngine
from models.serving.replay import RecordingSampler
from models.training.fake import FakeTrainer, fake_base
from tasks import runtime
from tasks.campaign import Stages
from tasks.group_pool import LocalPool
from tasks.runtime import SamplerSpec, WorkerSpec
from tasks.stages import LoopStages
from tests.tasks.campaign_fakes import crash_everywhere, forked, run_once, tables


def settings(d: int) -> CampaignConfig:
    return CampaignConfig(
        base_model="tiny",
        iterations=2,
        max_staleness=d,
        domains=[DomainConfig(name="echo", heldout=4)],
        curate=CurateConfig(groups=2, surplus=6),
        rollout=RolloutConfig(group_size=6, refill_budget=6),
        evaluate=EvaluateConfig(every=2),
    )


class DigestSampler:
    """Draws one of eight letters from a digest of the request, under the version that the schedule of staleness `d` names."""

    def __init__(self, codec: Codec, d: int) -> None:
        self._letters = [codec.encode_assistant(Message(role="assistant", content=letter))[0] for letter in "abcdefgh"]
        self._d = d

    async def sample(self, request: SampleRequest, *, deadline_seconds: float) -> SampleResult:
        digest = hashlib.sha256(f"{request.session} {request.token_ids}".encode()).digest()
        _, kind, number, *_ = request.session.split("/")
        version = max(0, int(number) - self._d) if kind == "iterations" else int(number.removeprefix("v"))
        return SampleResult(
            token_ids=(self._letters[digest[0] % 8],),
            logprobs=(-digest[1] / 64,),
            spans=(VersionSpan(start=0, stop=1, version=version),),
            finish_reason="length",
            engine="digest",
        )

    async def close(self) -> None:
        return None


@contextmanager
def pool():
    opened = LocalPool()
    try:
        yield opened
    finally:
        opened.close()


def make(store: Store, config: CampaignConfig, recording: Path) -> Stages:
    worker = WorkerSpec(
        store_url=store.root,
        model_folder=str(resolve("tiny")),
        campaign="c",
        sampler=SamplerSpec(kind="replay", recording=str(recording)),
        sandbox=SandboxConfig(backend="fake").model_dump_json(),
        reward=config.reward.model_dump_json(),
        max_model_len=256,
    )
    return LoopStages(
        campaign="c",
        config=config,
        store=store,
        engine=FakeEngine(clock=lambda: 0.0),
        trainer=FakeTrainer(store),
        open_pool=pool,
        worker=worker,
        docs_folder=Path(store.root).parent / "docs",
    )


def import_everything() -> None:
    """What a stage imports when it first runs, so that the forked children find it there. Starts no thread."""
    open_codec(resolve("tiny"))
    for name in ("environments.sandbox.fake", "models.serving.vllm_sampler", "pyarrow.dataset", "pandas"):
        importlib.import_module(name)
    domain("echo")
    verifier("exact_answer")


def no_docs(folder: object, *, run_name: str, **tables: object) -> gate.BatchReport:
    return gate.BatchReport(run_name=run_name, tables=(), page="", seconds=0.0)


def main(root: Path, d: int, *, ledger_only: bool) -> None:
    os.environ["BESSEMER_HOME"] = str(root / "home")
    import_everything()
    recording = root / "recorded.jsonl"

    def record(spec: WorkerSpec, *, codec: Codec) -> RecordingSampler:
        return RecordingSampler(DigestSampler(codec, d), recording)

    def fake(store: Store):
        return fake_base(store, "c")

    stages = partial(make, recording=recording)
    with mock.patch.object(gate, "warm"), mock.patch.object(gate, "check_batch", no_docs):
        with mock.patch.object(runtime, "_open_sampler", record):
            assert forked(lambda: run_once(LocalStore(root / "recorded"), settings(d), stages, fake)) == 0
        report = crash_everywhere(root, settings(d), ledger_only=ledger_only, make=stages, make_base=fake)
        report["as_recorded"] = tables(str(root / "recorded")) == tables(str(root / "whole"))
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), ledger_only=sys.argv[3] == "ledger")
