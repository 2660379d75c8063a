"""Curate: domains and problem files in, the ordered surplus of problems for one iteration out.

Per domain the stream is: its problems from `curate.sources` (order shuffled by the seed), then its generator. A problem
leaves the stream, and is counted in `skipped`, when it is a duplicate, when a held-out problem has the same prompt, or when its
prompt leaves no room in its token budgets. What is drawn is deterministic in (config, iteration, sampler state, success,
unused).

Curriculum: at least half of a domain's draws are new problems, so exploration never dries up; the others are drawn again
among problems with a recent success rate p, weighted by 4 p (1 - p) with a floor of 0.1: the variance of a group's rewards,
hence its signal, is largest at p = 1/2 (the idea of prioritised level replay, Jiang et al. 2021, with the learnability score
p (1 - p) of Rutherford et al. 2024). With `curriculum: false` everything is new until the stream ends, then all of it again.

The sampler's state is one number per domain entry, how far its stream was read: a few bytes for the ledger. Gap: a generator
is read from its start each time (some 10 microseconds a problem), which asks for streams below about 100,000 problems.
"""

from __future__ import annotations

import random
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from data_contracts import gate, quarantine
from data_contracts.config import CampaignConfig, DomainConfig
from data_contracts.errors import ConfigError
from data_contracts.protocols import Store, to_json
from data_contracts.records import Problem, ProblemsRef, Split
from data_contracts.tables import put_problems
from environments.registry import domain, domain_names
from tasks.sources import read_sources

CountTokens = Callable[[Problem], int]
EXPLORE = 0.5
"""Least share of new problems among a domain's draws."""
FLOOR = 0.1
"""Weight of a problem that always or never succeeds, against 1 at a success rate of one half."""
SCAN = 20_000
"""Problems in a row that may be skipped before a stream counts as ended."""


@dataclass(frozen=True, kw_only=True)
class Curation:
    """`skipped`: reason -> problems left out in this call. `drawn`: domain -> problems handed out."""

    problems: ProblemsRef
    sampler_state: dict[str, Any]
    skipped: dict[str, int]
    drawn: dict[str, int]


def curate(
    config: CampaignConfig,
    *,
    iteration: int,
    sampler_state: Mapping[str, Any],
    success: Mapping[str, float],
    store: Store,
    key: str,
    count_tokens: CountTokens | None = None,
    context_tokens: int | None = None,
    unused: Collection[str] = (),
) -> Curation:
    """Draw `groups + surplus` problems and store them under `key`.

    `success`: problem id -> recent mean reward. `unused`: ids handed out before and not attempted
    (`BatchManifest.unused_problem_ids`); they come first. `count_tokens`: tokens of a problem's first prompt, tools included.
    `context_tokens`: the engine's longest sequence, which caps every episode's budget (None: not known).
    Raises InputError for a bad source file, ConfigError when fewer than `groups` problems are left, ContractError when more
    than 2 % of the drawn problems break their contract.
    """
    wanted = config.curate.groups + config.curate.surplus
    skipped: Counter[str] = Counter()
    sources = _sources(config)
    banned = {_prompt(problem) for problem in _all_heldout(config, sources)}
    accept = _Filter(config, banned=banned, count_tokens=count_tokens, skipped=skipped, context_tokens=context_tokens)
    state: dict[str, int] = {}
    rates = {name: _rate(config, reward) for name, reward in success.items()}
    drawn: dict[str, list[Problem]] = {}
    for entry, quota in _quotas(config.domains, wanted).items():
        settings = config.domains[entry]
        name = _entry_name(entry, settings)
        stream = _stream(config, settings, sources, "train")
        pool = _Pool(stream, read=int(sampler_state.get("read", {}).get(name, 0)), accept=accept)
        rng = random.Random(f"curate:{config.seed}:{iteration}:{name}")
        drawn[name] = _draw(pool, quota, rates=rates, unused=unused, curriculum=config.curate.curriculum, rng=rng)
        state[name] = pool.read
    problems = _interleave(config.domains, drawn)
    if len(problems) < config.curate.groups:
        raise ConfigError(
            f"only {len(problems)} problems are left for {config.curate.groups} groups (left out: {dict(skipped) or 'none'})",
            field="campaign.curate.groups",
            remedy="Add problems or domains, lower groups, or raise max_prompt_tokens",
        )
    broken = quarantine.decide(gate.check_problems(problems), groups={p.id for p in problems}, file=key)
    skipped["contract"] += len(broken.groups)
    kept = [problem for problem in problems if problem.id not in broken.groups]
    return Curation(
        problems=put_problems(store, key, kept),
        sampler_state={"read": state},
        skipped={reason: count for reason, count in sorted(skipped.items()) if count},
        drawn=dict(sorted(Counter(problem.domain for problem in kept).items())),
    )


