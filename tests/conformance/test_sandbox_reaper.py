"""kill -9 of an owner of many busy boxes: the next start's sweep removes them all, volumes too, and nobody else's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from environments.sandbox.base import Backend
from environments.sandbox.bench import reap_after_kill
from environments.sandbox.docker import DockerBackend
from environments.sandbox.owners import this_process


@pytest.mark.parametrize(("kind", "count"), [("bubblewrap", 50), ("docker", 6)])
async def test_a_sweep_removes_all_that_a_killed_owner_left(request: pytest.FixtureRequest, kind: str, count: int) -> None:
    """`bessemer bench sandbox` does the same with fifty boxes of each."""
    backend: Backend = request.getfixturevalue(f"{kind}_backend")
    found = await reap_after_kill(kind, count, backend)
    assert (found.boxes, found.left, found.bystander) == (count, 0, True)
    assert found.seconds < 30


@pytest.fixture
def volumes(docker_backend: DockerBackend) -> Iterator[dict[str, Any]]:
    """A volume of a dead owner, of a living one, of another host's, and one that is not ours."""
    mine = this_process().labels()
    labels = {
        "dead": mine | {"bessemer.start": "1"},
        "living": mine,
        "elsewhere": mine | {"bessemer.host": "another", "bessemer.start": "1"},
        "foreign": {"somebody": "else"},
    }
    made = {
        name: docker_backend.client.volumes.create(f"bessemer-test-{os.getpid()}-{name}", labels=label)
        for name, label in labels.items()
    }
    yield made
    for volume in made.values():
        if volume.name in {other.name for other in docker_backend.client.volumes.list()}:
            volume.remove()


def test_volumes_of_dead_owners_go_and_others_stay(docker_backend: DockerBackend, volumes: dict[str, Any]) -> None:
    docker_backend.reap()
    left = {volume.name for volume in docker_backend.client.volumes.list()}
    assert {name for name, volume in volumes.items() if volume.name in left} == {"living", "elsewhere", "foreign"}
