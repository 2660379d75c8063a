"""Serving without a server: command line, proof, versions, fakes, recordings."""

from __future__ import annotations

import math
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.config import EngineConfig, PublishConfig
from data_contracts.errors import InfraError, InputError, PublishRefused
from data_contracts.records import (
    CheckpointRef,
    Episode,
    Message,
    ReplicaProof,
    SampleRequest,
    SampleResult,
    Turn,
    VersionSpan,
)
from infra.processes import free_port
from infra.store import LocalStore
from models.serving.fake_engine import FakeEngine
from models.serving.proof import MEAN_TOLERANCE, judge, refused
from models.serving.reference import ReferenceScorer
from models.serving.replay import RecordingSampler, ReplaySampler
from models.serving.versions import cache_salt_of, label_of, version_of
from models.serving.vllm_command import vllm_command, wait_ready
from models.serving.vllm_engine import VllmEngine
from models.serving.vllm_sampler import VllmSampler

# -------------------------------------------------------------------------------------------------------------- command line


def test_the_command_line_keeps_the_replica_private_offline_and_exact() -> None:
    config = EngineConfig(kv_cache_gib=2, max_model_len=512, max_num_seqs=8, threads="0-1")
    argv, environment = vllm_command(config, "/models/m", port=8123)
    text = " ".join(argv)
    for part in (
        "-m vllm.entrypoints.openai.api_server",
        "--host 127.0.0.1 --port 8123",
        "--model /models/m",
        "--max-model-len 512",
        "--max-num-seqs 8",
        "--dtype float32",
        "--enable-scale-out",
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        "--enforce-eager",
    ):
        assert part in text
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert environment["DO_NOT_TRACK"] == environment["VLLM_NO_USAGE_STATS"] == environment["HF_HUB_OFFLINE"] == "1"
    assert vllm_command(config, "/models/m", port=8123) == (argv, environment)


def test_waiting_for_a_process_that_ended_stops_at_once() -> None:
    with pytest.raises(InfraError, match="ended before it was ready"):
        wait_ready(f"http://127.0.0.1:{free_port()}", deadline_seconds=60, alive=lambda: False)


def test_waiting_has_a_deadline() -> None:
    with pytest.raises(InfraError, match="not healthy within"):
        wait_ready(f"http://127.0.0.1:{free_port()}", deadline_seconds=0.3)


# --------------------------------------------------------------------------------------------------------------------- proof


def verdict(engine: list[float], new: list[float], old: list[float] | None, *, dtype: str = "float32"):  # type: ignore[no-untyped-def]
    return judge(engine, new, old, tolerance=1e-4, dtype=dtype, replica="r", version=3)


OLD = [-1.0, -2.0, -3.0]
NEW = [-1.1, -2.0, -2.9]


def test_an_engine_on_the_new_weights_is_accepted() -> None:
    proof = verdict([value + 1e-5 for value in NEW], NEW, OLD)
    assert proof.accepted
    assert not proof.checksum_only
    assert proof.distance_new == pytest.approx(1e-5)
    assert proof.step_distance == pytest.approx(0.1)


@pytest.mark.parametrize("engine", [OLD, [-1.1, -2.0, -3.0], [-1.1, -2.0, math.nan], [-1.1, -2.0, -math.inf], [-1.1], []])
def test_anything_else_is_refused_with_finite_figures(engine: list[float]) -> None:
    proof = verdict(engine, NEW, OLD)
    assert not proof.accepted
    assert proof.reason
    assert all(math.isfinite(value) for value in (proof.distance_new, proof.distance_old, proof.step_distance))


def test_a_step_below_tolerance_does_not_hide_behind_it() -> None:
    new = [value + 5e-5 for value in OLD]
    assert verdict(new, new, OLD).checksum_only
    assert "checksums" in verdict(new, new, OLD).reason


def test_a_stale_engine_within_tolerance_of_a_visible_step_is_refused() -> None:
    """16-bit: both means lie within the wide tolerance's reach, and the engine sits nearer the old weights."""
    old, new = [0.0] * 4, [0.03] * 4
    stale = [0.012] * 4
    proof = verdict(stale, new, old, dtype="bfloat16")
    assert proof.distance_new < MEAN_TOLERANCE
    assert not proof.accepted
    assert "old weights" in proof.reason


def test_version_0_needs_only_the_first_half() -> None:
    assert verdict(NEW, NEW, None).accepted
    assert not verdict(OLD, NEW, None).accepted


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=20), st.floats(2e-4, 1.0), st.floats(0, 9e-5))
def test_noise_below_tolerance_never_decides(old: list[float], step: float, noise: float) -> None:
    new = [value - step for value in old]
    assert verdict([value + noise for value in new], new, old).accepted
    assert not verdict([value - noise for value in old], new, old).accepted


# ------------------------------------------------------------------------------------------------------------------ versions


@given(st.from_regex(r"[a-z0-9@ /-]{1,20}", fullmatch=True), st.integers(0, 10**6))
def test_labels_belong_to_one_campaign(campaign: str, version: int) -> None:
    label = label_of(campaign, version)
    assert version_of(label, campaign=campaign) == version
    assert version_of(label, campaign=campaign + "x") is None
    assert version_of("proving:" + label, campaign=campaign) is None
    assert not set(cache_salt_of(label)) & set("@/\\")