def heldout(config: CampaignConfig, *, count_tokens: CountTokens | None = None) -> tuple[Problem, ...]:
    """The fixed held-out problems: for each domain the first `heldout` of its sources, then of its generator. Never depends
    on the iteration. Raises ConfigError when a domain has none although the configuration asks for some."""
    sources = _sources(config)
    accept = _Filter(config, banned=frozenset(), count_tokens=count_tokens, skipped=Counter())
    chosen: list[Problem] = []
    for settings in config.domains:
        pool = _Pool(_stream(config, settings, sources, "heldout"), read=0, accept=accept)
        found = pool.new(settings.heldout)
        if settings.heldout and not found:
            raise ConfigError(
                f"domain '{settings.name}' has no held-out problem that fits",
                field="campaign.domains",
                remedy="Set heldout: 0 for it, or raise campaign.curate.max_prompt_tokens",
            )
        chosen += found
    return tuple(chosen)


# ----------------------------------------------------------------------------------------------------------------- streams


def _sources(config: CampaignConfig) -> tuple[Problem, ...]:
    return read_sources(config.curate.sources, domains=domain_names()) if config.curate.sources else ()


def _stream(config: CampaignConfig, settings: DomainConfig, sources: Sequence[Problem], split: Split) -> Iterator[Problem]:
    """All problems of one domain entry and split: files first, then the generator."""
    own = [problem for problem in sources if problem.domain == settings.name and problem.split == split]
    if split == "train":
        random.Random(f"sources:{config.seed}:{settings.name}").shuffle(own)
    generator = domain(settings.name).problems(split, seed=config.seed, level=settings.level, **settings.settings)
    return chain(own, generator)


def _all_heldout(config: CampaignConfig, sources: Sequence[Problem]) -> Iterator[Problem]:
    """Whatever no train problem may repeat: the problems `evaluate` uses and every held-out row of the files."""
    yield from (problem for problem in sources if problem.split == "heldout")
    yield from heldout(config)


class _Filter:
    """Whether a problem may be drawn; remembers what it saw, so a problem passes once a call, and counts the reasons."""

    def __init__(
        self,
        config: CampaignConfig,
        *,
        banned: Collection[str],
        count_tokens: CountTokens | None,
        skipped: Counter[str],
        context_tokens: int | None = None,
    ) -> None:
        self.config, self.banned, self.count_tokens, self.skipped = config, banned, count_tokens, skipped
        self.caps = [cap for cap in (config.rollout.max_episode_tokens, context_tokens) if cap is not None]
        self.ids: set[str] = set()
        self.prompts: set[str] = set()

    def fresh(self, problem: Problem, *, new: bool) -> bool:
        """Neither a duplicate nor a held-out prompt. Cheap, so it runs over all of a stream; only `new` ones are counted."""
        prompt = _prompt(problem)
        reason = None
        if problem.id in self.ids or prompt in self.prompts:
            reason = "duplicate"
        elif prompt in self.banned:
            reason = "held_out"
        self.ids.add(problem.id)
        self.prompts.add(prompt)
        return self._count(reason) if new else reason is None

    def fits(self, problem: Problem) -> bool:
        """The first prompt is short enough and leaves a turn's room in the episode. Tokenises, so only what may be drawn."""
        if self.count_tokens is None:
            return True
        tokens = self.count_tokens(problem)
        if tokens > self.config.curate.max_prompt_tokens:
            return self._count("prompt_too_long")
        room = min([problem.budgets.max_episode_tokens, *self.caps])
        return self._count("no_room_for_a_turn" if tokens + problem.budgets.max_tokens_per_turn > room else None)

    def _count(self, reason: str | None) -> bool:
        if reason is not None:
            self.skipped[reason] += 1
        return reason is None


class _Pool:
    """One stream, read up to `read`: `seen` are its problems before that point, `new` reads on."""

    def __init__(self, stream: Iterator[Problem], *, read: int, accept: _Filter) -> None:
        self.stream, self.read, self.accept = stream, 0, accept
        self.seen: list[Problem] = []
        while self.read < read and (problem := self._next()) is not None:
            if accept.fresh(problem, new=False):
                self.seen.append(problem)

    def new(self, count: int) -> list[Problem]:
        """Up to `count` problems never handed out before; fewer when the stream has ended."""
        found: list[Problem] = []
        misses = 0
        while len(found) < count and misses < SCAN and (problem := self._next()) is not None:
            if self.accept.fresh(problem, new=True) and self.accept.fits(problem):
                found.append(problem)
                misses = 0
            else:
                misses += 1
        return found

    def _next(self) -> Problem | None:
        problem = next(self.stream, None)
        self.read += problem is not None
        return problem


