"""The end of an assistant turn in a template: what closes it, and what comes after it.

Both are found by rendering one canonical conversation whose assistant turn holds a sentinel, so no template needs code of its
own. Only what follows the sentinel is used, and it never depends on the turns before.
"""

from __future__ import annotations

from collections.abc import Sequence

import jinja2

from data_contracts.errors import ConfigError
from models.codec.template import ChatTemplate


class Turns:
    """`close` is the text that ends an assistant turn (a control token, with what the template puts before it)."""

    sentinel = "Zq7SentinelAnswer7qZ"

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        try:
            rendered = template.render(
                [*self.canonical_start(), {"role": "assistant", "content": self.sentinel}], generation=False
            )
        except jinja2.TemplateError as error:
            raise unsupported(template, f"it does not render a user and an assistant message ({error})") from error
        _, found, after = rendered.partition(self.sentinel)
        control = template.first_control(after)
        if not found or control is None:
            raise unsupported(template, "no control token closes an assistant turn")
        self.close = after[: control.end()]
        self._before_close = after[: control.start()]
        self.close_token = control.group()
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys((template.control_ids[self.close_token], *template.eos_ids)))

    def canonical_start(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": "x"}]

    def closed(self, sampled: Sequence[int]) -> bool:
        return bool(sampled) and sampled[-1] in self.stop_token_ids

    def suffix(self, rendered: str, sampled: Sequence[int]) -> str:
        """From the sentinel on: everything that has to follow `sampled`, its closing token only if it is missing."""
        after = rendered.partition(self.sentinel)[2]
        start = after.find(self.close_token)
        if start < 0:
            raise unsupported(self._template, "an assistant turn that is followed by others is not closed")
        return after[start + len(self.close_token) :] if self.closed(sampled) else self._before_close + after[start:]

    def text(self, sampled: Sequence[int]) -> str:
        """What the policy wrote, without the stop token."""
        if not self.closed(sampled):
            return self._template.decode(sampled)
        return self._template.decode(sampled[:-1]).removesuffix(self._before_close)


def unsupported(template: ChatTemplate, why: str) -> ConfigError:
    return ConfigError(
        f"its chat template cannot be used: {why}",
        file=str(template.folder),
        field="chat_template",
        remedy="Put a template into chat_template.jinja that renders a longer conversation as an extension of a shorter one.",
    )
