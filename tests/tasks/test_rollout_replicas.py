"""Rollouts over two replicas, one of them taken out, dead or hanging: the real sampler against small HTTP stand-ins."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from data_contracts.config import RewardConfig, RolloutConfig, SandboxConfig
from data_contracts.errors import TooManyInfraFailures
from data_contracts.records import CheckpointRef, PublishResult
from data_contracts.tables import put_problems, read_manifest
from environments.registry import domain
from infra.processes import free_port
from infra.store import LocalStore
from models.base_model import resolve
from models.serving.fake_engine import FakeEngine
from tasks.campaign import Stopped
from tasks.group_pool import LocalPool
from tasks.rollout import Serving, rollout
from tasks.runtime import SamplerSpec, WorkerSpec, close_runtimes, runtime_for

BASE = CheckpointRef(uri="campaigns/c/checkpoints/v000000", sha256="0" * 64, version=0, size=0)
GROUPS = 6


class Replica(ThreadingHTTPServer):
    """Answers one token for every choice that is asked for, or, hanging, nothing at all."""

    daemon_threads = True

    def __init__(self, *, hanging: bool = False, finish: str = "stop") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hanging, self.finish, self.asked, self.gone = hanging, finish, 0, threading.Event()
        self.address = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Replica

    def do_GET(self) -> None:
        self._answer({"data": [{"max_model_len": 512}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked += 1
        if self.server.hanging:
            self.server.gone.wait(30)
            return
        choice = {
            "token_ids": [65],
            "logprobs": {"content": [{"logprob": -0.5}]},
            "finish_reason": self.server.finish,
            "weight_versions": [{"version": "c@0", "start": 0, "end": 1}],
        }
        self._answer({"choices": [choice] * request["sampling_params"]["n"]})

    def _answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None: ...


@contextmanager
def serving(**options: object) -> Iterator[Replica]:
    replica = Replica(**options)  # type: ignore[arg-type]
    thread = threading.Thread(target=replica.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield replica
    finally:
        replica.gone.set()
        replica.shutdown()
        replica.server_close()


class Engine(FakeEngine):
    """Accepts, call by call, the given replicas (the last set for all further calls) and refuses the rest of `known`."""

    def __init__(self, known: Sequence[str], *accepted: Sequence[str]) -> None:
        super().__init__()
        self._known, self._accepted = known, accepted

    def ensure_serving(self, checkpoint: CheckpointRef, *, campaign: str, parent: CheckpointRef | None) -> PublishResult:
        import msgspec

        result = super().ensure_serving(checkpoint, campaign=campaign, parent=parent)
        accepted = self._accepted[min(self.calls, len(self._accepted)) - 1]
        proofs = [
            msgspec.structs.replace(result.proofs[0], replica=address, accepted=address in accepted) for address in self._known
        ]
        return msgspec.structs.replace(result, proofs=tuple(proofs))


def spec(store: LocalStore, *addresses: str) -> WorkerSpec:
    return WorkerSpec(
        store_url=store.root,
        model_folder=str(resolve("tiny")),
        campaign="c",
        sampler=SamplerSpec(addresses=addresses),
        sandbox=SandboxConfig(backend="fake").model_dump_json(),
        reward=RewardConfig().model_dump_json(),
        max_model_len=512,
    )


def run(
    root: Path,
    engine: Engine,
    *addresses: str,
    stopping: Callable[[], bool] = lambda: False,
    refills: int = 0,
    groups: int = GROUPS,
):
    store, pool = LocalStore(root), LocalPool()
    stream = domain("echo").problems("train", seed=1)
    problems = [next(stream) for _ in range(groups)]
    config = RolloutConfig(
        group_size=4, drop_zero_variance=False, refill_budget=refills, infra_retries=1, sampling_seconds=2, max_infra_share=1.0
    )
    try:
        ref = rollout(
            config,
            put_problems(store, "campaigns/c/iterations/000000/problems.jsonl", problems),
            campaign="c",
            iteration=0,
            groups=groups,
            serving=Serving(engine=engine, checkpoint=BASE, parent=None, oldest=0),
            worker=spec(store, *addresses),
            pool=pool,
            store=store,
            prefix="campaigns/c/iterations/000000",
            stopping=stopping,
        )
    finally:
        pool.close()
    return read_manifest(store, ref)


def test_a_replica_that_was_taken_out_is_asked_for_nothing(tmp_path: Path):
    with serving() as good, serving(hanging=True) as paused:
        manifest = run(tmp_path, Engine([good.address, paused.address], [good.address]), good.address, paused.address)
    assert len(manifest.shards) == GROUPS
    assert not manifest.discarded
    assert paused.asked == 0


def test_groups_of_a_replica_that_died_go_on_elsewhere_within_one_retry(tmp_path: Path):
    dead = f"http://127.0.0.1:{free_port()}"
    with serving() as good:
        engine = Engine([good.address, dead], [good.address, dead], [good.address])
        manifest = run(tmp_path, engine, good.address, dead)
    assert len(manifest.shards) == GROUPS
    assert engine.calls >= 2, "what is left had to be proven before the groups were sent round"


def test_a_replica_that_hangs_is_asked_to_prove_itself_and_left_out(tmp_path: Path):
    with serving() as good, serving(hanging=True) as hanging:
        addresses = [good.address, hanging.address]
        manifest = run(tmp_path, Engine(addresses, addresses, [good.address]), *addresses)
    assert len(manifest.shards) == GROUPS


def test_a_request_that_the_engine_aborted_is_never_the_policys_turn(tmp_path: Path):
    with serving(finish="abort") as aborting, pytest.raises(TooManyInfraFailures, match="abort"):
        run(tmp_path, Engine([aborting.address], [aborting.address]), aborting.address)


def test_an_empty_batch_is_never_sealed(tmp_path: Path):
    dead = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TooManyInfraFailures, match=r"no group .* is left to seal.*engine_unreachable"):
        run(tmp_path, Engine([dead], [dead]), dead, groups=1)
    assert not LocalStore(tmp_path).exists("campaigns/c/iterations/000000/episodes.json")


def test_a_rollout_that_is_asked_to_stop_does_so_soon(tmp_path: Path):
    with serving(hanging=True) as hanging, pytest.raises(Stopped):
        run(tmp_path, Engine([hanging.address], [hanging.address]), hanging.address, stopping=lambda: hanging.asked > 0)


async def test_specs_that_differ_in_their_replicas_share_codec_and_boxes(tmp_path: Path):
    store = LocalStore(tmp_path)
    both = spec(store, "http://a", "http://b/")
    first, second = await runtime_for(both), await runtime_for(both.asking({"http://b"}))
    assert second.spec.sampler.addresses == ("http://b/",)
    assert first.sampler is not second.sampler
    assert first.backend is second.backend
    assert first.codec is second.codec
    await close_runtimes()


async def test_a_cancelled_first_caller_does_not_spoil_the_opening_for_the_others(tmp_path: Path):
    one = spec(LocalStore(tmp_path), "http://a")
    first, second = asyncio.create_task(runtime_for(one)), asyncio.create_task(runtime_for(one))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).spec == one
    await close_runtimes()
