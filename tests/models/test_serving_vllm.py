"""Sampler and engine against a real vLLM replica."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from data_contracts.config import PublishConfig
from data_contracts.errors import InfraError, PublishRefused, VersionMismatch
from data_contracts.records import CheckpointRef, SampleRequest, SampleResult
from infra.processes import free_port
from models.codec import open_codec
from models.serving.reference import ReferenceScorer
from models.serving.vllm_engine import VllmEngine, accepted_addresses
from models.serving.vllm_sampler import VllmSampler
from tests.plugins.vllm import VllmServer

CAMPAIGN = "serving-tests"
CONFIG = PublishConfig(seconds=60)


@dataclass
class Folders:
    """The one method of a store that publishing needs; keys are absolute paths unless `redirect` says otherwise."""

    redirect: dict[str, str] = field(default_factory=dict)

    def local_path(self, key: str) -> str:
        return self.redirect.get(key, key)


def reference(folder: Path, version: int) -> CheckpointRef:
    return CheckpointRef(uri=str(folder), sha256=f"{version:064d}", version=version, size=1)


def engine_of(server: VllmServer, store: Folders | None = None, *, addresses: list[str] | None = None) -> VllmEngine:
    return VllmEngine(
        addresses or [server.address],
        store=store or Folders(),  # type: ignore[arg-type]
        trainer=ReferenceScorer(Folders()),  # type: ignore[arg-type]
        config=CONFIG,
    )


def ask(**changes: object) -> SampleRequest:
    given = {
        "request_id": "r",
        "session": "s",
        "token_ids": (2, 5, 30, 40, 3),
        "max_tokens": 16,
        "temperature": 1.0,
        "seed": 7,
        **changes,
    }
    return SampleRequest(**given)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def engines() -> dict[str, VllmEngine]:
    """One engine a session, so that an unchanged replica is not proven again for every test."""
    return {}


@pytest.fixture
def served(vllm_server: VllmServer, engines: dict[str, VllmEngine]) -> VllmServer:
    """The replica with the base model proven as version 0 of the tests' campaign."""
    engine = engines.setdefault(vllm_server.address, engine_of(vllm_server))
    engine.ensure_serving(reference(vllm_server.folder, 0), campaign=CAMPAIGN, parent=None)
    return vllm_server


