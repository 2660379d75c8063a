"""A real local cluster as a supervised process: slots for coroutines, a killed worker comes back, clear errors."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import dask_cluster, processes, stack, supervisor


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home: Path = tmp_path_factory.mktemp("dask")
    ports = stack.Ports(home)
    spec = dask_cluster.cluster_spec(port=ports.of("dask"), health_port=ports.of("dask-health"), workers=1, slots=64)
    stack.up(home, [spec])
    yield spec.address
    stack.down(home)
    assert processes.marked(supervisor.mark(home)) == []


async def nap(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return os.getpid()


def test_one_worker_keeps_as_many_coroutines_in_flight_as_it_has_slots(address: str) -> None:
    with dask_cluster.connect(address) as client:
        start = time.monotonic()
        pids = client.gather([client.submit(nap, 1.0, pure=False) for _ in range(64)])
        assert len(set(pids)) == 1
        assert time.monotonic() - start < 20.0


def test_a_killed_worker_comes_back_and_its_task_runs_again(address: str) -> None:
    with dask_cluster.connect(address) as client:
        before = client.submit(os.getpid, pure=False).result(timeout=20)
        running = client.submit(nap, 2.0, pure=False)
        time.sleep(0.5)
        os.kill(before, signal.SIGKILL)
        assert running.result(timeout=60) != before


def test_no_cluster_is_a_clear_error() -> None:
    with pytest.raises(dask_cluster.ClusterUnreachable, match=r"no Dask scheduler at tcp://127.0.0.1:9.*bessemer up"):
        dask_cluster.connect("tcp://127.0.0.1:9", seconds=1)
