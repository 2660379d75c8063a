"""Which groups leave a batch because of a broken contract, when the iteration stops, and what is kept of them.

`decide` is pure. A row that breaks its contract takes its whole group along (the baseline is gone); a table-level finding, or
more than `max_share` of the groups, raises ContractError. `keep` stores the quarantined groups with their reasons, so nothing
is dropped silently: `campaigns/<name>/quarantine/<iteration>/<sha8 of group id>.{parquet,json}`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from data_contracts.errors import ContractError
from data_contracts.protocols import Store, to_json
from data_contracts.records import Episode, Record
from data_contracts.suites.rules import Violation
from data_contracts.tables import digest, write_group

MAX_SHARE = 0.02
"""Share of groups above which the iteration stops (rule 8)."""


class Quarantine(Record, frozen=True, kw_only=True):
    """Groups that leave the batch, each with its reasons in words."""

    reasons: dict[str, tuple[str, ...]]

    @property
    def groups(self) -> frozenset[str]:
        return frozenset(self.reasons)


def decide(
    violations: Sequence[Violation], *, groups: Collection[str], max_share: float = MAX_SHARE, file: str | None = None
) -> Quarantine:
    """The groups to leave out, of all `groups` of the batch.

    Raises ContractError for a finding about the table as a whole, for a row of an unknown group, and for more than
    `max_share` of the groups; `file` names the table in it (a store key).
    """
    reasons: dict[str, list[str]] = {}
    for violation in violations:
        if violation.row is None:
            raise _stop(violation, file=file, why="the table as a whole breaks its contract")
        if violation.group_id not in groups:
            raise _stop(violation, file=file, why=f"the row names group '{violation.group_id}', which the batch does not have")
        reasons.setdefault(violation.group_id, []).append(str(violation))
    if len(reasons) > max_share * len(groups):
        share = f"{len(reasons)} of {len(groups)} groups break their contract, more than {max_share:.0%}"
        raise _stop(violations[0], file=file, why=f"{share}; the first")
    return Quarantine(reasons={group: tuple(texts) for group, texts in reasons.items()})


def keep(
    store: Store,
    quarantine: Quarantine,
    episodes: Sequence[Episode],
    *,
    campaign: str,
    iteration: int,
) -> tuple[str, ...]:
    """Store the quarantined groups among `episodes` and their reasons; returns the keys of the reasons.

    A group whose values do not even fit the table's columns is kept as JSON. Keeping twice is harmless.
    """
    keys: list[str] = []
    for group, reasons in sorted(quarantine.reasons.items()):
        base = f"campaigns/{campaign}/quarantine/{iteration:06d}/{digest(group.encode())[:8]}"
        members = [episode for episode in episodes if episode.group_id == group]
        try:
            name, data = f"{base}.parquet", write_group(members)
        except ContractError:
            name, data = f"{base}.episodes.json", to_json(members)
        store.put_if_absent(name, data)
        note = {"group_id": group, "episodes": name, "reasons": list(reasons)}
        store.put_if_absent(f"{base}.json", to_json(note))
        keys.append(f"{base}.json")
    return tuple(keys)


def without(episodes: Sequence[Episode], quarantine: Quarantine) -> list[Episode]:
    """The episodes of the groups that stay, in order."""
    return [episode for episode in episodes if episode.group_id not in quarantine.reasons]


def _stop(violation: Violation, *, file: str | None, why: str) -> ContractError:
    return ContractError(
        f"{why}: {violation.problem}",
        file=f"{file} ({violation.table})" if file else violation.table,
        row=violation.row,
        field=violation.field,
        remedy=violation.remedy,
    )
