"""Recorded tokens, so that two runs can be compared row by row (rule 9).

A sample is found by its session and the digest of the token ids it was asked to continue: a turn that is asked again gets the
same tokens, and an episode that has taken another course finds nothing and says so. A recording comes from a `RecordingSampler`
around a real one (a JSON line per sample) or from stored episodes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from data_contracts.errors import InputError
from data_contracts.protocols import Sampler, to_json
from data_contracts.records import Episode, Record, SampleRequest, SampleResult, VersionSpan

Key = tuple[str, str]


class RecordedSample(Record, frozen=True, kw_only=True):
    """One line of a recording file."""

    session: str
    prompt: str
    result: SampleResult


def prompt_digest(token_ids: Sequence[int]) -> str:
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()


class ReplaySampler:
    """Answers from a recording; the same request always gets the same answer."""

    def __init__(self, samples: Iterable[RecordedSample]) -> None:
        self._samples: dict[Key, SampleResult] = {(sample.session, sample.prompt): sample.result for sample in samples}

    @classmethod
    def from_file(cls, path: Path) -> ReplaySampler:
        """Raises InputError naming file and row for a line that is not a RecordedSample."""
        samples: list[RecordedSample] = []
        with path.open("rb") as lines:
            for row, line in enumerate(lines, start=1):
                try:
                    samples.append(msgspec.json.decode(line, type=RecordedSample))
                except msgspec.DecodeError as error:
                    raise InputError(
                        str(error), file=str(path), row=row, remedy="Record it again with RecordingSampler."
                    ) from error
        return cls(samples)

    @classmethod
    def from_episodes(cls, episodes: Iterable[Episode]) -> ReplaySampler:
        """Every turn of stored episodes, as the sampler answered it then."""
        return cls(sample for episode in episodes for sample in recorded_turns(episode))

    async def sample(self, request: SampleRequest, *, deadline_seconds: float) -> SampleResult:
        """Raises InputError when the recording has no such sample: the run does not repeat the recorded one."""
        found = self._samples.get((request.session, prompt_digest(request.token_ids)))
        if found is None:
            raise InputError(
                f"the recording holds no sample of session '{request.session}' after these {len(request.token_ids)} tokens",
                remedy="Replay with the configuration and seed of the recorded run.",
            )
        return found

    async def close(self) -> None:
        return None


class RecordingSampler:
    """Passes requests on to `sampler` and appends every answer to `path` as a JSON line."""

    def __init__(self, sampler: Sampler, path: Path) -> None:
        self._sampler = sampler
        self._file = path.open("ab", buffering=0)

    async def sample(self, request: SampleRequest, *, deadline_seconds: float) -> SampleResult:
        result = await self._sampler.sample(request, deadline_seconds=deadline_seconds)
        line = RecordedSample(session=request.session, prompt=prompt_digest(request.token_ids), result=result)
        self._file.write(to_json(line) + b"\n")
        return result

    async def close(self) -> None:
        self._file.close()
        await self._sampler.close()


def recorded_turns(episode: Episode) -> list[RecordedSample]:
    """One sample a turn: what was asked is everything before `token_start`."""
    samples: list[RecordedSample] = []
    for turn in episode.turns:
        start, stop = turn.token_start, turn.token_stop
        spans = tuple(
            VersionSpan(start=max(span.start, start) - start, stop=min(span.stop, stop) - start, version=span.version)
            for span in episode.spans
            if span.start < stop and span.stop > start
        )
        result = SampleResult(
            token_ids=episode.token_ids_T[start:stop],
            logprobs=episode.logprobs_T[start:stop],
            spans=spans,
            finish_reason=turn.finish_reason,
            engine="replay",
        )
        samples.append(RecordedSample(session=episode.id, prompt=prompt_digest(episode.token_ids_T[:start]), result=result))
    return samples
