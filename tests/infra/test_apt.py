"""Mirrors come from the host's own sources, in both of apt's formats, without third parties."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_contracts.errors import MissingRequirement
from infra import apt, rootfs


def test_only_this_releases_main_entries_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt, "release", lambda: "bookworm")
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(
        "# deb http://old.example/debian bookworm main\ndeb-src http://a.example/debian bookworm main\n"
        "deb [arch=amd64 trusted=no] http://a.example/debian bookworm-updates main contrib # comment\n"
        "deb http://third.example/apt stable main\n"
    )
    (tmp_path / "sources.list.d" / "debian.sources").write_text(
        "Types: deb deb-src\n# a comment\nURIs: http://b.example/debian\nSuites: bookworm bookworm-security\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/k.gpg\n\n"
        "Types: deb\nEnabled: no\nURIs: http://c.example\nSuites: bookworm\nComponents: main\n"
    )
    found = apt.apt_sources(tmp_path)
    assert (found.suite, found.mirror) == ("bookworm", "http://b.example/debian")
    assert found.lines == (
        "deb [arch=amd64 trusted=no] http://a.example/debian bookworm-updates main contrib",
        "deb [signed-by=/usr/share/keyrings/k.gpg] http://b.example/debian bookworm main",
        "deb [signed-by=/usr/share/keyrings/k.gpg] http://b.example/debian bookworm-security main",
    )


def test_a_host_without_mirrors_is_told(tmp_path: Path) -> None:
    with pytest.raises(MissingRequirement, match="apt-get update"):
        apt.apt_sources(tmp_path)


def test_missing_tools_cannot_be_installed_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt.shutil, "which", lambda command, path=None: None)
    assert apt.needed_packages(docker=True) == ["bubblewrap", "docker.io", "mmdebstrap"]
    with pytest.raises(MissingRequirement, match="apt-get install -y --no-install-recommends bubblewrap mmdebstrap"):
        apt.install(progress=lambda message: None)


def test_the_digest_names_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    first = rootfs.digest("base")
    assert rootfs.image_name() == f"bessemer-sandbox:base-{first}"
    assert rootfs.rootfs_path().name == f"base-{first}"
    monkeypatch.setitem(rootfs.VARIANTS, "base", ("python3",))
    assert rootfs.digest("base") != first
    with pytest.raises(MissingRequirement, match="variant"):
        rootfs.digest("no such")


def test_a_variant_adds_packages_of_debian() -> None:
    assert rootfs.packages_of("node") == ("python3", "python3-pytest", "nodejs")
    assert rootfs.packages_of("base,jq,g++,jq,python3") == ("python3", "python3-pytest", "g++", "jq")
    assert rootfs.image_name("base,jq,g++").startswith("bessemer-sandbox:base-jq-g---")
    assert rootfs.digest("base,jq,g++") == rootfs.digest("base,g++,jq")
    for wrong in ("base,", "base,-rf", "base,a b", "base,../x", "jq", "base,A", ""):
        with pytest.raises(MissingRequirement, match="variant"):
            rootfs.packages_of(wrong)


def test_a_second_call_builds_nothing(rootfs: Path) -> None:
    from infra.rootfs import ensure_rootfs

    assert ensure_rootfs() == rootfs
    assert (rootfs / "usr/bin/python3").exists()
    assert (rootfs / "work").is_dir()
    assert (rootfs / "etc/hostname").read_text() == "box\n"
    assert not list(rootfs.parent.glob(".base-*"))
