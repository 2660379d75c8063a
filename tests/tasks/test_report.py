"""Overhead: wall time minus the union of useful intervals."""

from data_contracts.records import Interval
from tasks.report import union_seconds


def interval(start: float, stop: float) -> Interval:
    return Interval(kind="sampling", start=start, stop=stop)


def test_union_counts_overlaps_once_and_clips():
    some = [interval(0, 4), interval(2, 6), interval(8, 9), interval(8.5, 30), interval(-5, 0.5)]
    assert union_seconds(some, start=0, stop=10) == 8.0


def test_nothing_useful_is_all_overhead():
    assert union_seconds([], start=0, stop=10) == 0.0
