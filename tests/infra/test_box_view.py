"""What box_view.py hands to the library in a box, and the library as it lies in the root file system."""

import struct
from pathlib import Path

from infra import box_view, rootfs

GNU_STACK = 0x6474E551


def test_limits_hold_both_times_and_whole_processors() -> None:
    soft, hard = box_view.limits(began=1_796_124_937.25, shown=1_736_942_400.0, cpus=1.5)
    assert (soft, hard // 1024, hard % 1024) == (1_736_942_400_000_000, 1_796_124_937_250_000, 2)
    assert soft <= hard < 2**63  # a soft limit above the hard one would be refused; Python takes signed numbers


def test_without_a_clock_the_box_shows_the_right_time() -> None:
    soft, hard = box_view.limits(began=1_796_124_937.25, shown=None, cpus=0.01)
    assert (soft, hard % 1024) == (hard // 1024, 1)


def test_every_program_of_the_root_file_system_loads_it_and_none_gets_an_executable_stack(rootfs: Path) -> None:
    assert (rootfs / "etc/ld.so.preload").read_text() == f"{box_view.LIBRARY}\n"
    elf = (rootfs / box_view.LIBRARY.lstrip("/")).read_bytes()
    (start,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    headers = [struct.unpack_from("<II", elf, start + number * size) for number in range(count)]
    assert [flags & 1 for kind, flags in headers if kind == GNU_STACK] == [0]


def test_the_compiler_does_not_stay(rootfs: Path) -> None:
    assert not (rootfs / "usr/bin" / box_view.COMPILER).exists()
    assert not [path.name for path in (box_view.SOURCE, Path(box_view.__file__)) if (rootfs / path.name).exists()]


def test_another_source_is_another_root_file_system(tmp_path: Path, monkeypatch: object) -> None:
    import pytest

    assert isinstance(monkeypatch, pytest.MonkeyPatch)
    before = rootfs.digest("base")
    changed = tmp_path / "box_view.c"
    changed.write_text("int x;\n")
    monkeypatch.setattr(rootfs, "_VIEW", (changed, Path(box_view.__file__)))
    assert rootfs.digest("base") != before
