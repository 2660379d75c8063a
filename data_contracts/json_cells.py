"""JSON text of one table cell, exact also for what strict JSON cannot say.

Policies and broken verifiers produce values that strict JSON has no words for: lone surrogates (a tool call's "\\ud83d" read
by Python's json), NaN and infinities. Such a cell is written the way Python's json does (`NaN`, "\\ud83d"), every other cell is
canonical JSON (`protocols.to_json`). Reading tries strict JSON first. So a group that breaks its contract can still be stored,
read back and looked at in quarantine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import msgspec

from data_contracts.protocols import to_json


def encode_cell(value: Any) -> str:
    """JSON text of a record, a tuple of records, a mapping or None; equal values give equal text."""
    try:
        if not _not_finite(value):
            return to_json(value).decode()
    except UnicodeEncodeError:
        pass
    return json.dumps(msgspec.to_builtins(value), sort_keys=True, separators=(",", ":"))


def decoder(kind: Any) -> Callable[[str], Any]:
    """Text -> value of `kind`. Raises msgspec.ValidationError with the path of the field, or msgspec.DecodeError."""
    strict = msgspec.json.Decoder(kind)

    def decode(text: str) -> Any:
        try:
            return strict.decode(text)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                raise error from None
            return msgspec.convert(value, kind)

    return decode


def _not_finite(value: Any) -> bool:
    """Whether a float below `value` is NaN or infinite."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, str | int | bytes) or value is None:
        return False
    if isinstance(value, dict):
        return any(map(_not_finite, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_not_finite, value))
    return isinstance(value, msgspec.Struct) and any(_not_finite(getattr(value, name)) for name in value.__struct_fields__)
