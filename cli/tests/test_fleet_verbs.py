"""Nodes, images, networks and the status page against scripted services."""

import json
from typing import Any

import pytest
from cli.tests.fakes import UID, Cli, Script

from virtbus.bus.client.ports import Request
from virtbus.schemas.api import (
    NodeDetail,
    NodePage,
    NodeVm,
)
from virtbus.schemas.image import ImageFormat, ImageInfo, Progress
from virtbus.schemas.image_api import DeletedImages, ImagePage, NodeImage, PulledImages
from virtbus.schemas.node import NodeSpec, NodeState, NodeView, ServiceState
from virtbus.schemas.node_rpc import ForgottenImage
from virtbus.schemas.states import VmState
from virtbus.schemas.subjects import progress

pytestmark = pytest.mark.integration

IMAGE: dict[str, Any] = {
    "digest": "sha256:" + "ab" * 32,
    "names": ("tiny",),
    "format": ImageFormat.QCOW2,
    "size_bytes": 17 * 1024**2,
    "virtual_size_bytes": 128 * 1024**2,
}


def node(**changes: Any) -> NodeView:
    known: dict[str, Any] = {
        "node": "n1",
        "hostname": "n1",
        "instance": "i",
        "state": NodeState.READY,
        "cpus": 4,
        "memory_bytes": 8 * 1024**3,
        "vms": 2,
    }
    return NodeView(**(known | changes))


def status(**changes: Any) -> dict[str, Any]:
    consumers = [{"name": "n-n1-agent", "pending": 3, "waiting": 1}]
    stream = {"name": "KV_vm", "fill": 0.01, "messages": 12, "replicas": 1, "consumers": consumers}
    known: dict[str, Any] = {
        "streams": [stream],
        "nodes": [node().model_dump(mode="json")],
        "vms": {"Running": 2},
        "oldest_pending_created_ns": None,
        "queue_depth": 0,
        "skew_s": 0.001,
        "highly_available": False,
    }
    return known | changes


async def test_node_list_shows_allocations(script: Script, cli: Cli) -> None:
    script.answer("node", "list", NodePage(items=(node(),)))
    ended = await cli("node", "list")
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[1].split()[:4] == ["n1", "ready", "2", "0/4"]


async def test_node_cordon_shows_the_node_and_its_vms(script: Script, cli: Cli) -> None:
    cordoned = node(node_spec=NodeSpec(node="n1", cordoned=True))
    vm = NodeVm(uid=UID, namespace="default", name="web", state=VmState.RUNNING)
    for verb in ("get", "cordon", "uncordon"):
        script.answer("node", verb, NodeDetail(node=cordoned, vms=(vm,)))
        ended = await cli("node", verb, "n1")
        assert ended.code == 0, ended.err
        assert ended.out.splitlines()[1].split()[:2] == ["n1", "ready,cordoned"]
        assert ended.out.splitlines()[-1].split() == ["default", "web", "Running", "-"]
        assert (await cli("node", verb, "n1", "-o", "json")).json["vms"][0]["name"] == "web"


async def test_node_get_shows_the_space_of_images(script: Script, cli: Cli) -> None:
    for quota, text in ((0, "images: 2GiB"), (8 << 30, "images: 2GiB of 8GiB")):
        full = node(image_bytes=2 << 30, image_quota_bytes=quota)
        script.answer("node", "get", NodeDetail(node=full))
        assert text in (await cli("node", "get", "n1")).out.splitlines()


async def test_image_list_shows_names_and_nodes(script: Script, cli: Cli) -> None:
    script.answer("image", "list", ImagePage(items=(NodeImage(**IMAGE, nodes=("n1",)),)))
    assert "tiny" in (await cli("image", "list")).out
    assert (await cli("image", "list", "-o", "json")).json["items"][0]["nodes"] == ["n1"]