# ---------------------------------------------------------------------------------------------------------------- sampling


def _draw(
    pool: _Pool,
    count: int,
    *,
    rates: Mapping[str, float],
    unused: Collection[str],
    curriculum: bool,
    rng: random.Random,
) -> list[Problem]:
    """`count` problems of one domain entry, the unused ones first; fewer when it has no more."""
    waiting = set(unused)
    returned = [problem for problem in pool.seen if problem.id in waiting][:count]
    again = [problem for problem in pool.seen if problem.id not in waiting]
    tried = [problem for problem in again if problem.id in rates] if curriculum else []
    room = count - len(returned)
    repeats = _weighted(tried, min(room, int(count * (1 - EXPLORE))), rates=rates, rng=rng, accept=pool.accept)
    new = pool.new(room - len(repeats))
    missing = room - len(repeats) - len(new)
    if missing:  # the stream has ended: all of it again
        taken = {problem.id for problem in repeats}
        rest = [problem for problem in again if problem.id not in taken]
        repeats += _weighted(rest, missing, rates=rates if curriculum else {}, rng=rng, accept=pool.accept)
    mixed = [*repeats, *new]
    rng.shuffle(mixed)
    return [*returned, *mixed]


def _weighted(
    problems: Sequence[Problem], count: int, *, rates: Mapping[str, float], rng: random.Random, accept: _Filter
) -> list[Problem]:
    """`count` of `problems` without replacement, by weight (Efraimidis and Spirakis 2006); unknown rates weigh 1."""
    keyed = []
    for problem in problems:
        rate = rates.get(problem.id, 0.5)
        keyed.append((rng.random() ** (1 / max(FLOOR, 4 * rate * (1 - rate))), problem.id, problem))
    chosen: list[Problem] = []
    for _, _, problem in sorted(keyed, key=lambda one: one[:2], reverse=True):
        if len(chosen) == count:
            break
        if accept.fits(problem):
            chosen.append(problem)
    return chosen


def _rate(config: CampaignConfig, reward: float) -> float:
    """A mean reward as a share of the configured range."""
    low, high = config.reward.low, config.reward.high
    return min(1.0, max(0.0, (reward - low) / (high - low))) if high > low else 0.5


def _quotas(domains: Sequence[DomainConfig], wanted: int) -> dict[int, int]:
    """Entry index -> how many of `wanted` problems, by weight."""
    counts = Counter(_order(domains, wanted))
    return {entry: counts[entry] for entry in range(len(domains))}


def _order(domains: Sequence[DomainConfig], wanted: int) -> list[int]:
    """Entries in smooth weighted round robin: every beginning of the list is close to the weights, and that matters because
    sealing takes the first usable groups."""
    total = sum(settings.weight for settings in domains)
    credit = [0.0] * len(domains)
    order: list[int] = []
    for _ in range(wanted):
        credit = [have + settings.weight for have, settings in zip(credit, domains, strict=True)]
        entry = max(range(len(domains)), key=lambda i: (credit[i], -i))
        credit[entry] -= total
        order.append(entry)
    return order


def _interleave(domains: Sequence[DomainConfig], drawn: Mapping[str, list[Problem]]) -> list[Problem]:
    """The draws of all entries as one list in the order of `_order`."""
    queues = {entry: iter(drawn[_entry_name(entry, settings)]) for entry, settings in enumerate(domains)}
    total = sum(len(problems) for problems in drawn.values())
    merged: list[Problem] = []
    for entry in _order(domains, total):
        if (problem := next(queues[entry], None)) is not None:
            merged.append(problem)
    for queue in queues.values():
        merged.extend(queue)
    return merged


def _entry_name(entry: int, settings: DomainConfig) -> str:
    return f"{entry}:{settings.name}/{settings.level}"


def _prompt(problem: Problem) -> str:
    """What makes two problems the same: the normalised text of the prompt, and, where files in a sandbox are part of the
    question, the environment's settings."""
    text = "\n".join(message.content for message in problem.messages)
    normal = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    if problem.environment.sandbox is None:
        return normal
    return normal + "\0" + to_json(problem.environment.settings).decode()
