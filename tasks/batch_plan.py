"""Which groups to run next and when a batch may be sealed: a pure state machine over graded groups.

Problems come in curated order. A batch wants `groups` usable ones; a discarded group (equal rewards, infrastructure failure,
quarantine) widens the front by one, within `refill_budget` and the problems there are. By default the batch is the first usable
groups in curated order, so it depends on the outcomes alone and never on who finished first. With `oversubscribe` further
groups run beside them and the batch is sealed in order of completion instead (faster with stragglers, not reproducible).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from data_contracts.records import GroupShard


@dataclass(kw_only=True)
class BatchPlan:
    """Mutable, single-threaded. `problems` is how many were curated."""

    groups: int
    problems: int
    refill_budget: int
    oversubscribe: int = 0
    window: int = 0
    finished: dict[int, GroupShard] = field(default_factory=dict)
    arrival: list[int] = field(default_factory=list)
    in_flight: set[int] = field(default_factory=set)

    def submitted(self, order: int) -> None:
        self.in_flight.add(order)

    def record(self, shard: GroupShard) -> None:
        """A group that is over: kept, or discarded for good."""
        self.in_flight.discard(shard.order)
        if shard.order not in self.finished:
            self.arrival.append(shard.order)
        self.finished[shard.order] = shard

    def next_orders(self) -> list[int]:
        """Orders to submit now, in curated order."""
        if self.sealable():
            return []
        front = min(self.problems, self._front() + self.oversubscribe)
        waiting = [order for order in range(front) if order not in self.finished and order not in self.in_flight]
        return waiting[: max(0, self.window - len(self.in_flight))] if self.window else waiting

    def sealable(self) -> bool:
        if self.oversubscribe and sum(self._kept(order) for order in self.finished) >= self.groups:
            return True
        return all(order in self.finished for order in range(self._front()))

    def batch(self) -> tuple[GroupShard, ...]:
        """The groups to train on, in curated order. Equal-reward groups fill up when the refills are spent."""
        walk = self.arrival if self.oversubscribe else range(self._front())
        kept = [order for order in walk if self._kept(order)][: self.groups]
        spare = [order for order in walk if order in self.finished and self.finished[order].disposition == "zero_variance"]
        chosen = sorted(kept + spare[: self.groups - len(kept)])
        return tuple(self.finished[order] for order in chosen)

    def discarded(self) -> tuple[GroupShard, ...]:
        """Graded or dropped groups that are not in the batch."""
        chosen = {shard.order for shard in self.batch()}
        return tuple(self.finished[order] for order in sorted(self.finished) if order not in chosen)

    def unused(self) -> list[int]:
        """Orders that were never finished: they return to the sampler."""
        return [order for order in range(self.problems) if order not in self.finished]

    def dropped(self) -> int:
        """Groups lost to infrastructure."""
        return sum(shard.disposition == "infra_failure" for shard in self.finished.values())

    def _kept(self, order: int) -> bool:
        return order in self.finished and self.finished[order].disposition == "kept"

    def _front(self) -> int:
        """How many problems, in curated order, the batch needs as far as is known now."""
        front = min(self.groups, self.problems)
        while True:
            lost = sum(1 for order in range(front) if order in self.finished and not self._kept(order))
            wider = min(self.groups + min(lost, self.refill_budget), self.problems)
            if wider <= front:
                return front
            front = wider
