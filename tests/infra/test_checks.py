"""The tree's own checks find what they are for."""

from pathlib import Path, PurePosixPath

import pytest

from infra.checks import doc_links, module_names


@pytest.mark.parametrize("path", ["tests/__init__.py", "models.py", "flows/deep/x.py", "infra.cpython-311-x86_64-linux-gnu.so"])
def test_a_distribution_with_one_of_our_module_names_is_a_clash(path: str) -> None:
    (line,) = module_names.clashes([("careless", PurePosixPath(path)), ("careless", PurePosixPath(path))])
    assert line.startswith("careless brings a top-level module")


@pytest.mark.parametrize("path", ["good/tests/__init__.py", "models-1.0.dist-info/RECORD", "../../bin/flows", "tests.txt"])
def test_names_elsewhere_are_no_clash(path: str) -> None:
    assert module_names.clashes([("good", PurePosixPath(path))]) == []


def test_our_own_modules_are_no_clash() -> None:
    assert module_names.clashes([("bessemer", PurePosixPath("flows/cli.py"))]) == []


def test_this_environment_has_no_clash() -> None:
    assert module_names.clashes(module_names.installed_files()) == []


def dead(tmp_path: Path, text: str) -> list[str]:
    page = tmp_path / "page.md"
    page.write_text(text)
    (tmp_path / "other.md").write_text("# One heading: `code`, twice\n\n# One heading: `code`, twice\n")
    return doc_links.dead_links([page], root=tmp_path)


@pytest.mark.parametrize(
    "link",
    [
        "[a](other.md)",
        "[a](other.md#one-heading-code-twice)",
        "[a](other.md#one-heading-code-twice-1)",
        "[a](#here)\n\n## Here",
        "[a](https://example.org/nowhere)",
        "```\n[a](nowhere.md)\n```",
        "`[a](nowhere.md)`",
        "[a]: other.md",
    ],
)
def test_good_links_pass(tmp_path: Path, link: str) -> None:
    assert dead(tmp_path, f"text\n\n{link}\n") == []


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("[a](nowhere.md)", "no such file"),
        ("![a](nowhere.png)", "no such file"),
        ("[a](other.md#absent)", "no such heading"),
        ("[a](#absent)", "no such heading"),
        ("[a](../outside.md)", "no such file"),
        ("[a]: nowhere.md", "no such file"),
        ('<img src="nowhere.svg">', "no such file"),
    ],
)
def test_dead_links_are_named_with_their_line(tmp_path: Path, link: str, reason: str) -> None:
    (line,) = dead(tmp_path, f"text\n\n{link}\n")
    assert line.startswith("page.md:3: ")
    assert reason in line
