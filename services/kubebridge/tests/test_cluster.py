"""Names from users cannot reach other paths of the API server."""

from pathlib import Path

import pytest
from aiohttp import web
from services.kubebridge.tests.faulty import Faulty, served

from virtbus.kubebridge.core.runtime.controller import SECRET
from virtbus.kubebridge.edge import cluster


class Listening(Faulty):
    """Has every object, and records the requested paths."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.raw_path)
        return web.json_response({"kind": "Secret"})


@pytest.mark.parametrize(
    ("name", "namespace"),
    [
        ("../../kube-system/secrets/theirs", "mine"),
        ("mine/../../../kube-system/secrets/theirs", "mine"),
        ("..%2f..%2fkube-system%2fsecrets%2ftheirs", "mine"),
        ("..", "mine"),
        (".", "mine"),
        ("", "mine"),
        ("theirs", "../namespaces/kube-system"),
        ("theirs", ".."),
    ],
)
async def test_a_name_cannot_leave_its_namespace(tmp_path: Path, name: str, namespace: str) -> None:
    server = Listening()
    async with served(server, tmp_path) as kubeconfig, cluster.connect(kubeconfig) as client:
        assert await client.get(SECRET, name, namespace) is None
        assert server.asked == []
        assert await client.get(SECRET, "own", "mine") is not None
    assert server.asked == ["/api/v1/namespaces/mine/secrets/own"]
