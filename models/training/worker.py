"""The trainer process: rank 0 answers HTTP on loopback and decides, all ranks compute (group.py).

| route | body -> answer |
|---|---|
| GET /status | -> `{"checkpoint", "version", "campaign", "epoch", "busy", "key", "processes", "pid"}` |
| POST /train | TrainJob -> TrainResult; idempotent by key, 409 for a passed epoch |
| POST /logprobs | `{"checkpoint": CheckpointRef, "sequences": [[id]]}` -> `{"logprobs": [[float]]}` |
| POST /shutdown | -> `{"saved": bool}`, then the process ends |

Errors answer `{"kind": <class name>, "message": ...}`. Requests run one after another on the main thread; a second POST of a
key in flight waits for the first. SIGTERM is a shutdown. There is no authentication: the socket binds to 127.0.0.1 only.
Gap: a job is not interrupted at its deadline; the client gives up and the answer is recorded when it is there.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from datetime import timedelta

from data_contracts.protocols import Store
from infra.store import open_store
from models.training import checkpoint as files
from models.training.desk import Desk, follow
from models.training.group import WorkerGroup, deterministic
from models.training.http import HttpThread
from models.training.ranks import accelerate_ranks


def watch_launcher(stopping: threading.Event) -> None:
    """End this process when its launcher is gone, so that a killed launcher leaves no trainer on the port."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(1.0)
        if stopping.is_set():  # a shutdown that is saving state gets the time for it
            time.sleep(120.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()


def serve(store: Store, *, port: int, cpu: bool, threads: int) -> None:
    """Run this rank until shutdown."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    deterministic(threads)
    accelerator = Accelerator(cpu=cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))])
    group = WorkerGroup(store, ranks=accelerate_ranks(accelerator), device=accelerator.device)
    if group.ranks.index > 0:
        watch_launcher(threading.Event())
        follow(group)
    else:
        files.sweep_aside()
        desk = Desk(group)
        watch_launcher(desk.stopping)
        signal.signal(signal.SIGTERM, lambda *_: desk.submit("shutdown"))
        server = HttpThread(desk, port=port)
        server.start()
        try:
            desk.run()
        finally:
            server.stop()
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Bessemer's trainer; started by `accelerate launch` (models/training/command.py)"
    )
    parser.add_argument("--store", required=True, help="folder or fsspec URL of the store")
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1 that rank 0 listens on")
    parser.add_argument("--threads", type=int, default=0, help="torch threads a rank; 0 leaves the default")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even where there is an accelerator")
    chosen = parser.parse_args()
    serve(open_store(chosen.store), port=chosen.port, cpu=chosen.cpu, threads=chosen.threads)


if __name__ == "__main__":
    main()
