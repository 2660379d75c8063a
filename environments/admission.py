"""Admission of a domain: what must hold before its rewards may train anything (`bessemer domains check`).

Its oracle scores 1, a no-op and a random policy at most its declared floor, every exploit 0, two runs give equal verdicts,
recovery after malformed calls works where the domain ships such a policy, and its problems validate: none has empty criteria or
pays for doing nothing (Verifier.check). No model is involved:
scripted policies drive the same environment and verifier as a rollout does. What this cannot show is that the exploit pack
is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice

import jsonschema
import msgspec

from data_contracts.errors import InputError
from data_contracts.protocols import SandboxBackend, to_json
from data_contracts.records import Problem, Record, Split, TrustLevel
from environments.base import Domain, Policy
from environments.registry import check_grading, verifier
from environments.scripted import ScriptedEpisode, random_policy, run_scripted


class AdmissionRow(Record, frozen=True, kw_only=True):
    """One check over all tried problems; `scores` are in problem order."""

    check: str
    expected: str
    ok: bool
    scores: tuple[float, ...] = ()
    detail: str = ""


class AdmissionReport(Record, frozen=True, kw_only=True):
    """The table that `domains check` prints."""

    domain: str
    level: str
    trust: tuple[TrustLevel, ...]
    problems: int
    rows: tuple[AdmissionRow, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def table(self) -> str:
        """Plain text, one line a check."""
        head = f"{self.domain} (level {self.level}, trust {', '.join(self.trust)}, {self.problems} problems)"
        lines = [
            f"  {'ok  ' if row.ok else 'FAIL'}  {row.check:<40} expected {row.expected:<22} "
            f"{'' if not row.scores else f'mean {sum(row.scores) / len(row.scores):.3f}'} {row.detail}".rstrip()
            for row in self.rows
        ]
        return "\n".join([head, *lines])


async def check_domain(
    domain: Domain, backend: SandboxBackend | None, *, problems: int = 4, level: str = "default", seed: int = 0
) -> AdmissionReport:
    """Raises InfraError as the backend does; everything else that is wrong with the domain is a row that is not ok."""
    chosen = [p for split in _SPLITS for p in islice(domain.problems(split, seed=seed, level=level), (problems + 1) // 2)]
    rows = [_validate(domain, seed=seed, level=level)]

    async def play(check: str, expected: str, policy: Callable[[Problem], Policy], fits: Callable[[list[float]], bool]) -> None:
        runs = (run_scripted(domain, problem, policy(problem), backend=backend) for problem in chosen)
        try:
            episodes = await asyncio.gather(*runs)
        except InputError as error:  # a problem that cannot be graded, as "problems validate" says, too
            rows.append(AdmissionRow(check=check, expected=expected, ok=False, detail=str(error)))
            return
        scores = [episode.score for episode in episodes]
        ok = bool(scores) and fits(scores)
        detail = "" if ok else _explain(episodes)
        rows.append(AdmissionRow(check=check, expected=expected, ok=ok, scores=tuple(scores), detail=detail))

    def at_most_floor(scores: list[float]) -> bool:
        return sum(scores) / len(scores) <= domain.floor + 1e-9

    await play("oracle", "1 on every problem", domain.oracle, lambda scores: min(scores) >= 1.0 - 1e-9)
    recovering = getattr(domain, "recovering", None)
    if recovering is not None:
        await play("recovers after errors", "1 on every problem", recovering, lambda scores: min(scores) >= 1.0 - 1e-9)
    await play(
        "no-op",
        f"at most {domain.floor:g} on average, never 1",
        domain.noop,
        lambda scores: at_most_floor(scores) and max(scores) < 1.0 - 1e-9,
    )
    await play("random", f"at most {domain.floor:g} on average", lambda p: random_policy(p, seed=seed), at_most_floor)
    for exploit in domain.exploits():
        await play(f"exploit {exploit.name}", "0 on every problem", exploit.policy, lambda scores: max(scores) <= 0.0)
    if rows[1].scores:
        rows.append(await _repeat(domain, chosen[:2], backend=backend))
    trust = tuple(sorted({problem.verifier.trust for problem in chosen}))
    return AdmissionReport(domain=domain.name, level=level, trust=trust, problems=len(chosen), rows=tuple(rows))


_SPLITS: tuple[Split, ...] = ("train", "heldout")


async def _repeat(domain: Domain, chosen: list[Problem], *, backend: SandboxBackend | None) -> AdmissionRow:
    differing = []
    for problem in chosen:
        for name, policy in (("oracle", domain.oracle), ("no-op", domain.noop)):
            first, second = [
                to_json({"verdict": (await run_scripted(domain, problem, policy(problem), backend=backend)).verdict})
                for _ in range(2)
            ]
            if first != second:
                differing.append(f"{name} on {problem.id}")
    return AdmissionRow(
        check="the same twice", expected="equal verdicts", ok=not differing, detail=f"differs: {differing}" if differing else ""
    )


def _validate(domain: Domain, *, seed: int, level: str, sample: int = 50) -> AdmissionRow:
    """Splits disjoint, streams distinct and repeatable, problems well-formed."""
    found: list[str] = []
    by_split = {split: list(islice(domain.problems(split, seed=seed, level=level), sample)) for split in _SPLITS}
    for split, stream in by_split.items():
        again = list(islice(domain.problems(split, seed=seed, level=level), sample))
        if [to_json(p) for p in stream] != [to_json(p) for p in again]:
            found.append(f"two {split} streams of one seed differ")
        if not stream:
            found.append(f"no {split} problems")
        for problem in stream:
            found += [f"{problem.id}: {message}" for message in _faults(domain, problem, split)]
        if len({p.id for p in stream}) < len(stream):
            found.append(f"ids repeat in {split}")
    shared = {p.messages for p in by_split["train"]} & {p.messages for p in by_split["heldout"]}
    if shared:
        found.append(f"{len(shared)} prompts are in both splits")
    detail = "; ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return AdmissionRow(check="problems validate", expected="no fault", ok=not found, detail=detail)


def _faults(domain: Domain, problem: Problem, split: Split) -> Iterator[str]:
    if not problem.id.startswith(f"{domain.name}/{split}/") or problem.domain != domain.name or problem.split != split:
        yield f"id, domain and split do not fit '{domain.name}/{split}/<local id>'"
    if not problem.messages:
        yield "no messages"
    if msgspec.json.decode(to_json(problem), type=Problem) != problem:
        yield "does not survive JSON (tuples or non-string keys in settings or metadata?)"
    try:
        judge = verifier(problem.verifier.kind)
        judge.check(problem)
        kind = judge.kind
        if kind != problem.verifier.kind and ":" not in problem.verifier.kind:
            yield f"verifier '{problem.verifier.kind}' calls itself '{kind}'"
        for tool in problem.tools:
            _check_schema(to_json(tool.parameters))
        check_grading(problem)
    except (InputError, jsonschema.SchemaError) as error:
        yield str(error).splitlines()[0]


@cache
def _check_schema(parameters: bytes) -> None:
    """Raises SchemaError. Once for all problems that offer one tool: it costs milliseconds."""
    jsonschema.Draft202012Validator.check_schema(msgspec.json.decode(parameters))


def _explain(episodes: list[ScriptedEpisode]) -> str:
    worst = next((e for e in episodes if e.verdict is not None), None)
    if worst is None or worst.verdict is None:
        return f"{episodes[0].problem_id}: {episodes[0].stop_reason}" if episodes else "no problems"
    return f"{worst.problem_id}: {worst.verdict.evidence[:300]!r}"