@pytest.fixture(scope="session")
def stepped(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(checkpoint after one real optimizer step, the same with the output head left as it was)."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("stepped")
    new, stale = folder / "new", folder / "stale"
    shutil.copytree(tiny_folder, new)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype="float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    ids = torch.tensor([[2, 5, *range(20, 60), 3]])
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.save_pretrained(new)
    shutil.copytree(new, stale)
    weights = load_file(new / "model.safetensors")
    weights["lm_head.weight"] = load_file(tiny_folder / "model.safetensors")["lm_head.weight"]
    save_file(weights, stale / "model.safetensors", metadata={"format": "pt"})
    return new, stale


def post(server: VllmServer, path: str, body: dict[str, str] | None = None) -> dict[str, object]:
    answer = httpx.post(server.address + path, json=body, timeout=30).raise_for_status()
    return dict(answer.json()) if answer.content else {}


def get(server: VllmServer, path: str) -> dict[str, object]:
    return dict(httpx.get(server.address + path, timeout=30).raise_for_status().json())


def set_label(server: VllmServer, label: str) -> None:
    post(server, "/update_weight_version", {"new_version": label})


# ----------------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(served: VllmServer, temperature: float) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    async with VllmSampler([served.address], campaign=CAMPAIGN, version=0) as sampler:
        result = await sampler.sample(ask(temperature=temperature, max_tokens=32), deadline_seconds=30)
    model = AutoModelForCausalLM.from_pretrained(served.folder, dtype="float32").eval()
    ids = torch.tensor([[*ask().token_ids, *result.token_ids]])
    with torch.inference_mode():
        expected_TV = (model(ids).logits[0] / temperature).log_softmax(-1)
    start = len(ask().token_ids)
    expected = [expected_TV[start - 1 + index, token].item() for index, token in enumerate(result.token_ids)]
    assert result.logprobs == pytest.approx(expected, abs=1e-4)
    assert [(span.start, span.stop, span.version) for span in result.spans] == [(0, len(result.token_ids), 0)]
    assert result.engine == served.address


async def test_the_same_seed_samples_the_same_tokens(served: VllmServer) -> None:
    async with VllmSampler([served.address], campaign=CAMPAIGN, version=0) as sampler:
        first, second = [await sampler.sample(ask(), deadline_seconds=30) for _ in range(2)]
        other = await sampler.sample(ask(seed=8), deadline_seconds=30)
    assert first.token_ids == second.token_ids
    assert first.token_ids != other.token_ids


async def test_a_stop_token_ends_the_turn_and_is_part_of_it(served: VllmServer) -> None:
    codec = open_codec(served.folder)
    every_id = tuple(range(12, 108))
    async with VllmSampler([served.address], campaign=CAMPAIGN, version=0) as sampler:
        result = await sampler.sample(ask(stop_token_ids=(*codec.stop_token_ids, *every_id)), deadline_seconds=30)
    assert result.finish_reason == "stop"
    assert len(result.token_ids) >= 1
    assert result.token_ids[-1] in {*codec.stop_token_ids, *every_id}


async def test_a_full_context_is_a_length_stop_and_max_tokens_is_cut_to_fit(served: VllmServer) -> None:
    length = served.config.max_model_len
    async with VllmSampler([served.address], campaign=CAMPAIGN, version=0) as sampler:
        full = await sampler.sample(ask(token_ids=(30,) * length), deadline_seconds=30)
        over = await sampler.sample(ask(token_ids=(30,) * (length + 9)), deadline_seconds=30)
        nearly = await sampler.sample(ask(token_ids=(30,) * (length - 3), max_tokens=50), deadline_seconds=30)
    assert (full.token_ids, full.finish_reason) == ((), "length")
    assert (over.token_ids, over.finish_reason) == ((), "length")
    assert 1 <= len(nearly.token_ids) <= 3


@pytest.mark.parametrize(("campaign", "version"), [("another", 0), (CAMPAIGN, 1)])
async def test_tokens_of_other_weights_are_refused(served: VllmServer, campaign: str, version: int) -> None:
    async with VllmSampler([served.address], campaign=campaign, version=version) as sampler:
        with pytest.raises(VersionMismatch, match=f"{CAMPAIGN}@0"):
            await sampler.sample(ask(), deadline_seconds=30)


async def test_the_label_of_a_fresh_replica_is_refused(served: VllmServer) -> None:
    set_label(served, "default")
    async with VllmSampler([served.address], campaign=CAMPAIGN, version=0) as sampler:
        with pytest.raises(VersionMismatch, match="default"):
            await sampler.sample(ask(), deadline_seconds=30)


async def test_a_newer_version_is_taken_only_on_request(served: VllmServer) -> None:
    set_label(served, f"{CAMPAIGN}@3")
    async with VllmSampler([served.address], campaign=CAMPAIGN, version=2, newer="accept") as sampler:
        result = await sampler.sample(ask(), deadline_seconds=30)
    assert {span.version for span in result.spans} == {3}


async def test_tokens_drawn_while_a_replica_is_being_proven_are_drawn_again(served: VllmServer) -> None:
    label = f"{CAMPAIGN}@0"
    set_label(served, f"proving:{label}")
    async with VllmSampler([served.address], campaign=CAMPAIGN, version=0) as sampler:
        waiting = asyncio.create_task(sampler.sample(ask(), deadline_seconds=30))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        set_label(served, label)
        assert (await waiting).spans[0].version == 0


async def test_a_deadline_is_an_infra_failure_and_the_server_drops_the_request(served: VllmServer) -> None:
    post(served, "/pause?mode=keep")
    start = time.monotonic()
    async with VllmSampler([served.address], campaign=CAMPAIGN, version=0) as sampler:
        with pytest.raises(InfraError) as caught:
            await sampler.sample(ask(max_tokens=900), deadline_seconds=1.0)
        assert caught.value.cause == "sampling_deadline"
        assert time.monotonic() - start < 3.0
        post(served, "/resume")
        await sampler.sample(ask(max_tokens=1), deadline_seconds=30)
    # an aborted request holds no block, so a plain reset succeeds
    assert post(served, "/reset_prefix_cache") == {"success": True}


# --------------------------------------------------------------------------------------------------------------- publishing


def test_one_step_is_proven_and_a_second_call_changes_nothing(served: VllmServer, stepped: tuple[Path, Path]) -> None:
    engine = engine_of(served)
    old, new = reference(served.folder, 0), reference(stepped[0], 1)
    (proof,) = engine.ensure_serving(new, campaign=CAMPAIGN, parent=old).proofs
    assert proof.accepted
    assert not proof.checksum_only
    assert proof.tokens >= CONFIG.probe_tokens
    assert proof.distance_new < CONFIG.tolerance < proof.distance_old
    start = time.monotonic()
    assert engine.ensure_serving(new, campaign=CAMPAIGN, parent=old).proofs == (proof,)
    assert time.monotonic() - start < 1.0


async def test_a_stale_output_head_is_refused_and_the_replica_is_taken_out(
    served: VllmServer, stepped: tuple[Path, Path]
) -> None:
    new, stale = stepped
    old_ref, new_ref = reference(served.folder, 0), reference(new, 1)
    corrupted = engine_of(served, Folders(redirect={str(new): str(stale)}))
    with pytest.raises(PublishRefused, match=served.address):
        corrupted.ensure_serving(new_ref, campaign=CAMPAIGN, parent=old_ref)
    assert get(served, "/is_paused")["is_paused"]
    label = get(served, "/weight_info")["weight_version"]
    assert label == f"proving:{CAMPAIGN}@1"
    (proof,) = engine_of(served).ensure_serving(new_ref, campaign=CAMPAIGN, parent=old_ref).proofs
    assert proof.accepted
    async with VllmSampler([served.address], campaign=CAMPAIGN, version=1) as sampler:
        assert (await sampler.sample(ask(), deadline_seconds=30)).spans[0].version == 1


def test_an_engine_that_kept_the_old_weights_is_refused(served: VllmServer, stepped: tuple[Path, Path]) -> None:
    new = stepped[0]
    nothing_loaded = engine_of(served, Folders(redirect={str(new): str(served.folder)}))
    with pytest.raises(PublishRefused, match="old"):
        nothing_loaded.ensure_serving(reference(new, 1), campaign=CAMPAIGN, parent=reference(served.folder, 0))


def test_an_update_without_a_step_says_that_only_checksums_were_compared(served: VllmServer) -> None:
    same, old = reference(served.folder, 1), reference(served.folder, 0)
    (proof,) = engine_of(served).ensure_serving(same, campaign=CAMPAIGN, parent=old).proofs
    assert proof.accepted
    assert proof.checksum_only
    assert proof.step_distance == 0.0


def test_a_replica_that_lost_its_label_is_brought_up_to_date_again(served: VllmServer) -> None:
    engine = engine_of(served)
    base = reference(served.folder, 0)
    engine.ensure_serving(base, campaign=CAMPAIGN, parent=None)
    set_label(served, "default")
    engine.ensure_serving(base, campaign=CAMPAIGN, parent=None)
    assert get(served, "/weight_info")["weight_version"] == f"{CAMPAIGN}@0"


def test_a_missing_replica_is_named_and_the_others_serve(served: VllmServer) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    engine = VllmEngine(
        [served.address, gone],
        store=Folders(),  # type: ignore[arg-type]
        trainer=ReferenceScorer(Folders()),  # type: ignore[arg-type]
        config=PublishConfig(seconds=10),
    )
    result = engine.ensure_serving(reference(served.folder, 0), campaign=CAMPAIGN, parent=None)
    assert accepted_addresses(result) == [served.address]
    assert "healthy" in result.proofs[1].reason


def test_requests_in_flight_go_on_under_the_new_weights(served: VllmServer, stepped: tuple[Path, Path]) -> None:
    """Three askers, so that the moment of the publish falls into a long request of at least one of them."""
    over = threading.Event()

    async def keep_asking(asker: str) -> list[tuple[float, SampleResult]]:
        answers = []
        async with VllmSampler([served.address], campaign=CAMPAIGN, version=0, newer="accept") as sampler:
            while not over.is_set():
                started = time.monotonic()
                request = ask(request_id=f"{asker}-{len(answers)}", max_tokens=900, temperature=0.0)
                answers.append((started, await sampler.sample(request, deadline_seconds=90)))
        return answers

    engine_of(served).ensure_serving(reference(served.folder, 0), campaign=CAMPAIGN, parent=None)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(lambda name=name: asyncio.run(keep_asking(name))) for name in "abc"]
        time.sleep(1.0)
        published = time.monotonic()
        engine_of(served).ensure_serving(reference(stepped[0], 1), campaign=CAMPAIGN, parent=reference(served.folder, 0))
        over.set()
        answers = [answer for asker in waiting for answer in asker.result(90)]
    assert any(started < published and result.spans[-1].version == 1 for started, result in answers)
    for _, result in answers:
        versions = [span.version for span in result.spans]
        assert versions == sorted(versions)
        assert sum(span.stop - span.start for span in result.spans) == len(result.token_ids)


# ------------------------------------------------------------------------------------------------------------------ outages


async def test_a_dead_server_is_unreachable() -> None:
    async with VllmSampler([f"http://127.0.0.1:{free_port()}"], campaign=CAMPAIGN, version=0) as sampler:
        with pytest.raises(InfraError) as caught:
            await sampler.sample(ask(), deadline_seconds=5)
    assert caught.value.cause == "engine_unreachable"


@pytest.mark.parametrize("answer", ["drop", "500", "garbage"])
async def test_a_server_that_fails_halfway_is_unreachable(answer: str) -> None:
    with failing_server(answer) as address:
        async with VllmSampler([address], campaign=CAMPAIGN, version=0) as sampler:
            with pytest.raises(InfraError) as caught:
                await sampler.sample(ask(), deadline_seconds=5)
    assert caught.value.cause == "engine_unreachable"


@contextmanager
def failing_server(answer: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if answer == "drop":
                self.connection.close()
                return
            self.send_response(500 if answer == "500" else 200)
            self.end_headers()
            self.wfile.write(b"oops")

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
