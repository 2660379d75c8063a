"""Limits as both versions of control groups want them, slots, orphans; on plain folders, so that either host tests both."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from data_contracts.records import SandboxLimits
from environments.sandbox.cgroups import SLOTS, Tree, oom_count
from environments.sandbox.owners import Owner, start_ticks, this_process

LIMITS = SandboxLimits(memory_bytes=1 << 26, pids=10, cpus=0.5)


def tree(folder: Path, version: int) -> Tree:
    names = ("tracking", "memory", "pids", "cpu") if version == 1 else ("tracking",)
    for name in names:
        (folder / name).mkdir()
    return Tree(version, {name: folder / name for name in names})


def test_version_2_limits_sit_on_the_slot(tmp_path: Path) -> None:
    group = tree(tmp_path, 2).claim(1, 2)
    slot = group.owner.parent
    (slot / "memory.events").write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    group.set_limits(LIMITS)
    wanted = {"memory.max": "67108864", "memory.swap.max": "0", "pids.max": "12", "cpu.max": "50000 100000"}
    assert {name: (slot / name).read_text() for name in wanted} == wanted
    assert group.oom_kills() == 3
    assert group.joins() == [str(slot / "o-1-2")]
    assert group.joins(7) == [str(slot / "o-1-2" / "x7")]


def test_version_1_limits_sit_in_every_hierarchy(tmp_path: Path) -> None:
    group = tree(tmp_path, 1).claim(1, 2)
    slot = str(group.slot)
    group.set_limits(LIMITS)
    memory = tmp_path / "memory" / slot
    assert {(memory / name).read_text() for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")} == {"67108864"}
    assert (tmp_path / "pids" / slot / "pids.max").read_text() == "12"
    assert (tmp_path / "cpu" / slot / "cpu.cfs_quota_us").read_text() == "50000"
    assert set(group.joins()) == {str(tmp_path / name / slot) for name in ("memory", "pids", "cpu")} | {str(group.owner)}


@pytest.mark.parametrize("version", [1, 2])
def test_a_slot_is_claimed_once_and_free_after_removal(tmp_path: Path, version: int) -> None:
    groups = tree(tmp_path, version)
    first, second = groups.claim(1, 2), groups.claim(1, 2)
    assert (first.slot, second.slot) == (SLOTS[0], SLOTS[1])
    first.joins(1)
    first.remove()
    first.remove()
    assert not list(tmp_path.glob(f"*/{first.slot}"))
    assert groups.claim(3, 4).slot == first.slot


def test_orphans_are_those_of_dead_owners_and_old_half_made_ones(tmp_path: Path) -> None:
    groups, me = tree(tmp_path, 2), this_process()
    groups.claim(me.pid, me.start)
    reused = groups.claim(me.pid, me.start + 1)
    for slot, age in ((SLOTS[5], 60), (SLOTS[6], 0)):
        folder = tmp_path / "tracking" / str(slot)
        folder.mkdir()
        os.utime(folder, (time.time() - age,) * 2)
    assert [group.slot for group in groups.orphans()] == [reused.slot, SLOTS[5]]


def test_memory_kills_are_counted_in_either_format() -> None:
    assert oom_count("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n") == 5
    assert oom_count("") == 0


def test_an_owner_is_dead_when_its_pid_was_reused_or_the_machine_restarted() -> None:
    me = this_process()
    assert me.alive() is True
    assert Owner.from_labels(me.labels()) == me
    assert Owner(me.host, me.boot, me.pid, me.start + 1).alive() is False
    assert Owner(me.host, "another boot", me.pid, me.start).alive() is False
    assert Owner("another host", me.boot, me.pid, me.start).alive() is None
    assert Owner.from_labels({"bessemer.pid": "x"}) is None
    assert start_ticks(2**22 + 1) is None
