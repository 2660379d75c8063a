"""A model folder's chat template and tokenizer, without transformers: what rollout workers import must be light.

Rendering follows Hugging Face's convention (a sandboxed Jinja environment with `raise_exception` and a `tojson` that keeps
characters; `strftime_now` is left undefined, so that templates fall back to their fixed date and prompts are reproducible).

**Injection.** Text that did not come from the template must never become a control token. `mask` puts an invisible mark behind
every character that could begin one; the template renders the masked text, control tokens are looked for in the result, and the
marks are removed before the rest is tokenised with the control tokens taken out of the tokenizer. Text without control strings
gets exactly the ids that the ordinary tokenizer gives.

Gaps: attachments are not rendered. Tokenizers without a fast tokenizer.json are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer

from data_contracts.errors import ConfigError

_MARK, _ESCAPE = "\uf8fe", "\uf8ff"
_CONTROL_SHAPE = re.compile(r"[<\[].*[>\]]", re.DOTALL)


class ChatTemplate:
    """`name` is the folder's name; `eos_ids` are the ids that end a generation according to the folder's configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                "the model folder has no tokenizer.json", file=str(folder), remedy="Save its fast tokenizer into the folder."
            )
        description = json.loads(path.read_text(encoding="utf-8"))
        self._config = _read_json(folder / "tokenizer_config.json")
        self._ordinary = Tokenizer.from_str(json.dumps(description))
        added = description.get("added_tokens") or []
        guarded = [token for token in added if token.get("special") or _CONTROL_SHAPE.fullmatch(token["content"])]
        self.control_ids: Mapping[str, int] = {token["content"]: token["id"] for token in guarded}
        """Every string that must come from the template or the policy, never from other text, with its id."""
        self._strip_before = {token["content"] for token in guarded if token.get("lstrip")}
        self._strip_after = {token["content"] for token in guarded if token.get("rstrip")}
        kept = [token for token in added if token["content"] not in self.control_ids]
        self._plain = Tokenizer.from_str(json.dumps({**description, "added_tokens": kept, "post_processor": None}))
        unknown = (description.get("model") or {}).get("unk_token")
        self._forbidden = frozenset(self.control_ids.values()) - {self.control_ids.get(str(unknown), -1)}
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        self._split = re.compile("|".join(re.escape(token) for token in longest_first)) if longest_first else None
        self._marks = {ord(token[0]): token[0] + _MARK for token in self.control_ids if token}
        self._special = {
            key: _content(value)
            for key, value in self._config.items()
            if key.endswith("_token") and _content(value) is not None
        }
        self._compiled = _compile(_template_source(folder, self._config))
        self.eos_ids = self._eos_ids()

    # ------------------------------------------------------------------------------------------------------------ text

    def mask(self, text: str) -> str:
        """`text` such that nothing in it can become a control token; lone surrogates become "?"."""
        clean = text.encode("utf-8", "replace").decode("utf-8")
        if _MARK in clean or _ESCAPE in clean:
            clean = clean.replace(_ESCAPE, _ESCAPE + "2").replace(_MARK, _ESCAPE + "1")
        return clean.translate(self._marks)

    def mask_deep(self, value: Any) -> Any:
        """`mask` inside a JSON-shaped value, only on strings that hold a control token, so that templates can read the rest."""
        if isinstance(value, str):
            risky = _MARK in value or _ESCAPE in value or self.first_control(value) is not None
            return self.mask(value) if risky else value
        if isinstance(value, Mapping):
            return {self.mask_deep(str(key)): self.mask_deep(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mask_deep(item) for item in value]
        return value

    def unmask(self, text: str) -> str:
        bare = text.replace(_MARK, "")
        return bare.replace(_ESCAPE + "1", _MARK).replace(_ESCAPE + "2", _ESCAPE) if _ESCAPE in bare else bare

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), generation: bool
    ) -> str:
        """The template's text. Raises jinja2.TemplateError where the template itself does."""
        return str(
            self._compiled.render(
                messages=list(messages), tools=list(tools) or None, add_generation_prompt=generation, **self._special
            )
        )

    # ------------------------------------------------------------------------------------------------------------- ids

    def encode(self, rendered: str) -> list[int]:
        """Ids of rendered text: control tokens where the template (or our own tags) wrote them, plain text elsewhere."""
        ids: list[int] = []
        position, strip_start = 0, False
        for match in self._split.finditer(rendered) if self._split else ():
            self._encode_run(rendered[position : match.start()], ids, strip_start, match.group() in self._strip_before)
            ids.append(self.control_ids[match.group()])
            position, strip_start = match.end(), match.group() in self._strip_after
        self._encode_run(rendered[position:], ids, strip_start, False)
        return ids

    def encode_ordinary(self, text: str) -> list[int]:
        """What the tokenizer gives by itself; the reference that `encode` is proven against."""
        return list(self._ordinary.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._ordinary.decode(list(ids), skip_special_tokens=False))

    def first_control(self, rendered: str) -> re.Match[str] | None:
        """Where the first control token of rendered text is."""
        return self._split.search(rendered) if self._split else None

    def _encode_run(self, run: str, ids: list[int], strip_start: bool, strip_end: bool) -> None:
        text = self.unmask(run)
        text = text.lstrip() if strip_start else text
        text = text.rstrip() if strip_end else text
        if not text:
            return
        encoded = self._plain.encode(text, add_special_tokens=False).ids
        if not self._forbidden.isdisjoint(encoded):  # a vocabulary that reaches a control token without merges
            encoded = [token for character in text for token in self._plain.encode(character, add_special_tokens=False).ids]
        ids.extend(encoded)

    def _eos_ids(self) -> tuple[int, ...]:
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = _read_json(self.folder / name).get("eos_token_id")
            found.extend(value if isinstance(value, list) else [] if value is None else [value])
        eos = self._special.get("eos_token")
        if eos is not None and eos in self.control_ids:
            found.append(self.control_ids[eos])
        return tuple(dict.fromkeys(found))


# ------------------------------------------------------------------------------------------------------------------ loading


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}` blocks (Hugging Face's assistant masks) and renders what is inside."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


def _template_source(folder: Path, config: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("tool_use", named.get("default"))
    if not isinstance(source, str):
        raise ConfigError(
            "the model folder has no chat template",
            file=str(folder),
            remedy="Use the instruction-tuned sibling, or add chat_template.jinja.",
        )
    return source


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _content(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None
