"""Shared prefixes once: the sequences of a group become one row, a trie in depth-first order. Numpy only, no model.

Sorted sequences are laid out one after another; each adds only the tokens after its longest common prefix with the one before
it, so prompts, shared turns and even equal completions are stored once. Node i lies at depth `position`, and its subtree is
the index range [i, end_i): node i may attend to node j exactly when j <= i < end_j, which is the whole attention mask. The
result equals separate rows in log-probabilities, loss and gradient (tests/models/test_training_packing.py); the idea is the
tree attention of speculative decoding turned to training.

A sequence is cut before its last target: later tokens are predicted by nothing and predict nothing. Groups never share a row,
because attention costs S^2 and a dense mask buys nothing between them. A single sequence longer than the budget is a row of
its own. `share=False` lays every sequence out alone: the baseline that tests and benchmarks compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.training.batch import TokenSequence

Ints = NDArray[np.int64]

ENOUGH = 1024
WASTE = 1 / 16


@dataclass(frozen=True, kw_only=True)
class Row:
    """S nodes, N targets. `ids`, `positions`, `ends` (S,); `nodes` (N,) predicts `tokens` (N,), which is target number
    `offsets` (N,) of episode `episodes` (N,)."""

    ids: Ints
    positions: Ints
    ends: Ints
    nodes: Ints
    tokens: Ints
    episodes: Ints
    offsets: Ints


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B rows padded to S: `ids_BS`, `positions_BS`, `ends_BS` (padding sees itself only); targets as in Row, with `rows_N`."""

    ids_BS: Ints
    positions_BS: Ints
    ends_BS: Ints
    rows_N: Ints
    nodes_N: Ints
    tokens_N: Ints
    episodes_N: Ints
    offsets_N: Ints


def pack(sequences: Sequence[TokenSequence], chosen: Sequence[int], *, budget: int, share: bool = True) -> list[Row]:
    """Rows of the `chosen` episodes (indices into `sequences`) of at most `budget` nodes, largest first.

    Episodes without a target need no forward pass and are left out.
    """
    groups: dict[str, list[int]] = {}
    for index in chosen:
        if len(sequences[index].targets):
            key = sequences[index].group_id if share else sequences[index].episode_id
            groups.setdefault(key, []).append(index)
    rows = [row for members in groups.values() for row in _rows(sequences, members, budget)]
    return sorted(rows, key=lambda row: -len(row.ids))  # stable: equal sizes keep the stored order


def micro_batches(rows: Sequence[Row], *, budget: int) -> list[MicroBatch]:
    """Pad rows (largest first) together while B * S stays within `budget`.

    A micro-batch that already has ENOUGH nodes to keep the processor busy ends before a row that would be mostly padding.
    """
    result: list[MicroBatch] = []
    pending: list[Row] = []
    for row in rows:
        if pending:
            width, full = len(pending[0].ids), len(pending) * len(pending[0].ids)
            wasteful = full >= ENOUGH and width - len(row.ids) > WASTE * width
            if wasteful or full + width > budget:
                result.append(_pad(pending))
                pending = []
        pending.append(row)
    if pending:
        result.append(_pad(pending))
    return result


def _rows(sequences: Sequence[TokenSequence], members: Sequence[int], budget: int) -> list[Row]:
    inputs = {index: sequences[index].token_ids[: sequences[index].targets[-1]] for index in members}
    order = sorted(members, key=lambda index: (inputs[index].tolist(), sequences[index].episode_id))
    rows: list[Row] = []
    builder = _Builder()
    for index in order:
        if builder.size and builder.size + len(inputs[index]) - builder.shared(inputs[index]) > budget:
            rows.append(builder.row())
            builder = _Builder()
        builder.add(inputs[index], sequences[index], index)
    return [*rows, builder.row()]


class _Builder:
    """One growing row; `path` holds the node index of every token of the sequence added last."""

    def __init__(self) -> None:
        self.size = 0
        self._ids: list[Ints] = []
        self._positions: list[Ints] = []
        self._paths_ends: list[tuple[Ints, int]] = []
        self._targets: list[tuple[Ints, Ints, Ints, Ints]] = []
        self._last = np.zeros(0, dtype=np.int64)
        self._path = np.zeros(0, dtype=np.int64)

    def shared(self, ids: Ints) -> int:
        """Length of the common prefix with the sequence added last."""
        n = min(len(ids), len(self._last))
        differs = np.flatnonzero(ids[:n] != self._last[:n])
        return int(differs[0]) if len(differs) else n

    def add(self, ids: Ints, sequence: TokenSequence, episode: int) -> None:
        common = self.shared(ids)
        self._paths_ends.append((self._path[common:], self.size))  # these subtrees are complete
        fresh = len(ids) - common
        self._path = np.concatenate([self._path[:common], np.arange(self.size, self.size + fresh)])
        self._last = ids
        self._ids.append(ids[common:])
        self._positions.append(np.arange(common, len(ids)))
        self.size += fresh
        count = len(sequence.targets)
        self._targets.append(
            (
                self._path[sequence.targets - 1],
                sequence.token_ids[sequence.targets],
                np.full(count, episode),
                np.arange(count),
            )
        )

    def row(self) -> Row:
        ends = np.zeros(self.size, dtype=np.int64)
        for path, end in [*self._paths_ends, (self._path, self.size)]:
            ends[path] = end
        nodes, tokens, episodes, offsets = (np.concatenate(part) for part in zip(*self._targets, strict=True))
        return Row(
            ids=np.concatenate(self._ids),
            positions=np.concatenate(self._positions),
            ends=ends,
            nodes=nodes,
            tokens=tokens,
            episodes=episodes,
            offsets=offsets,
        )


def _pad(rows: Sequence[Row]) -> MicroBatch:
    width = max(len(row.ids) for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.zeros_like(ids)
    ends = np.tile(np.arange(1, width + 1), (len(rows), 1))
    for index, row in enumerate(rows):
        size = len(row.ids)
        ids[index, :size], positions[index, :size], ends[index, :size] = row.ids, row.positions, row.ends
    return MicroBatch(
        ids_BS=ids,
        positions_BS=positions,
        ends_BS=ends,
        rows_N=np.concatenate([np.full(len(row.nodes), index) for index, row in enumerate(rows)]),
        nodes_N=np.concatenate([row.nodes for row in rows]),
        tokens_N=np.concatenate([row.tokens for row in rows]),
        episodes_N=np.concatenate([row.episodes for row in rows]),
        offsets_N=np.concatenate([row.offsets for row in rows]),
    )
