"""One vLLM replica's development endpoints as calls with deadlines. Loopback or private networks only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import httpx

from data_contracts.errors import InfraError
from infra.http import needs_tls

_POLL_SECONDS = 0.5


class ReplicaControl:
    """Calls on one replica until `deadline` (of time.monotonic). Every failure is InfraError("engine_unreachable")."""

    def __init__(self, address: str, *, deadline: float) -> None:
        self.address, self._deadline = address.rstrip("/"), deadline
        self._client = httpx.Client(base_url=self.address, trust_env=False, verify=needs_tls([self.address]))

    def __enter__(self) -> ReplicaControl:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._client.close()

    def wait_healthy(self, give_up: Callable[[], float]) -> None:
        """A replica may be restarting: poll until `give_up()` (of time.monotonic, asked again before every wait)."""
        while True:
            try:
                if self._client.get("/health", timeout=5.0).status_code == httpx.codes.OK:
                    return
                why = "it answers /health with an error"
            except httpx.TransportError as error:
                why = f"{type(error).__name__} {error}".rstrip()
            if time.monotonic() + _POLL_SECONDS > give_up():
                raise InfraError("engine_unreachable", f"{self.address} did not become healthy in time: {why}")
            time.sleep(_POLL_SECONDS)

    def label(self) -> str:
        return str(self._call("GET", "/weight_info")["weight_version"])

    def is_paused(self) -> bool:
        return bool(self._call("GET", "/is_paused")["is_paused"])

    def pause(self) -> None:
        """Requests in flight freeze and go on after `resume`."""
        self._call("POST", "/pause?mode=keep")

    def resume(self) -> None:
        self._call("POST", "/resume")

    def reload(self, folder: str) -> None:
        self._call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})

    def set_label(self, label: str) -> None:
        self._call("POST", "/update_weight_version", {"new_version": label})

    def reset_prefix_cache(self) -> None:
        """Answers 200 with success=false while frozen requests hold blocks: those are then preempted, to be computed anew."""
        if self._call("POST", "/reset_prefix_cache")["success"]:
            return
        if not self._call("POST", "/reset_prefix_cache?reset_running_requests=true")["success"]:
            raise InfraError("engine_unreachable", f"{self.address} would not drop the prefix cache of the old weights")

    def checksums(self) -> dict[str, str]:
        """Digest of every tensor that the replica holds."""
        return dict(self._call("POST", "/weight_checker", {"action": "checksum"})["checksums"])

    def decode(self, prompts: Sequence[Sequence[int]], *, tokens: int) -> list[tuple[list[int], list[float]]]:
        """`tokens` sampled ids and log-probabilities for each prompt, all at once, at temperature 1."""

        def one(prompt: Sequence[int]) -> tuple[list[int], list[float]]:
            parameters = {"max_tokens": tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
            body = {"token_ids": list(prompt), "sampling_params": parameters}
            choice = self._call("POST", "/inference/v1/generate", body)["choices"][0]
            return list(choice["token_ids"]), [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]

        with ThreadPoolExecutor(max_workers=max(1, len(prompts))) as pool:
            return list(pool.map(one, prompts))

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise InfraError("engine_unreachable", f"{self.address}{path}: the publish deadline has passed")
        try:
            response = self._client.request(method, path, json=body, timeout=left)
        except httpx.TransportError as error:
            raise InfraError("engine_unreachable", f"{self.address}{path}: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code != httpx.codes.OK:
            raise InfraError(
                "engine_unreachable", f"{self.address}{path} answered {response.status_code}: {response.text[:300]}"
            )
        try:
            return response.json() if response.content else {}
        except ValueError as error:
            raise InfraError("engine_unreachable", f"{self.address}{path} did not answer JSON") from error
