"""Session fixture `vllm_server`: the vLLM replica of the session's stack, serving the tiny model on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from data_contracts.config import EngineConfig
from models import base_model
from tests.plugins.stack import RunningStack


@dataclass(frozen=True)
class VllmServer:
    """`address` is http://127.0.0.1:port, `folder` the model it started with, `log` where it writes."""

    address: str
    folder: Path
    log: Path
    config: EngineConfig


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    return base_model.resolve("tiny")


@pytest.fixture
def vllm_server(session_stack: RunningStack, tiny_folder: Path, request: pytest.FixtureRequest) -> Iterator[VllmServer]:
    """The session's replica, running (not paused); a test that loads other weights leaves them labelled as such."""
    (address,) = session_stack.addresses.engines
    server = VllmServer(
        address=address,
        folder=tiny_folder,
        log=Path(session_stack.process("vllm-0").log),
        config=session_stack.profile().stack.engine,
    )
    if not _healthy(address):
        pytest.fail(f"the session's vLLM replica died before {request.node.name}; log: {server.log}")
    httpx.post(f"{address}/resume", timeout=30).raise_for_status()
    yield server
    if not _healthy(address):
        pytest.fail(f"the session's vLLM replica died during {request.node.name}; log: {server.log}")


def _healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False
