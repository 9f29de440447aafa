"""Fixtures: a node with two fake runtimes, and the proxy before them."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

# pytest's importlib mode puts no test folder on the path; shared code is imported from here.
sys.path.insert(0, str(Path(__file__).parents[3]))

from services.criproxy.tests.world import Node


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path).running() as node:
        yield node
