"""The whole product over nixl and over mooncake, where they are installed: the tokens of one worker that does both."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.proc.test_equality import colocated, model, prompts  # noqa: F401  (fixtures)
from tests.proc.test_transfer_packages import PACKAGES

from slipstream import LLM


@pytest.mark.parametrize("package", PACKAGES)
def test_disaggregated_output_equals_colocated(
    model: Path,  # noqa: F811
    colocated: list[list[int]],  # noqa: F811
    package: str,
) -> None:
    batch, params = prompts()
    with LLM(
        str(model), prefill=1, decode=1, dtype="float32", kv_tokens=16384, transport=package, page_tokens=16
    ) as llm:
        answers = llm.generate(batch, params, progress=False)
        routes = llm.routes()
        audits = llm.audit()
    assert [answer.token_ids for answer in answers] == colocated
    assert set(routes.values()) == {package}
    assert audits["router"]["problems"] == []
