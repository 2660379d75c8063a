"""Every relative link and anchor in the Markdown files leads somewhere. Pages on other hosts are not visited.

Reads links `[text](target)`, images, and reference definitions `[name]: target`, outside code. An anchor must be a heading of
the target page (in the form that code hosts give it) or an explicit `id="..."`. Exit status 1 with a line per dead link.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

_FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(
    r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\s{0,3}\[[^\]^][^\]]*\]:\s+<?(\S+?)>?\s*$|<(?:img|a)\s[^>]*(?:src|href)=\"([^\"]+)\"",
    re.MULTILINE,
)
_ELSEWHERE = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def links(text: str) -> list[tuple[int, str]]:
    """(line number, target) of every link that stays on this host."""
    text = _CODE.sub(_blank, _FENCE.sub(_blank, text))
    found = []
    for match in _LINK.finditer(text):
        target = next(group for group in match.groups() if group is not None)
        if not _ELSEWHERE.match(target):
            start = match.start() + len(match[0]) - len(match[0].lstrip())
            found.append((text.count("\n", 0, start) + 1, target))
    return found


def anchors(text: str) -> set[str]:
    """The anchors of a page: headings, numbered when they repeat, and explicit ids."""
    found = set(re.findall(r"(?:id|name)=\"([^\"]+)\"", text))
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", _FENCE.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        found.add(slug if slug not in seen else f"{slug}-{seen[slug]}")
        seen[slug] = seen.get(slug, 0) + 1
    return found


def dead_links(pages: Iterable[Path], *, root: Path) -> list[str]:
    """One line per link that leads nowhere, or out of the project."""
    dead = []
    for page in pages:
        for line, target in links(page.read_text("utf-8")):
            path, _, anchor = unquote(target).partition("#")
            base = root if path.startswith("/") else page.parent
            goal = (base / path.lstrip("/")).resolve() if path else page.resolve()
            where = f"{page.relative_to(root)}:{line}: {target}"
            if not goal.is_relative_to(root.resolve()) or not goal.exists():
                dead.append(f"{where}: no such file")
            elif anchor and goal.suffix == ".md" and anchor.lower() not in anchors(goal.read_text("utf-8")):
                dead.append(f"{where}: no such heading")
    return dead


def markdown_files(root: Path) -> list[Path]:
    """Markdown files that git tracks or would track; without git, all outside hidden folders."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        return [root / name for name in sorted(set(listed.stdout.splitlines())) if (root / name).is_file()]
    return sorted(p for p in root.rglob("*.md") if not any(part.startswith(".") for part in p.relative_to(root).parts))


def main() -> int:
    root = Path(__file__).resolve().parent.parent.parent
    pages = markdown_files(root)
    dead = dead_links(pages, root=root)
    for line in dead:
        print(f"docs: {line}", file=sys.stderr)
    if not dead:
        print(f"docs: links of {len(pages)} pages lead somewhere")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
