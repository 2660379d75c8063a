"""The cap on output: head and tail stay, whatever the chunks are."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.errors import InfraError, InputError
from environments.sandbox.docker_files import read_answer
from environments.sandbox.docker_stream import demultiplex
from environments.sandbox.shell_agent import HeadTail


@given(st.lists(st.binary(max_size=700), max_size=12), st.integers(0, 2000))
def test_head_and_tail_are_the_streams_own(chunks: list[bytes], cap: int) -> None:
    stream, sink = b"".join(chunks), HeadTail(cap)
    for chunk in chunks:
        sink.add(chunk)
    kept = sink.bytes()
    assert len(kept) <= cap
    assert sink.truncated == (len(stream) > cap)
    if not sink.truncated:
        assert kept == stream
    elif cap >= 256:
        head, _, tail = kept.partition(b"\n[... ")
        dropped, _, tail = tail.partition(b" bytes dropped ...]\n")
        assert stream.startswith(head)
        assert stream.endswith(tail)
        assert len(head) + int(dropped) + len(tail) == len(stream)


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=50)), max_size=8), st.integers(1, 40))
def test_frames_are_split_the_same_however_they_arrive(frames: list[tuple[int, bytes]], size: int) -> None:
    wire = b"".join(struct.pack("!BxxxI", kind, len(data)) + data for kind, data in frames)
    streams, buffer = (HeadTail(10_000), HeadTail(10_000)), bytearray()
    for start in range(0, len(wire), size):
        buffer += wire[start : start + size]
        demultiplex(buffer, streams)
    for index in (0, 1):
        assert streams[index].bytes() == b"".join(data for kind, data in frames if kind == index + 1)


def test_an_answer_from_inside_is_parsed_strictly() -> None:
    whole = struct.pack("!q", 3) + b"abc" + struct.pack("!q", -1)
    assert [item.content for item in read_answer(["a", "b"], whole)] == [b"abc"]
    for broken in (b"", whole[:-1], struct.pack("!q", 9) + b"abc", struct.pack("!q", -7) + struct.pack("!q", -1)):
        with pytest.raises(InfraError):
            read_answer(["a", "b"], broken)
    with pytest.raises(InputError, match="cap"):
        read_answer(["a"], struct.pack("!q", -2))
