"""The Dask cluster: its settings, the local one as a process, and how to connect to any.

    python -m infra.dask_cluster --port 8786 --health-port 8787 --workers 1 --slots 256

Coroutine tasks take a thread slot each, so a worker has as many slots as groups in flight. Work stealing is off (a stolen
rollout starts again), unknown tasks count as a minute, and a task survives three lost workers. The nanny restarts a worker
that dies. An existing cluster should carry the same settings (`settings()` as YAML in its dask config).
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import threading
from typing import Any

from data_contracts.errors import BessemerError
from infra.processes import ProcessSpec

ALLOWED_FAILURES = 3


class ClusterUnreachable(BessemerError, ConnectionError):
    """No Dask scheduler, or no worker, at the address."""


def settings() -> dict[str, Any]:
    """Dask configuration that rollouts rely on."""
    return {
        "distributed.scheduler.work-stealing": False,
        "distributed.scheduler.unknown-task-duration": "60s",
        "distributed.scheduler.allowed-failures": ALLOWED_FAILURES,
        "distributed.scheduler.worker-ttl": "5 minutes",
    }


def connect(address: str, *, workers: int = 1, seconds: float = 60.0) -> Any:
    """A `distributed.Client` of the scheduler at `address` with at least `workers` workers. Raises ClusterUnreachable."""
    import dask

    distributed: Any = importlib.import_module("distributed")
    dask.config.set(settings())
    try:
        client = distributed.Client(address, timeout=seconds, set_as_default=False)
    except OSError as error:
        raise ClusterUnreachable(f"no Dask scheduler at {address}: {error}; start one with `bessemer up`") from error
    try:
        client.wait_for_workers(workers, timeout=seconds)
    except TimeoutError as error:
        client.close()
        raise ClusterUnreachable(f"the Dask cluster at {address} has fewer than {workers} workers after {seconds} s") from error
    return client


def cluster_spec(*, port: int, health_port: int, workers: int, slots: int) -> ProcessSpec:
    return ProcessSpec(
        name="dask",
        argv=(
            *(sys.executable, "-m", "infra.dask_cluster", "--port", str(port), "--health-port", str(health_port)),
            *("--workers", str(workers), "--slots", str(slots)),
        ),
        address=f"tcp://127.0.0.1:{port}",
        health=f"http://127.0.0.1:{health_port}/health",
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.dask_cluster")
    for name, default in (("--port", 8786), ("--health-port", 8787), ("--workers", 1), ("--slots", 256)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args(argv)
    import dask

    distributed: Any = importlib.import_module("distributed")
    dask.config.set(settings())
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with distributed.LocalCluster(
        n_workers=options.workers,
        threads_per_worker=options.slots,
        processes=True,
        host="127.0.0.1",
        scheduler_port=options.port,
        dashboard_address=f"127.0.0.1:{options.health_port}",
        worker_dashboard_address=None,
        memory_limit=0,
        silence_logs=30,
    ):
        stop.wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
