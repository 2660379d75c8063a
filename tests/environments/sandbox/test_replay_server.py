"""Which recorded row answers a request."""

from __future__ import annotations

from data_contracts.services import recording
from environments.sandbox.replay_server import Recordings


def recordings(text: str, *, strict: bool = False) -> Recordings:
    return Recordings(recording(text, file="x.jsonl"), strict=strict)


def body(found: Recordings, method: str, path: str, request: bytes = b"") -> str | None:
    row = found.answer(method, path, request)
    return None if row is None else row["body"]


def test_rows_answer_in_their_order_and_the_last_one_again() -> None:
    found = recordings('{"path": "/a", "body": "1"}\n{"path": "/b", "body": "b"}\n{"path": "/a", "body": "2"}')
    assert [body(found, "GET", "/a") for _ in range(4)] == ["1", "2", "2", "2"]
    assert body(found, "GET", "/b") == "b"


def test_strict_rows_answer_once() -> None:
    found = recordings('{"path": "/a", "body": "1"}\n{"path": "/a", "body": "2"}', strict=True)
    assert [body(found, "GET", "/a") for _ in range(3)] == ["1", "2", None]


def test_method_path_and_query_must_fit() -> None:
    found = recordings('{"path": "/a?x=1&y=&x=2", "body": "1"}')
    assert body(found, "POST", "/a?x=1&y=&x=2") is None
    assert body(found, "GET", "/a?x=1&x=2") is None
    assert body(found, "GET", "/a/?x=1&y=&x=2") is None
    assert body(found, "GET", "/a?y=&x=2&x=1") == "1"


def test_a_body_is_text_or_json_compared_as_json() -> None:
    found = recordings(
        '{"method": "POST", "path": "/", "request": {"a": [1, true], "b": null}, "body": "json"}\n'
        '{"method": "POST", "path": "/", "request": "a=1", "body": "form"}'
    )
    assert body(found, "POST", "/", b' {"b":null, "a":[1.0,true]} ') == "json"
    assert body(found, "POST", "/", b"a=1") == "form"
    for other in (b'{"a":[1,1],"b":null}', b'{"a":[1,true]}', b"", b"\xff", b"[" * 100_000):
        assert body(found, "POST", "/", other) is None
    assert found.known == ["POST /"]
