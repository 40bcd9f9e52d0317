"""Rendering conversations with a model's own template."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from tests.unit.scripted import CHATML

from slipstream.errors import InvalidRequest, ModelError
from slipstream.front.template import ChatTemplate


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages or [{"role": "user", "content": "hi"}], **options)


def test_special_tokens_and_extra_variables_reach_the_template() -> None:
    source = "{{ bos_token }}{{ enable_thinking }}{{ messages[0]['content'] }}{{ eos_token }}"
    assert render(source, variables={"enable_thinking": False}) == "<s>Falsehi</s>"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message"])
def test_a_variable_that_the_request_says_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs names {name}") as caught:
        render("{{ messages[0].content }}", variables={"enable_thinking": True, name: True})
    assert caught.value.param == "chat_template_kwargs"


def test_blocks_are_trimmed_and_loops_can_be_left() -> None:
    source = (
        "{% for m in messages %}\n    {% if loop.index > 1 %}\n{% break %}\n{% endif %}\n{{ m.content }}\n{% endfor %}"
    )
    assert render(source, [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]) == "a\n"


def test_the_generation_prompt_is_there_unless_it_is_not_wanted() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_generation_span_renders_as_what_is_in_it() -> None:
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"


def test_the_last_message_can_be_continued() -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two, "}]
    prompt = render(CHATML, messages, continue_final_message=True)
    assert prompt == "<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\none, two, "


def test_a_template_that_changes_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        render("{{ messages[0].content | upper }}", continue_final_message=True)


def test_tojson_keeps_order_and_characters() -> None:
    messages = [{"role": "user", "content": {"z": "<é>", "a": [1]}}]
    assert render("{{ messages[0].content | tojson }}", messages) == '{"z": "<é>", "a": [1]}'
    assert render("{{ messages[0].content | tojson(indent=2) }}", messages).startswith('{\n  "z"')


def test_strftime_now_is_the_present() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_the_template_may_refuse_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ 1 // 0 }}", "{{ messages[0].a.b }}"])
def test_an_error_while_rendering_is_the_request_s_error(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ('{0.__class__}').format(messages) }}",
    ],
)
def test_a_template_cannot_reach_into_python_or_change_what_it_is_given(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    try:
        rendered = render(source, messages)
    except InvalidRequest:
        rendered = ""
    assert "class" not in rendered
    assert messages == [{"role": "user", "content": "hi"}]


def test_a_template_that_is_no_jinja_is_refused_with_its_line() -> None:
    with pytest.raises(ModelError, match=r"line 2"):
        ChatTemplate("fine\n{% if %}", {})
