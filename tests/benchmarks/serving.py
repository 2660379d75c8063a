"""What publishing and sampling cost on this machine: `python -m tests.benchmarks.serving [tiny | smollm2-135m]`.

Starts one replica, publishes version 0 and version 1 (one real optimizer step), and compares the sampler with bare HTTP
requests that carry the same body. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from data_contracts.config import EngineConfig, PublishConfig
from data_contracts.errors import InfraError
from data_contracts.records import CheckpointRef, SampleRequest
from infra.processes import free_port
from models import base_model
from models.serving.reference import ReferenceScorer
from models.serving.vllm_command import vllm_command, wait_ready
from models.serving.vllm_control import ReplicaControl
from models.serving.vllm_engine import VllmEngine
from models.serving.vllm_sampler import VllmSampler

CAMPAIGN = "benchmark"


class Folders:
    def local_path(self, key: str) -> str:
        return key


def end_group(process: subprocess.Popen[bytes]) -> None:
    """The engine's children live in its process group; it gets a moment to stop by itself."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=15)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    value = call()
    return time.perf_counter() - start, value


def one_step(folder: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    shutil.copytree(folder, target)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    ids = torch.tensor([[2, 5, *range(20, 60), 3]])
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.save_pretrained(target)


def request(index: int, tokens: int) -> SampleRequest:
    return SampleRequest(
        request_id=f"r{index}",
        session=f"s{index}",
        token_ids=tuple(range(20, 60)),
        max_tokens=tokens,
        temperature=1.0,
        seed=index,
    )


async def sampling(address: str) -> dict[str, float]:
    figures: dict[str, float] = {}
    async with VllmSampler([address], campaign=CAMPAIGN, version=1) as sampler, httpx.AsyncClient(timeout=None) as raw:

        async def bare(index: int, tokens: int) -> int:
            given = request(index, tokens)
            body = sampler._body(given, max_tokens=tokens)
            answer = await raw.post(f"{address}/inference/v1/generate", json=body)
            if answer.status_code != httpx.codes.OK:
                raise InfraError("engine_unreachable", f"answered {answer.status_code}: {answer.text[:500]}")
            return len(answer.json()["choices"][0]["token_ids"])

        async def ours(index: int, tokens: int) -> int:
            return len((await sampler.sample(request(index, tokens), deadline_seconds=300)).token_ids)

        for name, call in (("raw", bare), ("sampler", ours), ("raw", bare), ("sampler", ours)):
            await call(0, 1)
            took = []
            for index in range(40):
                start = time.perf_counter()
                await call(index, 1)
                took.append(time.perf_counter() - start)
            key = f"one token, one request at a time, {name}, ms"
            figures[key] = min(figures.get(key, 1e9), statistics.median(took) * 1e3)
            start = time.perf_counter()
            counts = await asyncio.gather(*(call(index, 32) for index in range(64)))
            key = f"64 requests of 32 tokens at once, {name}, tokens/s"
            figures[key] = max(figures.get(key, 0.0), sum(counts) / (time.perf_counter() - start))
    return figures


def main(name: str) -> int:
    folder = base_model.resolve(name, progress=lambda line: print(line, file=sys.stderr))
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    argv, environment = vllm_command(EngineConfig(), folder, port=port)
    with tempfile.TemporaryDirectory() as scratch:
        new = Path(scratch) / "v1"
        one_step(folder, new)
        log = Path(scratch) / "engine.log"
        process = subprocess.Popen(
            argv,
            env={**os.environ, **environment},
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            figures: dict[str, Any] = {
                "model": name,
                "load average at start": os.getloadavg()[0],
                "engine start, s": wait_ready(address, deadline_seconds=600, alive=lambda: process.poll() is None),
            }
            scorer = ReferenceScorer(Folders())  # type: ignore[arg-type]
            engine = VllmEngine([address], store=Folders(), trainer=scorer, config=PublishConfig())  # type: ignore[arg-type]
            v0 = CheckpointRef(uri=str(folder), sha256="0", version=0, size=1)
            v1 = CheckpointRef(uri=str(new), sha256="1", version=1, size=1)
            figures["publish version 0 (one set of weights), s"], _ = timed(
                lambda: engine.ensure_serving(v0, campaign=CAMPAIGN, parent=None)
            )
            figures["publish version 1 (two sets of weights), s"], result = timed(
                lambda: engine.ensure_serving(v1, campaign=CAMPAIGN, parent=v0)
            )
            proof = result.proofs[0]
            figures |= {
                "tokens compared": proof.tokens,
                "distance to the new weights": proof.distance_new,
                "distance to the old weights": proof.distance_old,
                "size of the step": proof.step_distance,
            }
            figures["publish again (nothing to do), s"], _ = timed(
                lambda: engine.ensure_serving(v1, campaign=CAMPAIGN, parent=v0)
            )
            with ReplicaControl(address, deadline=time.monotonic() + 300) as replica:
                figures["of which reload, s"], _ = timed(lambda: replica.reload(str(new)))
                figures["of which checksums, s"], _ = timed(replica.checksums)
                prompts = [list(range(20, 32))] * 16
                figures["of which decoding 512 probe tokens, s"], _ = timed(lambda: replica.decode(prompts, tokens=32))
            sequences = [list(range(20, 64))] * 16
            figures["of which scoring 16 sequences in process, model load included, s"], _ = timed(
                lambda: scorer.logprobs(v1, sequences)
            )
            figures |= asyncio.run(sampling(address))
        except InfraError:
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            end_group(process)
        print(
            json.dumps(
                {key: round(value, 6) if isinstance(value, float) else value for key, value in figures.items()}, indent=2
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))
