"""Networks that are not what a VM's spec says about them, as a client sees their refusal."""

import json
from typing import Any

from services.controller.tests.fleets import node, uid
from services.controller.tests.test_network_api import make, paths
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle

from virtbus.schemas.cni_config import plugins_digest

PTP = {"type": "ptp"}
NIC, NETWORK = "spec.domain.devices.interfaces[0].binding", "spec.networks[0].network"


async def bound(made: World, binding: str, network: str = "blue", **more: Any) -> Any:
    spec = {
        "networks": [{"name": "a", "network": network, **more}],
        "domain": {"devices": {"interfaces": [{"name": "a", "binding": binding}]}},
    }
    await made.ask("create", name="bound", image="tiny", uid=uid(7), spec=spec)
    return await made.stored(uid(7))


@played()
async def test_a_binding_needs_a_network_of_its_kind(made: World) -> None:
    await made.hear(node("n1", links={"eth1": "macvtap"}))
    await settle()
    await make(made)
    await make(made, "lan", 2, namespace="_", spec={"kind": "macvtap", "link": "eth1"})
    error = await refused(bound(made, "macvtap"))
    assert (error.reason, paths(error)) == ("invalid", [NIC])
    assert "write bridge" in error.body.message
    error = await refused(bound(made, "masquerade", "lan"))
    assert paths(error) == [NIC]
    stored = await bound(made, "macvtap", "lan")
    assert stored.network_targets["lan"].spec.kind == "macvtap"
    nics = [{"name": "a", "binding": "masquerade"}]
    spec = stored.spec.model_dump(mode="json")
    spec["domain"]["devices"]["interfaces"] = nics
    revision = (await made.ask("get", uid=uid(7)))["revision"]
    error = await refused(made.ask("update", uid=uid(7), revision=revision, spec=spec))
    assert paths(error) == [NIC]


@played()
async def test_named_plugins_have_to_be_those_of_the_network(made: World) -> None:
    await made.hear(node("n1", cni_plugins=("ptp",)))
    await settle()
    await make(made)
    config = json.dumps({"cniVersion": "1.0.0", "plugins": [PTP]})
    await make(made, "lan", 2, spec={"kind": "cni", "config": config})
    ours = {"plugins_digest": plugins_digest(PTP | {"name": "any", "cniVersion": "0.4.0"})}
    for network, digest, why in (
        ("blue", ours, "it is a nat network"),
        ("default", ours, "it is a nat network"),
        ("lan", {"plugins_digest": plugins_digest({"type": "macvlan"})}, "another one"),
    ):
        error = await refused(bound(made, "bridge", network, **digest))
        assert paths(error) == [NETWORK]
        assert why in error.body.message
    assert (await bound(made, "bridge", "lan", **ours)).node == "n1"
