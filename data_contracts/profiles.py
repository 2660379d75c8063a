"""From a profile's name and overrides to a `Profile`. Every mistake is a ConfigError: file, field path, expectation, remedy.

A profile is a YAML file, found by name in a folder (the shipped ones lie in flows/profiles/) or given by a path that ends in
.yaml or .yml. An override is "dotted.path=value" with the value read as YAML, or a mapping of dotted path to value; a path that
starts with neither `campaign` nor `stack` is below `campaign`, and numbers index lists ("domains.0.weight=2").
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from data_contracts.config import Profile
from data_contracts.errors import ConfigError


def profile_folder() -> Path:
    """The shipped profiles: flows/profiles beside the installed `flows` package, which is found but not imported."""
    spec = find_spec("flows")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise ConfigError("the package 'flows' is not installed", field="profile", remedy="Give a path that ends in .yaml")
    return Path(places[0]) / "profiles"


def profile_names(folder: Path | None = None) -> list[str]:
    return sorted(path.stem for path in (folder or profile_folder()).glob("*.yaml"))


def load_profile(name: str, overrides: Sequence[str] | Mapping[str, Any] = (), *, folder: Path | None = None) -> Profile:
    """The profile of this name or path, with overrides applied in order. Raises ConfigError."""
    file = _find(name, folder)
    content = _read(file)
    source = str(file)
    pairs = list(overrides.items()) if isinstance(overrides, Mapping) else [_split(text) for text in overrides]
    for path, value in pairs:
        _override(content, path, value)
    if pairs:
        source = f"{file} with {', '.join(path for path, _ in pairs)} set"
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        raise _config_error(error, source) from None


def _find(name: str, folder: Path | None) -> Path:
    if "\0" in name:
        raise ConfigError("a path holds no NUL", field="profile", remedy="Check the path")
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError("there is no such file", file=name, field="profile", remedy="Check the path")
        return path
    place = folder or profile_folder()
    file = place / f"{name}.yaml"
    if "/" in name or not file.is_file():
        known = profile_names(place)
        remedy = f"{_closest(name, known)}Known: {', '.join(known)}; or give a path that ends in .yaml"
        raise ConfigError(f"there is no profile '{name}'", field="profile", remedy=remedy)
    return file


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_UniqueKeys)  # noqa: S506 - a SafeLoader
    except UnicodeDecodeError as error:
        remedy = "Save the file in UTF-8"
        raise ConfigError(f"is not UTF-8 (byte {error.start})", file=str(file), remedy=remedy) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error)
        row = mark.line + 1 if mark is not None else None
        raise ConfigError(f"is not YAML: {what}", file=str(file), row=row, remedy="Fix that line") from None
    except (RecursionError, ValueError, TypeError) as error:  # nested without end, a number of 5,000 digits, a list as a key
        raise ConfigError(f"holds a value that cannot be read: {error}", file=str(file), remedy="Write plain YAML") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=str(file), remedy="Check the path") from None
    if not isinstance(content, dict):
        remedy = "Start with 'campaign:'; flows/profiles/demo.yaml is an example"
        raise ConfigError("expected a mapping with 'campaign' and perhaps 'stack'", file=str(file), remedy=remedy)
    return content


class _UniqueKeys(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice (YAML would keep the last one silently), and aliases: nothing here needs
    them, and a few lines of them unfold to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"the alias '*{event.anchor}' is not allowed", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"the key '{name}' is given twice", problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def _split(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"'{text}' is not an override", field="override", remedy="Write dotted.path=value")
    try:
        return path.strip(), yaml.safe_load(_exponent(value))
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the value of '{text[:80]}' is not YAML: {str(error)[:200]}", field=path, remedy="Quote the value"
        ) from None


def _exponent(text: str) -> str:
    """YAML 1.1 reads 1e-5 as text; write it the way YAML wants (1.0e-5)."""
    mantissa, e, power = text.strip().partition("e")
    if e and mantissa.lstrip("+-").isdigit() and power.lstrip("+-").isdigit():
        sign = power if power[0] in "+-" else f"+{power}"
        return f"{mantissa}.0e{sign}"
    return text


def _override(content: dict[str, Any], path: str, value: Any) -> None:
    """Set one value inside `content`, creating sections on the way; whether they exist is for validation to say."""
    keys = path.split(".")
    if keys[0] not in Profile.model_fields:
        keys.insert(0, "campaign")
    place: Any = content
    for depth, key in enumerate(keys):
        if isinstance(place, list):
            if not (key.isascii() and key.isdigit()) or int(key) >= len(place):
                raise ConfigError(
                    f"'{key}' is not one of the {len(place)} entries", field=".".join(keys), remedy="Entries count from 0"
                )
            index: Any = int(key)
        elif isinstance(place, dict):
            index = key
        else:
            where = ".".join(keys[:depth])
            raise ConfigError(f"'{where}' is a value, not a section", field=".".join(keys), remedy=f"Set {where} itself")
        if depth == len(keys) - 1:
            place[index] = value
        else:
            if isinstance(place, dict) and place.get(index) is None:
                place[index] = {}
            place = place[index]


def _config_error(error: ValidationError, source: str) -> ConfigError:
    """The first mistake, with the closest known field for one that is not known."""
    first = error.errors(include_url=False)[0]
    location = first["loc"]
    field = ".".join(str(part) for part in location)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    section = _section(location[:-1])
    known = sorted(section.model_fields) if section else []
    if first["type"] == "extra_forbidden":
        remedy = f"{_closest(str(location[-1]), known)}Known: {', '.join(known)}"
        return ConfigError(f"there is no such field{more}", file=source, field=field, remedy=remedy)
    meaning = section.model_fields[str(location[-1])].description if str(location[-1]) in known and section else None
    remedy = f"{location[-1]} is: {meaning[0].lower()}{meaning[1:]}" if meaning else "Correct the value"
    if first["type"] == "missing":
        return ConfigError(f"the field is missing{more}", file=source, field=field, remedy=f"Add it. {remedy}")
    return ConfigError(f"{first['msg']}, got {reprlib.repr(first['input'])}{more}", file=source, field=field, remedy=remedy)


def _section(path: Iterable[int | str]) -> type[BaseModel] | None:
    """The configuration class at `path`; None where there is none."""
    section: type[BaseModel] = Profile
    for part in path:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(part)
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())] if field is not None else []
        found = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if found is None:
            return None
        section = found
    return section


def _closest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean '{close[0]}'? " if close else ""
