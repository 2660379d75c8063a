"""Token ids in, token ids out, from vLLM replicas over `/inference/v1/generate`.

A session (an episode) sticks to one replica by hash, so its prefix stays cached there. Every sampled token carries the label of
the weights that drew it; the only accepted label is `<campaign>@<version>` (versions.py). Tokens drawn while a replica is being
proven are thrown away and drawn again, within the same deadline.

Log-probabilities are those of the distribution really sampled from (after temperature; top-p and top-k off). A prompt that
fills the context gives no tokens and finish reason "length"; otherwise `max_tokens` is cut to what fits. When our deadline
passes the connection is dropped, which makes vLLM abort the request. Requests that name the same `together` and are equal
otherwise become one request for n choices (together.py).

Gap: no failover inside a session; a lost replica fails the group, which is run again (rule 3).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

import httpx
import msgspec

from data_contracts.errors import InfraError, VersionMismatch
from data_contracts.records import FinishReason, SampleRequest, SampleResult, VersionSpan
from infra.http import needs_tls
from models.serving.together import Together
from models.serving.versions import PROVING, cache_salt_of, label_of, version_of

_FLOOR = -9999.0
_NOT_FINISHED = ("abort", "error")
"""The engine stopped (it shuts down, or somebody aborted its requests), not the policy: half a turn must not be graded."""
_RETRY_SECONDS = 0.25
_MOST_CONNECTIONS = 2048


class _LogProb(msgspec.Struct):
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Response(msgspec.Struct):
    choices: list[_Choice]


class _Card(msgspec.Struct):
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Card]


class VllmSampler:
    """Samples for one campaign. With `version` given, tokens of any other version are refused unless `newer` is "accept"
    (rollouts that overlap a publish); without it any version of the campaign will do."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        campaign: str,
        version: int | None = None,
        newer: Literal["refuse", "accept"] = "refuse",
        most_together: int = 16,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        """`most_together` is the largest n of one request; engines refuse an n above their max_num_seqs."""
        if not addresses:
            raise InfraError("engine_unreachable", "no serving replica is left; see the publish result for why each went")
        self._addresses = [address.rstrip("/") for address in addresses]
        self._campaign, self._version, self._newer = campaign, version, newer
        limits = httpx.Limits(
            max_connections=_MOST_CONNECTIONS,
            max_keepalive_connections=_MOST_CONNECTIONS,
            keepalive_expiry=2.0,  # below the server's own 5 s, so that it never closes a connection we are about to use
        )
        verify = needs_tls(self._addresses)
        self._client = client or httpx.AsyncClient(
            limits=limits,
            timeout=None,  # noqa: S113  # deadline per call
            trust_env=False,
            verify=verify,
        )
        self._together: Together[_Choice] = Together(most=most_together)
        self._context: dict[str, int] = {}

    async def sample(self, request: SampleRequest, *, deadline_seconds: float) -> SampleResult:
        """Raises InfraError("engine_unreachable" | "sampling_deadline") or VersionMismatch."""
        address = self.replica(request.together or request.session)
        try:
            async with asyncio.timeout(deadline_seconds):
                return await self._sample(address, request)
        except TimeoutError as error:
            raise InfraError(
                "sampling_deadline",
                f"{address} did not answer {request.request_id} within {deadline_seconds:g} s; is it paused or overloaded?",
            ) from error

    def replica(self, session: str) -> str:
        """The address that `session` sticks to."""
        digest = hashlib.blake2b(session.encode(), digest_size=8).digest()
        return self._addresses[int.from_bytes(digest, "big") % len(self._addresses)]

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> VllmSampler:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---------------------------------------------------------------------------------------------------------- one sample

    async def _sample(self, address: str, request: SampleRequest) -> SampleResult:
        room = await self._context_length(address) - len(request.token_ids)
        if room < 1 or request.max_tokens < 1:
            return SampleResult(token_ids=(), logprobs=(), spans=(), finish_reason="length", engine=address)
        body = self._body(request, max_tokens=min(room, request.max_tokens))
        while True:
            choice = await self._choice(address, request, body)
            labels = choice.weight_versions or []
            if not any(span.version.startswith(PROVING) for span in labels):
                return self._result(address, choice, request)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _choice(self, address: str, request: SampleRequest, body: dict[str, Any]) -> _Choice:
        async def ask(n: int) -> list[_Choice]:
            parameters = body["sampling_params"] | {"n": n}
            sent = body | {"sampling_params": parameters}
            answer: _Response = await self._call(address, "POST", "/inference/v1/generate", _Response, sent)
            if len(answer.choices) != n:
                raise InfraError("engine_unreachable", f"{address} answered {len(answer.choices)} of {n} choices")
            return answer.choices

        if not request.together or request.seed is not None:  # n choices of one seed are not n requests with that seed
            return (await ask(1))[0]
        equal = (address, request.together, request.token_ids, msgspec.json.encode(body["sampling_params"]))
        return await self._together.one(equal, ask)

    def _body(self, request: SampleRequest, *, max_tokens: int) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": request.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "logprobs": 0,
            "detokenize": False,
            "stop_token_ids": list(request.stop_token_ids),
        }
        if request.seed is not None:
            parameters["seed"] = request.seed
        body: dict[str, Any] = {
            "request_id": request.request_id,
            "token_ids": list(request.token_ids),
            "sampling_params": parameters,
        }
        if self._version is not None:
            body["cache_salt"] = cache_salt_of(label_of(self._campaign, self._version))
        return body

    def _result(self, address: str, choice: _Choice, request: SampleRequest) -> SampleResult:
        ids = choice.token_ids
        if choice.finish_reason in _NOT_FINISHED:
            raise InfraError(
                "engine_unreachable", f"{address} gave {request.request_id} up ({choice.finish_reason}) after {len(ids)} tokens"
            )
        entries = (choice.logprobs.content if choice.logprobs else None) or []
        if len(entries) != len(ids):
            raise InfraError(
                "engine_unreachable", f"{address} answered {len(ids)} tokens with {len(entries)} log-probabilities"
            )
        return SampleResult(
            token_ids=tuple(ids),
            logprobs=tuple(max(entry.logprob, _FLOOR) for entry in entries),
            spans=self._spans(address, choice, len(ids)),
            finish_reason=_finish(choice.finish_reason),
            engine=address,
        )

    def _spans(self, address: str, choice: _Choice, length: int) -> tuple[VersionSpan, ...]:
        spans: list[VersionSpan] = []
        for span in choice.weight_versions or []:
            version = version_of(span.version, campaign=self._campaign)
            wanted = self._version
            fits = version is not None and (
                wanted is None or version == wanted or (self._newer == "accept" and version > wanted)
            )
            if version is None or not fits:
                asked = label_of(self._campaign, wanted) if wanted is not None else f"{self._campaign}@<version>"
                raise VersionMismatch(
                    f"{address} sampled with weights labelled '{span.version}', not '{asked}'; publish that version first "
                    "(a restarted replica serves the base model again under the label 'default')"
                )
            if span.end > span.start:
                spans.append(VersionSpan(start=span.start, stop=span.end, version=version))
        if sum(span.stop - span.start for span in spans) != length:
            raise VersionMismatch(f"{address} labelled only part of its {length} tokens: {spans}")
        return tuple(spans)

    async def _context_length(self, address: str) -> int:
        if address not in self._context:
            models = await self._call(address, "GET", "/v1/models", _Models, None)
            self._context[address] = models.data[0].max_model_len
        return self._context[address]

    async def _call(self, address: str, method: str, path: str, kind: type[Any], body: dict[str, Any] | None) -> Any:
        content = None if body is None else msgspec.json.encode(body)
        try:
            response = await self._client.request(
                method, address + path, content=content, headers={"content-type": "application/json"}
            )
        except httpx.TransportError as error:
            raise InfraError("engine_unreachable", f"{address}{path}: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code != httpx.codes.OK:
            raise InfraError("engine_unreachable", f"{address}{path} answered {response.status_code}: {response.text[:300]}")
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.DecodeError as error:
            raise InfraError("engine_unreachable", f"{address}{path} answered something else than expected: {error}") from error


def _finish(reason: str | None) -> FinishReason:
    return "length" if reason == "length" else "stop"
