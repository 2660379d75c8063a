"""The command line and environment of a trainer, for whoever supervises processes. Pure: nothing is started here."""

from __future__ import annotations

import sys

HEALTH_PATH = "/status"


def trainer_command(
    *, store: str, port: int, processes: int = 1, threads: int = 0, cpu: bool = True
) -> tuple[tuple[str, ...], dict[str, str]]:
    """(argv, env laid over the caller's) of `accelerate launch` with `processes` ranks.

    `store` is a folder or fsspec URL, `port` the loopback port of rank 0's HTTP; `threads` a rank, 0 leaves torch's default.
    On the CPU several ranks talk over gloo: the launcher's multi-process mode, with the CPU forced by the environment.
    """
    spread = ("--multi_gpu",) if processes > 1 else ("--cpu",) if cpu else ()
    argv = (
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *spread,
        f"--num_processes={processes}",
        "--num_machines=1",
        "--mixed_precision=no",
        "--dynamo_backend=no",
        f"--num_cpu_threads_per_process={max(threads, 0) or _default_threads(processes)}",
        "--main_process_port=0",
        "-m",
        "models.training.worker",
        f"--store={store}",
        f"--port={port}",
        f"--threads={threads}",
        *(("--cpu",) if cpu else ()),
    )
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if cpu:
        env["ACCELERATE_USE_CPU"] = "true"
    return argv, env


def _default_threads(processes: int) -> int:
    """The visible cores shared out over the ranks of this machine."""
    import os

    return max(1, len(os.sched_getaffinity(0)) // processes)
