"""Chat messages <-> token ids, append-only: the model's own tool format where its template has one, else ours (`open_codec`).

Imports neither torch nor transformers, so rollout workers start quickly.
"""

from __future__ import annotations

from pathlib import Path

from data_contracts.protocols import Codec
from models.codec.native import NativeCodec, supports_tools
from models.codec.proof import ProvableCodec, prove_prefix_preserving
from models.codec.tagged import TaggedCodec
from models.codec.template import ChatTemplate

__all__ = ["open_codec", "prove_prefix_preserving"]


def open_codec(model_folder: str | Path) -> Codec:
    """The codec of the model in `model_folder` (tokenizer.json and a chat template), proven prefix-preserving.

    Raises ConfigError naming the template when it cannot be proven. A template that shows tools but breaks is an error; only
    one that shows none gets our tagged codec.
    """
    template = ChatTemplate(Path(model_folder))
    codec: ProvableCodec = NativeCodec(template) if supports_tools(template) else TaggedCodec(template)
    prove_prefix_preserving(codec)
    return codec
