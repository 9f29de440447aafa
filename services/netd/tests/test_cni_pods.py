"""The pod of a VM in the words that CNI plugins get, and other VMs, which have none."""

import json
from typing import Any

import pytest
from services.netd.tests.pretended_host import Node, make_record
from services.netd.tests.test_cni import A, bridge, conflist, plugin, without_bridge

from virtbus.netd.core.cni import arguments
from virtbus.netd.core.plan import plan_of
from virtbus.schemas.pod import POD_NAME, POD_UID

POD_OF = "5e0c6b1a-8f3e-4f0a-9d53-2b1f0a7c9e11"
POD: dict[str, Any] = {
    "networks": ("lan",),
    "namespace": "shop",
    "owner": "cri-n1",
    "annotations": {POD_NAME: "web-0", POD_UID: POD_OF},
}
WORDS = {
    "K8S_POD_NAMESPACE": "shop",
    "K8S_POD_NAME": "web-0",
    "K8S_POD_INFRA_CONTAINER_ID": A,
    "K8S_POD_UID": POD_OF,
}


def words(**more: Any) -> dict[str, str]:
    (nic,) = plan_of(make_record(A, **{**POD, **more})).nics
    found = arguments(nic)
    assert found.pop("IgnoreUnknown") == "1"
    assert found.pop("MAC") == nic.mac
    return found


def test_plugins_get_the_pod_of_a_vm() -> None:
    assert words() == WORDS
    static = POD_OF.replace("-", "")
    assert words(annotations={POD_NAME: "a.b", POD_UID: static})["K8S_POD_UID"] == static


@pytest.mark.parametrize(
    "more",
    [
        {"owner": ""},
        {"owner": "bridge"},
        {"annotations": {}},
        {"annotations": {POD_NAME: "web-0"}},
        {"annotations": {POD_NAME: "web;K8S_POD_NAMESPACE=kube-system", POD_UID: POD_OF}},
        {"annotations": {POD_NAME: "web-0\n", POD_UID: POD_OF}},
        {"annotations": {POD_NAME: "web-0", POD_UID: "a=b"}},
    ],
)
def test_a_vm_that_is_no_pod_names_none(more: dict[str, Any]) -> None:
    assert words(**more) == {}


@pytest.mark.integration
async def test_add_delete_and_the_stored_result_name_the_pod(node: Node) -> None:
    script = 'echo "$CNI_COMMAND $CNI_ARGS" >> $0.args; sed \'s/.*"prevResult": //; s/}$//\''
    plugin(node, "tells", script)
    conflist(node, "lan", bridge(node), {"type": "tells"})
    try:
        ready = await node.attach(A, **POD)
        (file,) = (node.state_dir / "netd" / "cni" / "results").iterdir()
        stored = json.loads(file.read_text())["cniArgs"]
        expected = {"IgnoreUnknown": "1", **WORDS, "MAC": ready.interfaces[0].mac}
        assert stored == [[name, value] for name, value in expected.items()]
        await node.restart()
        await node.attachments.release(A, 1)
        told = (node.host.tmp / "cni-bin" / "tells.args").read_text().splitlines()
        text = ";".join(f"{name}={value}" for name, value in expected.items())
        assert told == [f"ADD {text}", f"DEL {text}"]
    finally:
        without_bridge()
