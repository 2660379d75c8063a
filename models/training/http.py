"""The trainer's HTTP face: a Starlette app over a Desk, served by uvicorn in a thread on 127.0.0.1."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from data_contracts.errors import BessemerError, InputError, StaleWriter, TrainerError
from data_contracts.protocols import to_json
from data_contracts.records import CheckpointRef, Record, TrainJob

HOST = "127.0.0.1"


class LogprobsRequest(Record, frozen=True, kw_only=True):
    """Body of POST /logprobs."""

    checkpoint: CheckpointRef
    sequences: list[list[int]]


class Work(Protocol):
    """What the app needs of a Desk."""

    def submit(self, work: str, payload: Any = None) -> Future[Any]: ...

    def submit_train(self, job: TrainJob) -> Future[Any]: ...

    def status(self) -> dict[str, Any]: ...


def build_app(desk: Work) -> Starlette:
    """The routes of the table in worker.py."""

    async def status(request: Request) -> Response:
        return _json(desk.status())

    async def train(request: Request) -> Response:
        try:
            job = msgspec.json.decode(await request.body(), type=TrainJob)
            return _json(await _wait(desk.submit_train(job)))
        except (BessemerError, msgspec.MsgspecError) as error:
            return _refusal(error)

    async def logprobs(request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=LogprobsRequest)
            return _json({"logprobs": await _wait(desk.submit("logprobs", (body.checkpoint, body.sequences)))})
        except (BessemerError, msgspec.MsgspecError) as error:
            return _refusal(error)

    async def shutdown(request: Request) -> Response:
        return _json({"saved": await _wait(desk.submit("shutdown"))})

    return Starlette(
        routes=[
            Route("/status", status, methods=["GET"]),
            Route("/train", train, methods=["POST"]),
            Route("/logprobs", logprobs, methods=["POST"]),
            Route("/shutdown", shutdown, methods=["POST"]),
        ]
    )


async def _wait(answer: Future[Any]) -> Any:
    return await asyncio.shield(asyncio.wrap_future(answer))  # a caller that hangs up does not cancel the work


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status_code=status, media_type="application/json")


def _refusal(error: Exception) -> Response:
    status = 409 if isinstance(error, StaleWriter) else 422 if isinstance(error, (InputError, msgspec.MsgspecError)) else 500
    kind = type(error).__name__ if isinstance(error, BessemerError) else TrainerError.__name__
    return _json({"kind": kind, "message": str(error)}, status)


class HttpThread:
    """uvicorn beside the main thread, which computes."""

    def __init__(self, desk: Work, *, port: int) -> None:
        config = uvicorn.Config(build_app(desk), host=HOST, port=port, log_level="warning", access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True, name="trainer-http")

    def start(self, *, seconds: float = 30.0) -> None:
        """Returns when the port answers. Raises TrainerError when it is taken or nothing answers in `seconds`."""
        address = (HOST, self._server.config.port)
        try:
            self._socket.bind(address)
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise TrainerError(f"cannot listen on {HOST}:{address[1]} ({error}); is another trainer running there?") from error
        self._thread.start()
        deadline = time.monotonic() + seconds
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise TrainerError(f"the HTTP server on {HOST}:{address[1]} did not start within {seconds:.0f} s")
            time.sleep(0.02)

    def stop(self) -> None:
        """Let answers leave, then close."""
        time.sleep(0.2)
        self._server.should_exit = True
        self._thread.join(timeout=5.0)
        self._socket.close()
