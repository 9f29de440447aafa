"""Fixtures: a fake fleet, and the CRI of its node with a client of the socket."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

# pytest's importlib mode puts no test folder on the path; shared code is imported from here.
sys.path.insert(0, str(Path(__file__).parents[3]))

from services.cri.tests.api_server import ApiServer
from services.cri.tests.world import Fleet, Kubelet, cri


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet().serving() as fleet:
        yield fleet


@pytest.fixture
async def kubelet(tmp_path: Path, fleet: Fleet) -> AsyncIterator[Kubelet]:
    async with cri(tmp_path, fleet) as kubelet:
        yield kubelet


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    async with ApiServer().serving() as api:
        yield api


@pytest.fixture
async def reader(tmp_path: Path, fleet: Fleet, api: ApiServer) -> AsyncIterator[Kubelet]:
    async with cri(tmp_path, fleet, kubeconfig=api.kubeconfig(tmp_path)) as kubelet:
        yield kubelet