async def test_pull_shows_progress_and_fails_where_a_node_failed(script: Script, cli: Cli) -> None:
    async def pull(request: Request) -> PulledImages:
        job = request.data["job"]
        report = Progress(uid=job, step="pull", done_bytes=5, total_bytes=10)
        await script.node.publish(progress("n1", job, "pull"), report)
        async with script.node.subscribe("virtbus.node.n1.evt.>"):
            pass  # the server has the report now: this message took the same path
        return PulledImages(images={"n1": ImageInfo(**IMAGE)}, errors={"n2": "disk full"})

    script.handlers["image", "pull"] = pull
    ended = await cli("image", "pull", "tiny")
    assert ended.code == 1
    assert "50 %" in ended.err
    assert "  n2: disk full" in ended.err
    assert "qcow2" in ended.out


async def test_status_names_services_lag_and_that_it_is_not_replicated(
    script: Script, cli: Cli
) -> None:
    script.answer("bus", "status", status())
    ended = await cli("status")
    assert ended.code == 0, ended.err
    assert "virtbus-controller" in ended.out
    assert "n-n1-agent:3" in ended.out
    assert "not highly available" in ended.out


async def test_status_raises_alarms(script: Script, cli: Cli) -> None:
    full = {"name": "KV_vm", "fill": 0.85, "messages": 1, "consumers": []}
    value = status(streams=[full], skew_s=3.0, oldest_pending_created_ns=1)
    script.answer("bus", "status", value)
    alarms = (await cli("status", "-o", "json")).json["alarms"]
    assert len(alarms) == 3


async def test_status_without_a_ready_node_exits_5(script: Script, cli: Cli) -> None:
    recovering = node(state=NodeState.RECOVERING).model_dump(mode="json")
    script.answer("bus", "status", status(nodes=[recovering]))
    ended = await cli("status", "-o", "json")
    assert ended.code == 5
    assert ended.json["nodes"][0]["state"] == "recovering"
    assert json.loads(ended.err)["error"]["exit_code"] == 5


async def test_status_shows_a_missing_service_and_exits_5(script: Script, cli: Cli) -> None:
    services = {"netd": ServiceState(message="does not answer")}
    known = node(services=services).model_dump(mode="json")
    script.answer("bus", "status", status(nodes=[known]))
    ended = await cli("status")
    assert ended.code == 5
    (row,) = [line for line in ended.out.splitlines() if line.startswith("virtbus-netd")]
    assert row.split() == ["virtbus-netd", "n1", "missing", "-", "-", "does", "not", "answer"]
    assert "virtbus-netd on n1" in ended.err


async def test_status_trusts_services_that_their_node_calls_ready(script: Script, cli: Cli) -> None:
    services = {"netd": ServiceState(state=NodeState.READY, version="1")}
    known = node(services=services).model_dump(mode="json")
    script.answer("bus", "status", status(nodes=[known]))
    assert (await cli("status")).code == 0


async def test_image_delete_reports_removed_names_and_remaining_users(
    script: Script, cli: Cli
) -> None:
    gone = ForgottenImage(names=("tiny",), freed_bytes=17 * 1024**2)
    kept = ForgottenImage(names=("tiny",), used_by=(UID,))
    script.answer("image", "delete", DeletedImages(nodes={"n1": gone, "n2": kept}))
    ended = await cli("image", "delete", "tiny")
    assert ended.code == 0, ended.err
    assert [line.split() for line in ended.out.splitlines()[1:]] == [
        ["n1", "tiny", "17MiB", "0"],
        ["n2", "tiny", "0B", "1"],
    ]
    script.answer("image", "delete", DeletedImages(nodes={"n1": gone}, errors={"n2": "silent"}))
    assert (await cli("image", "delete", "tiny")).code == 1


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("virtbus image pull t", ["plain,tiny"]),
        ("virtbus vm create web --image t", ["plain,tiny"]),
        ("virtbus image pull tiny --node n", ["plain,n1"]),
        ("virtbus image pull tiny --node x", []),
    ],
)
async def test_completion_offers_names_from_the_bus(
    script: Script, cli: Cli, words: str, offered: list[str]
) -> None:
    script.answer("node", "list", NodePage(items=(node(),)))
    script.answer("image", "list", ImagePage(items=(NodeImage(**IMAGE, nodes=("n1",)),)))
    ended = await cli(
        _VIRTBUS_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(words.count(" "))
    )
    assert ended.out.split() == offered
    assert ended.err == ""
