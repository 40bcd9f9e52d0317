"""Fixtures of tests with several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.proc.transfer_child import Node
from tests.proc.transfer_pair import Child


@pytest.fixture
def pair() -> Iterator[Callable[..., tuple[Any, Child]]]:
    made: list[Any] = []

    def start(transport: str, *, pages: int = 64, layers: int = 8) -> tuple[Any, Child]:
        """(node here, child there); either may use `transport` as a source and be reached by all of them."""
        child = Child(transport, pages, layers)
        made.append(child)
        node = Node(transport, pages, layers)
        made.append(node)
        return node, child

    yield start
    for one in made:
        one.close()
