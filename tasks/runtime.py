"""What one Dask worker process holds for all its episodes: sampler, codec, sandboxes, store.

A `WorkerSpec` is a small picklable value; `runtime_for(spec)` builds the heavy objects once per process and event loop and
shares them. Nothing here blocks the event loop: tokenizers and backends are opened in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from data_contracts.config import RewardConfig, SandboxConfig
from data_contracts.protocols import Codec, Sampler, SandboxBackend, Store
from data_contracts.records import Message, Problem, Record


class SamplerSpec(Record, frozen=True, kw_only=True):
    """Where tokens come from.

    `vllm`: the replicas at `addresses`. `replay`: tokens of the recording file `recording`. `scripted`: the domain's own
    policy named by `policy` ("oracle", "noop", "random", or an exploit's name), for proofs and tests.
    """

    kind: str = "vllm"
    addresses: tuple[str, ...] = ()
    recording: str = ""
    policy: str = "oracle"
    record_to: str = ""
    """A file: when given, every sampled turn is appended to it for a later replay."""


class WorkerSpec(Record, frozen=True, kw_only=True):
    """Everything a worker needs to run groups of one campaign."""

    store_url: str
    model_folder: str
    """Folder with the tokenizer and chat template; weights are not read here."""
    campaign: str
    sampler: SamplerSpec
    sandbox: str
    """SandboxConfig as JSON."""
    reward: str
    """RewardConfig as JSON."""
    max_model_len: int


@runtime_checkable
class ConversationAware(Protocol):
    """A sampler that writes from the conversation instead of the ids (scripted policies)."""

    def observe(self, session: str, problem: Problem, conversation: Sequence[Message], *, version: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The opened objects. Shared by every episode of a worker; all of them are safe under concurrent coroutines."""

    spec: WorkerSpec
    store: Store
    codec: Codec
    sampler: Sampler
    backend: SandboxBackend
    reward: RewardConfig


_runtimes: dict[tuple[asyncio.AbstractEventLoop, bytes], asyncio.Future[Runtime]] = {}


async def runtime_for(spec: WorkerSpec) -> Runtime:
    """The process's runtime of `spec`, opened by the first caller; a failed opening is not remembered."""
    loop = asyncio.get_running_loop()
    key = (loop, msgspec.json.encode(spec))
    future = _runtimes.get(key)
    if future is not None:
        return await asyncio.shield(future)
    future = loop.create_future()
    _runtimes[key] = future
    try:
        runtime = await _open(spec)
    except BaseException as error:
        del _runtimes[key]
        future.set_exception(error if isinstance(error, Exception) else RuntimeError(f"opening was stopped: {error!r}"))
        future.exception()
        raise
    future.set_result(runtime)
    return runtime


async def close_runtimes() -> None:
    """Close the runtimes that this event loop opened; those of other loops are in use elsewhere."""
    loop = asyncio.get_running_loop()
    for key in [key for key, future in _runtimes.items() if future.get_loop() is loop]:
        future = _runtimes.pop(key)
        if future.done() and future.exception() is None:
            runtime = future.result()
            await runtime.sampler.close()
            await runtime.backend.close()


async def _open(spec: WorkerSpec) -> Runtime:
    from environments.sandbox import open_backend
    from infra.store import open_store
    from models.codec import open_codec

    store = open_store(spec.store_url)
    codec = await asyncio.to_thread(open_codec, Path(spec.model_folder))
    backend = await asyncio.to_thread(open_backend, SandboxConfig.model_validate_json(spec.sandbox))
    await backend.check()
    return Runtime(
        spec=spec,
        store=store,
        codec=codec,
        sampler=_open_sampler(spec, codec=codec),
        backend=backend,
        reward=RewardConfig.model_validate_json(spec.reward),
    )


def _open_sampler(spec: WorkerSpec, *, codec: Codec) -> Sampler:
    chosen = spec.sampler
    if chosen.kind == "scripted":
        from tasks.scripted import ScriptedSampler

        return ScriptedSampler(codec, policy=chosen.policy)
    from models.serving.replay import RecordingSampler, ReplaySampler
    from models.serving.vllm_sampler import VllmSampler

    if chosen.kind == "replay":
        return ReplaySampler.from_file(Path(chosen.recording))
    sampler = VllmSampler(chosen.addresses, campaign=spec.campaign)
    return RecordingSampler(sampler, Path(chosen.record_to)) if chosen.record_to else sampler
