"""Renders a conversation into a prompt, with the model's own chat template.

Templates come with models, so they run in jinja2's immutable sandbox: no attributes of Python objects, no changes to
what they are given. What they may use besides plain jinja follows what model folders were written against: blocks
trimmed, `{% break %}`, `{% generation %}` (marks a span, changes nothing here), `raise_exception`, `strftime_now`, and
a `tojson` that neither escapes HTML nor reorders keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.errors import InvalidRequest, ModelError

Message = Mapping[str, Any]

OWN_VARIABLES = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
)  # what a request says in fields of its own


class _GenerationSpan(Extension):
    """Accepts `{% generation %} ... {% endgeneration %}` and renders what is inside."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationSpan, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One model's chat template.

    `special_tokens` are the variables that templates expect beside `messages`: `bos_token`, `eos_token` and so on.
    Raises ModelError when the template itself is not valid jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid: {error.message} (line {error.lineno})") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of this conversation.

        With `continue_final_message` the prompt ends inside the last message, so that the model goes on with it.
        `variables` are passed to the template as they are; InvalidRequest for those that the request says elsewhere.
        Also raises InvalidRequest when the template refuses the messages, with its own words.
        """
        taken = [name for name in variables or () if name in OWN_VARIABLES]
        if taken:
            raise InvalidRequest(
                f"chat_template_kwargs names {', '.join(taken)}; send that as a field of the request itself",
                param="chat_template_kwargs",
            )
        text = self._render(messages, add_generation_prompt and not continue_final_message, variables or {})
        if not continue_final_message:
            return text
        content = str(messages[-1].get("content") or "")
        for final in (content, content.strip()):
            at = text.rfind(final) if final else -1
            if at >= 0:
                return text[: at + len(final)]
        raise InvalidRequest(
            "the chat template does not render the last message as it is, so it cannot be continued; "
            "send continue_final_message=false",
            param="continue_final_message",
        )

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        known = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(
                {"tools": None, "documents": None, **self._special_tokens, **variables, **known}
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidRequest(
                f"the model's chat template cannot render these messages ({type(error).__name__}: {error})",
                param="messages",
            ) from error
