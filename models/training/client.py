"""HttpTrainer: the loop's side of the trainer. Jobs are idempotent by key, so a lost connection is simply asked again.

It waits for a trainer that is starting or being restarted until the job's own deadline. A trainer that dies on the same
request several times is reported instead of restarted for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec

from data_contracts import errors
from data_contracts.errors import BessemerError, InputError, TrainerError
from data_contracts.protocols import to_json
from data_contracts.records import CheckpointRef, TrainJob, TrainResult
from infra.http import needs_tls

MOST_LOST_ANSWERS = 5


class HttpTrainer:
    """Protocol Trainer over HTTP. `address` is http://host:port; `seconds` bounds calls that carry no deadline themselves."""

    def __init__(self, address: str, *, seconds: float = 600.0, sleep: Callable[[float], None] = time.sleep) -> None:
        self.address, self.seconds, self._sleep = address.rstrip("/"), seconds, sleep
        fresh = httpx.Limits(max_keepalive_connections=0)  # a kept connection to a trainer that was restarted would look lost
        self._client = httpx.Client(trust_env=False, verify=needs_tls([self.address]), limits=fresh)

    def train(self, job: TrainJob) -> TrainResult:
        """Idempotent by `job.key`. Waits at most `train.seconds` of the job. Raises StaleWriter, TrainerError, InputError."""
        seconds = float(job.train.get("train", {}).get("seconds", self.seconds))
        return msgspec.json.decode(self._post("/train", to_json(job), seconds), type=TrainResult)

    def logprobs(self, checkpoint: CheckpointRef, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        body = to_json({"checkpoint": checkpoint, "sequences": [list(ids) for ids in sequences]})
        answer = msgspec.json.decode(self._post("/logprobs", body, self.seconds), type=dict[str, list[list[float]]])
        return answer["logprobs"]

    def status(self) -> dict[str, Any]:
        """What the trainer holds and does right now. Raises TrainerError when it does not answer."""
        try:
            answer = self._client.get(f"{self.address}/status", timeout=5.0)
        except httpx.TransportError as error:
            raise TrainerError(f"no trainer answers at {self.address} ({error}); start it with `bessemer up`") from error
        return msgspec.json.decode(answer.content, type=dict[str, Any])

    def shutdown(self) -> bool:
        """Save the full state and end the trainer; True when there was a state to save."""
        answer = self._client.post(f"{self.address}/shutdown", timeout=self.seconds)
        return bool(msgspec.json.decode(answer.content, type=dict[str, Any])["saved"])

    def _post(self, path: str, body: bytes, seconds: float) -> bytes:
        deadline, lost = time.monotonic() + seconds, 0
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TrainerError(f"no answer from the trainer at {self.address}{path} within {seconds:.0f} s; see its log")
            try:
                answer = self._client.post(
                    f"{self.address}{path}", content=body, timeout=httpx.Timeout(left, connect=min(left, 5.0))
                )
            except (httpx.ConnectError, httpx.ConnectTimeout):  # starting, or being restarted
                self._sleep(min(0.5, max(left, 0)))
                continue
            except httpx.TimeoutException:
                continue  # the loop's head reports the deadline
            except httpx.TransportError as error:  # it went away while it worked on this
                lost += 1
                if lost >= MOST_LOST_ANSWERS:
                    raise TrainerError(f"the trainer at {self.address} died {lost} times on {path}; see its log") from error
                self._sleep(0.5)
                continue
            if answer.status_code == 200:
                return answer.content
            raise _error(answer)


def _error(answer: httpx.Response) -> BessemerError:
    """The error that the trainer named, as that class where it can be built from a message."""
    try:
        body = msgspec.json.decode(answer.content, type=dict[str, str])
    except msgspec.MsgspecError:
        return TrainerError(f"the trainer answered {answer.status_code}: {answer.text[:500]}")
    kind = getattr(errors, body.get("kind", ""), TrainerError)
    message = body.get("message", answer.text)
    if isinstance(kind, type) and issubclass(kind, (InputError, TrainerError, errors.StaleWriter)):
        return kind(message)
    return TrainerError(f"{body.get('kind')}: {message}")
