"""What one Dask worker process holds for all its episodes: sampler, codec, sandboxes, store.

A `WorkerSpec` is a small picklable value; `runtime_for(spec)` builds the heavy objects once per process and event loop and
shares them. Nothing here blocks the event loop: tokenizers and backends are opened in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from data_contracts.config import RewardConfig, SandboxConfig
from data_contracts.errors import InfraError, MissingRequirement
from data_contracts.protocols import Codec, Sampler, SandboxBackend, Store
from data_contracts.records import Message, Problem, Record

_LOG = logging.getLogger(__name__)


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
    max_num_seqs: int = 16
    """The engine's; what one request may ask for at most."""

    def asking(self, replicas: Collection[str]) -> WorkerSpec:
        """This spec with a sampler that asks only those of its addresses that are among `replicas`."""
        left = tuple(address for address in self.sampler.addresses if address.rstrip("/") in replicas)
        return msgspec.structs.replace(self, sampler=msgspec.structs.replace(self.sampler, addresses=left))


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


_opened: dict[tuple[asyncio.AbstractEventLoop, str, bytes], asyncio.Task[Any]] = {}


async def runtime_for(spec: WorkerSpec) -> Runtime:
    """The process's runtime of `spec`, opened once for all callers; a failed opening is not remembered.

    Specs that differ in their replicas only (or belong to other campaigns) share codec and boxes.
    """
    runtime: Runtime = await _once("runtime", msgspec.json.encode(spec), lambda: _open(spec))
    return runtime


async def close_runtimes() -> None:
    """Close what this event loop opened; the runtimes of other loops are in use elsewhere."""
    loop = asyncio.get_running_loop()
    for place in [place for place in _opened if place[0] is loop]:
        task = _opened.pop(place)
        if not task.done():
            task.cancel()
        elif not task.cancelled() and task.exception() is None:
            if place[1] == "runtime":
                await task.result().sampler.close()
            elif place[1] == "backend":
                try:
                    await task.result().close()
                except InfraError as error:
                    _LOG.warning("boxes are left to the next sweep, their backend does not answer: %s", error)


async def _once(kind: str, key: bytes, opening: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """What `opening` gives, shared by all callers with the same key; a caller that is cancelled takes nobody else along."""
    loop = asyncio.get_running_loop()
    place = (loop, kind, key)
    task = _opened.get(place)
    if task is None:
        task = _opened[place] = loop.create_task(opening())
        task.add_done_callback(lambda done: _forget_failed(place, done))
    return await asyncio.shield(task)


def _forget_failed(place: tuple[asyncio.AbstractEventLoop, str, bytes], task: asyncio.Task[Any]) -> None:
    if task.cancelled() or task.exception() is not None:
        _opened.pop(place, None)


async def _open(spec: WorkerSpec) -> Runtime:
    from infra.store import open_store

    codec = await _once("codec", spec.model_folder.encode(), lambda: _open_codec(spec.model_folder))
    backend = await _once("backend", spec.sandbox.encode(), lambda: _open_backend(spec.sandbox))
    return Runtime(
        spec=spec,
        store=open_store(spec.store_url),
        codec=codec,
        sampler=_open_sampler(spec, codec=codec),
        backend=backend,
        reward=RewardConfig.model_validate_json(spec.reward),
    )


async def _open_codec(model_folder: str) -> Codec:
    from models.codec import open_codec

    return await asyncio.to_thread(open_codec, Path(model_folder))


async def _open_backend(sandbox: str) -> SandboxBackend:
    from environments.sandbox import open_backend

    backend = await asyncio.to_thread(open_backend, SandboxConfig.model_validate_json(sandbox))
    try:
        await backend.check()
    except MissingRequirement:
        await backend.era()  # an engine that does not answer is waited for: InfraError
        raise
    return backend


def _open_sampler(spec: WorkerSpec, *, codec: Codec) -> Sampler:
    chosen = spec.sampler
    if chosen.kind == "scripted":
        from tasks.scripted import ScriptedSampler

        return ScriptedSampler(codec, policy=chosen.policy)
    from models.serving.replay import RecordingSampler, ReplaySampler
    from models.serving.vllm_sampler import VllmSampler

    if chosen.kind == "replay":
        return ReplaySampler.from_file(Path(chosen.recording))
    sampler = VllmSampler(chosen.addresses, campaign=spec.campaign, most_together=min(32, spec.max_num_seqs))
    return RecordingSampler(sampler, Path(chosen.record_to)) if chosen.record_to else sampler