@pytest.mark.parametrize("label", ["default", "a@", "a@-1", "a@1.5", "a", "", "@1"])
def test_other_labels_are_no_version(label: str) -> None:
    assert version_of(label, campaign="a") is None


def test_a_session_sticks_to_one_replica_and_sessions_spread() -> None:
    addresses = [f"http://h{index}" for index in range(4)]
    sampler = VllmSampler(addresses, campaign="c")
    chosen = [sampler.replica(f"episode-{index}") for index in range(400)]
    assert chosen == [sampler.replica(f"episode-{index}") for index in range(400)]
    assert all(60 < chosen.count(address) < 140 for address in addresses)


def test_a_sampler_without_replicas_is_an_outage() -> None:
    with pytest.raises(InfraError, match="no serving replica"):
        VllmSampler([], campaign="c")


# --------------------------------------------------------------------------------------------------------------------- fakes

CHECKPOINT = CheckpointRef(uri="c/v1", sha256="0" * 64, version=1, size=1)


def test_the_fake_engine_serves_and_refuses_as_told() -> None:
    engine = FakeEngine(refuse=[1])
    with pytest.raises(PublishRefused):
        engine.ensure_serving(CHECKPOINT, campaign="c", parent=None)
    assert engine.serving is None
    accepting = FakeEngine()
    result = accepting.ensure_serving(CHECKPOINT, campaign="c", parent=None)
    assert (result.version, result.proofs[0].accepted, accepting.serving) == (1, True, CHECKPOINT)


def test_two_stages_never_update_replicas_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With staleness a rollout and an evaluation run beside each other, and both may find that the engine restarted."""
    running, most = [], []

    def load(self: VllmEngine, address: str, *_: object, **__: object) -> ReplicaProof:
        running.append(address)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()
        return refused(address, 1, "as told")

    monkeypatch.setattr(VllmEngine, "_load", load)
    store = LocalStore(tmp_path)
    store.put("c/v1/config.json", b'{"vocab_size": 8}')
    engine = VllmEngine(["http://a"], store=store, trainer=ReferenceScorer(store), config=PublishConfig())
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(engine.ensure_serving, CHECKPOINT, campaign="c", parent=None) for _ in range(2)]
    assert [type(future.exception()) for future in both] == [PublishRefused] * 2
    assert most == [1, 1]


class Counting:
    """Answers token n to the n-th request."""

    def __init__(self) -> None:
        self.calls = 0

    async def sample(self, request: SampleRequest, *, deadline_seconds: float) -> SampleResult:
        self.calls += 1
        span = VersionSpan(start=0, stop=1, version=0)
        return SampleResult(token_ids=(self.calls,), logprobs=(-0.5,), spans=(span,), finish_reason="stop")

    async def close(self) -> None:
        return None


def asked(session: str, *ids: int) -> SampleRequest:
    return SampleRequest(request_id="r", session=session, token_ids=ids, max_tokens=4, temperature=1.0)


async def test_a_recording_answers_the_same_requests_with_the_same_tokens(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    recording = RecordingSampler(Counting(), path)
    requests = [asked("a", 1, 2), asked("b", 1, 2), asked("a", 1, 2, 3)]
    answers = [await recording.sample(request, deadline_seconds=1) for request in requests]
    await recording.close()
    replay = ReplaySampler.from_file(path)
    for request, answer in zip(reversed(requests), reversed(answers), strict=True):
        assert await replay.sample(request, deadline_seconds=1) == answer
    with pytest.raises(InputError, match="session 'c'"):
        await replay.sample(asked("c", 1), deadline_seconds=1)
    assert pickle.loads(pickle.dumps(replay))._samples == replay._samples


def test_a_broken_recording_names_file_and_row(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_bytes(b'{"session": 1}\n')
    with pytest.raises(InputError, match=r"recording\.jsonl, row 1"):
        ReplaySampler.from_file(path)


async def test_stored_episodes_replay_turn_by_turn() -> None:
    said = Message(role="assistant", content="x")
    episode = Episode(
        id="e",
        group_id="g",
        problem_id="p",
        domain="echo",
        split="train",
        campaign="c",
        iteration=0,
        member=0,
        prompt=(),
        tools=(),
        token_ids_T=(1, 2, 10, 11, 3, 12),
        loss_mask_T=(0, 0, 1, 1, 0, 1),
        logprobs_T=(0.0, 0.0, -0.1, -0.2, 0.0, -0.3),
        prompt_length=2,
        spans=(VersionSpan(start=2, stop=4, version=5), VersionSpan(start=5, stop=6, version=6)),
        turns=(
            Turn(index=0, message=said, token_start=2, token_stop=4, finish_reason="stop"),
            Turn(index=1, message=said, token_start=5, token_stop=6, finish_reason="length"),
        ),
        stop_reason="answered",
        outcome="scored",
    )
    replay = ReplaySampler.from_episodes([episode])
    first = await replay.sample(asked("e", 1, 2), deadline_seconds=1)
    second = await replay.sample(asked("e", 1, 2, 10, 11, 3), deadline_seconds=1)
    assert (first.token_ids, first.logprobs, first.spans) == (
        (10, 11),
        (-0.1, -0.2),
        (VersionSpan(start=0, stop=2, version=5),),
    )
    assert (second.token_ids, second.finish_reason) == ((12,), "length")
    assert second.spans == (VersionSpan(start=0, stop=1, version=6),)
