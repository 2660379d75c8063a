"""The command line of one vLLM replica, as values; infra supervises the process.

The replica listens on loopback only: with its development endpoints (pause, reload, labels) it must never be reachable from a
sandbox or from outside. Sampling defaults of the model's generation_config are ignored: they would truncate the distribution
and bias the importance ratio. The last section of the environment keeps the process off the network.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from data_contracts.config import EngineConfig
from data_contracts.errors import InfraError
from infra.http import needs_tls

SERVED_MODEL = "policy"
HOST = "127.0.0.1"


def vllm_command(
    config: EngineConfig, model_folder: Path | str, *, port: int, seed: int = 0
) -> tuple[list[str], dict[str, str]]:
    """(argv, environment additions) of one replica that serves `model_folder` on loopback port `port`."""
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(model_folder), "--served-model-name", SERVED_MODEL]
    argv += ["--host", HOST, "--port", str(port), "--seed", str(seed), "--dtype", config.dtype]
    argv += ["--max-model-len", str(config.max_model_len), "--max-num-seqs", str(config.max_num_seqs)]
    argv += ["--block-size", str(config.block_size)]
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    argv += ["--enforce-eager", "--disable-log-stats", "--disable-uvicorn-access-log"]
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": f"{max(1, round(config.kv_cache_gib))}",
        "VLLM_CPU_OMP_THREADS_BIND": _threads(config.threads),
        "VLLM_LOGGING_LEVEL": "INFO",
        "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    return argv, environment


def _threads(setting: str) -> str:
    """vLLM's own "auto" keeps a core back, which halves throughput on small machines; ours names every visible core."""
    if setting != "auto":
        return setting
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))


def wait_ready(address: str, *, deadline_seconds: float, alive: Callable[[], bool] = lambda: True) -> float:
    """Poll /health of the replica at `address` (http://host:port) until it answers 200; returns the seconds it took.

    Raises InfraError("engine_unreachable") at the deadline, or at once when `alive()` turns false.
    """
    start = time.monotonic()
    with httpx.Client(base_url=address, timeout=5.0, trust_env=False, verify=needs_tls([address])) as client:
        while True:
            try:
                if client.get("/health").status_code == 200:
                    return time.monotonic() - start
            except httpx.TransportError:
                pass
            if not alive():
                raise InfraError("engine_unreachable", f"the vLLM process for {address} ended before it was ready; see its log")
            if time.monotonic() - start > deadline_seconds:
                raise InfraError(
                    "engine_unreachable", f"{address} was not healthy within {deadline_seconds:.0f} s; see the engine's log"
                )
            time.sleep(0.25)
