"""Requests to the API server: paths with names from users, and preconditions of deletes."""

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


class Deleting(Faulty):
    """Records the preconditions of deletes, and answers each with a conflict."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.wanted = (await request.json())["preconditions"]
        status = {"kind": "Status", "code": 409, "reason": "Conflict"}
        return web.json_response(status, status=409)


@pytest.mark.parametrize("uid", ["", "u1"])
async def test_a_delete_at_a_version_needs_no_uid(tmp_path: Path, uid: str) -> None:
    server = Deleting()
    async with served(server, tmp_path) as kubeconfig, cluster.connect(kubeconfig) as client:
        with pytest.raises(cluster.StatusError) as caught:
            await client.delete(SECRET, "a", "n", uid, "7")
    assert caught.value.code == 409
    assert server.wanted == {"resourceVersion": "7"} | ({"uid": uid} if uid else {})
