"""Companion services as data: what is wrong with one is said where it is declared, with the field and the remedy."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest

from data_contracts.errors import InputError
from data_contracts.protocols import to_json
from data_contracts.records import SandboxSpec
from data_contracts.services import MAX_FILES_BYTES, HealthCheck, ServiceLimits, ServiceSpec, recording

GOOD: dict[str, Any] = {"name": "api", "port": 8080, "argv": ("server",)}
RECORDED: dict[str, Any] = {"name": "api", "port": 8080, "kind": "recorded", "files": {"a.jsonl": '{"path": "/a"}'}}
IMAGE: dict[str, Any] = {"name": "api", "port": 80, "kind": "image", "image": "api:1"}


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        (GOOD | {"name": "My API"}, "name", "lower-case"),
        (GOOD | {"port": 0}, "port", "1 to 65535"),
        (GOOD | {"port": 70000}, "port", "1 to 65535"),
        (GOOD | {"listens": 70000}, "listens", "1024 to 65535"),
        (GOOD | {"port": 80}, "listens", "Set listens to 1024"),
        (GOOD | {"listens": 443}, "listens", "Set listens to 1024"),
        (GOOD | {"argv": ()}, "argv", "needs a program"),
        (GOOD | {"argv": ("a\0b",)}, "argv", "without NUL"),
        (GOOD | {"argv": ("A=b",)}, "argv", "not a command"),
        (GOOD | {"seed": ("",)}, "seed", "not a command"),
        (GOOD | {"env": {"1A": ""}}, "env", "environment variable"),
        (GOOD | {"files": {"../x": ""}}, "files", "plain relative"),
        (GOOD | {"files": {"/x": ""}}, "files", "plain relative"),
        (GOOD | {"files": {"x": "x" * (MAX_FILES_BYTES + 1)}}, "files", "root file system variant"),
        (GOOD | {"writable": ("/data",)}, "writable", "kind command"),
        (GOOD | {"strict": True}, "strict", "kind command"),
        (GOOD | {"limits": ServiceLimits(memory_bytes=1000)}, "limits", "8 MiB"),
        (GOOD | {"limits": ServiceLimits(pids=0)}, "limits", "1 process"),
        (RECORDED | {"files": {}}, "files", "nothing is recorded"),
        (RECORDED | {"argv": ("x",)}, "argv", "kind recorded"),
        (RECORDED | {"files": {"a.jsonl": "\n"}}, "files", "at least one row"),
        (RECORDED | {"files": {"a.jsonl": "{]"}}, "files", "not a recorded request"),
        (IMAGE | {"image": "base"}, "image", "name:tag"),
        (IMAGE | {"image": "-x"}, "image", "name:tag"),
        (IMAGE | {"files": {"x": ""}}, "files", "in the image"),
        (IMAGE | {"writable": ("data",)}, "writable", "absolute"),
        (IMAGE | {"writable": ("/a/../b",)}, "writable", "absolute"),
    ],
)
def test_a_wrong_service_names_the_field_and_what_to_do(values: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        ServiceSpec(**values)
    assert caught.value.field == field
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"http": "health"}, "health.http"),
        ({"http": "/a b"}, "health.http"),
        ({"http": "/a\r\nX: y"}, "health.http"),
        ({"http": "/", "command": ("true",)}, "health.command"),
        ({"deadline_seconds": 0.0}, "health.deadline_seconds"),
        ({"deadline_seconds": float("inf")}, "health.deadline_seconds"),
    ],
)
def test_a_wrong_health_check(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        HealthCheck(**values)
    assert caught.value.field == field


def test_two_services_share_neither_name_nor_port() -> None:
    one = ServiceSpec(**GOOD)
    with pytest.raises(InputError, match=r"services\.name.*'api'"):
        SandboxSpec(services=(one, ServiceSpec(**GOOD | {"port": 8081})))
    with pytest.raises(InputError, match=r"services\.port.*8080"):
        SandboxSpec(services=(one, ServiceSpec(**GOOD | {"name": "other"})))


def test_from_a_file_the_message_has_the_path_to_the_service() -> None:
    text = b'{"services": [{"name": "api", "port": 8080, "argv": ["a"]}, {"name": "b", "port": 99999, "argv": ["b"]}]}'
    with pytest.raises(msgspec.ValidationError, match=r"'port'.*1 to 65535.*\$\.services\[1\]"):
        msgspec.json.decode(text, type=SandboxSpec)


def test_a_spec_with_services_survives_json_and_pickle() -> None:
    spec = SandboxSpec(services=(ServiceSpec(**GOOD), ServiceSpec(**RECORDED | {"name": "rec", "port": 8081})))
    assert msgspec.json.decode(to_json(spec), type=SandboxSpec) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ('{"path": "a"}', "path"),
        ('{"path": "/a b"}', "path"),
        ('{"path": "/a", "method": "get"}', "method"),
        ('{"path": "/a", "status": 100}', "status"),
        ('{"path": "/a", "status": 999}', "status"),
        ('{"path": "/a", "body": "x", "json": 1}', "json"),
        ('{"path": "/a", "headers": {"A": "b\\r\\nC: d"}}', "headers"),
        ('{"path": "/a", "headers": {"Content-Length": "1"}}', "headers"),
        ('{"path": "/a", "extra": 1}', "files"),
        ("[]", "files"),
    ],
)
def test_a_wrong_recording_names_file_and_row(row: str, field: str) -> None:
    with pytest.raises(InputError, match=r"api\.jsonl, row 3") as caught:
        recording(f'{{"path": "/good"}}\n\n{row}\n', file="api.jsonl")
    assert caught.value.field == field


def test_a_recording_keeps_order_and_fills_in() -> None:
    rows = recording('{"path": "/b"}\n{"path": "/a", "method": "PUT", "request": null, "json": {"k": 1}}', file="x")
    assert [row["path"] for row in rows] == ["/b", "/a"]
    assert (rows[0]["method"], rows[0]["any"], rows[0]["status"], rows[0]["body"]) == ("GET", True, 200, "")
    assert (rows[1]["any"], rows[1]["request"], rows[1]["body"]) == (False, None, '{"k":1}')
    assert rows[1]["headers"] == {"Content-Type": "application/json"}
