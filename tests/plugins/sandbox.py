"""Session fixtures: the sandbox root file system, Docker's engine, and one open backend of each kind.

They build and start what they need, and fail (never skip) where that is impossible.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from environments.sandbox.bubblewrap import BubblewrapBackend
from environments.sandbox.docker import DockerBackend
from environments.sandbox.fake import FakeBackend
from infra.apt import install
from infra.docker_engine import ensure_dockerd, stop_dockerd
from infra.rootfs import ensure_image, ensure_rootfs


@pytest.fixture(scope="session")
def rootfs() -> Path:
    """The shared root file system, built when it is not there yet."""
    install(progress=print)
    return ensure_rootfs(progress=print)


@pytest.fixture(scope="session")
def docker_engine(rootfs: Path) -> Iterator[str]:
    """A reachable engine that has the sandbox image; answers the image's name. Stopped again if this session started it."""
    install(docker=True, progress=print)
    started = ensure_dockerd(progress=print)
    yield ensure_image(progress=print)
    if started:
        stop_dockerd()


@pytest.fixture(scope="session")
def bubblewrap_backend(rootfs: Path) -> Iterator[BubblewrapBackend]:
    backend = BubblewrapBackend(concurrency=8)
    asyncio.run(backend.check())
    yield backend
    asyncio.run(backend.close())


@pytest.fixture(scope="session")
def docker_backend(docker_engine: str) -> Iterator[DockerBackend]:
    backend = DockerBackend(concurrency=8)
    asyncio.run(backend.check())
    yield backend
    asyncio.run(backend.close())


@pytest.fixture(scope="session")
def fake_backend() -> Iterator[FakeBackend]:
    backend = FakeBackend(concurrency=8)
    yield backend
    asyncio.run(backend.close())
