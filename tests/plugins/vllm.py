"""Session fixture `vllm_server`: one real vLLM replica serving the tiny model, on loopback, for the whole pytest session."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from data_contracts.config import EngineConfig
from data_contracts.errors import InfraError
from models import base_model
from models.serving.vllm_command import vllm_command, wait_ready

STARTUP_SECONDS = 540.0


@dataclass(frozen=True)
class VllmServer:
    """`address` is http://127.0.0.1:port, `folder` the model it started with, `log` where it writes."""

    address: str
    folder: Path
    log: Path
    config: EngineConfig


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    return base_model.resolve("tiny")


@pytest.fixture(scope="session")
def _vllm_process(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    config = EngineConfig(max_model_len=1024)
    port, log = free_port(), tmp_path_factory.mktemp("vllm") / "engine.log"
    argv, environment = vllm_command(config, tiny_folder, port=port)
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        try:
            wait_ready(f"http://127.0.0.1:{port}", deadline_seconds=STARTUP_SECONDS, alive=lambda: process.poll() is None)
        except InfraError as error:
            pytest.fail(f"{error}\nlog: {log}\n{log.read_text(errors='replace')[-3000:]}")
        yield VllmServer(address=f"http://127.0.0.1:{port}", folder=tiny_folder, log=log, config=config)
    finally:
        _end_group(process)


@pytest.fixture
def vllm_server(_vllm_process: VllmServer, request: pytest.FixtureRequest) -> Iterator[VllmServer]:
    """The session's replica, running (not paused); a test that loads other weights leaves them labelled as such."""
    if not _healthy(_vllm_process.address):
        pytest.fail(f"the shared vLLM replica died before {request.node.name}; log: {_vllm_process.log}")
    httpx.post(f"{_vllm_process.address}/resume", timeout=30).raise_for_status()
    yield _vllm_process
    if not _healthy(_vllm_process.address):
        pytest.fail(f"the shared vLLM replica died during {request.node.name}; log: {_vllm_process.log}")


def _healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """The engine's children live in its process group: end all of it, then make sure that nothing is left."""
    for number, patience in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        until = time.monotonic() + patience
        while time.monotonic() < until and _group_lives(process):
            time.sleep(0.1)
    process.wait(timeout=10)


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
