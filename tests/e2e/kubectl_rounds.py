"""The same rounds as `nic_rounds`, by kubectl and a NetworkAttachmentDefinition."""

import json
from typing import Any

from tests.e2e.bridged import Bridged, manifest
from tests.e2e.login import Login
from tests.e2e.nic_rounds import Web
from tests.e2e.platform import Json, until
from tests.e2e.test_networks import as_admin

NAME, NETWORK, DEFINITION = "plugged", "shop", "lan"
KINDS = "network-attachment-definitions.k8s.cni.cncf.io"
SPEC = "/spec/template/spec"
NICS = f"{SPEC}/domain/devices/interfaces"


def _kind() -> Json:
    """Return the definition of the kind NetworkAttachmentDefinition, as Multus installs it."""
    config = {"type": "object", "properties": {"config": {"type": "string"}}}
    schema = {"type": "object", "properties": {"spec": config}}
    version = {"name": "v1", "served": True, "storage": True}
    names = {
        "plural": "network-attachment-definitions",
        "singular": "network-attachment-definition",
        "kind": "NetworkAttachmentDefinition",
        "shortNames": ["net-attach-def"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": KINDS},
        "spec": {
            "group": "k8s.cni.cncf.io",
            "scope": "Namespaced",
            "names": names,
            "versions": [version | {"schema": {"openAPIV3Schema": schema}}],
        },
    }


class KubectlWeb(Web):
    """A guest of a VirtualMachine. Its second interface is on the network of a definition."""

    gateway = "10.201.0.1"

    def __init__(self, bridge: Bridged, login: Login) -> None:
        self._bridge = bridge
        spec = {"kind": "nat", "subnet": "10.201.0.0/24"}
        as_admin(bridge.platform, "create", namespace=bridge.namespace, name=NETWORK, spec=spec)
        bridge.apply(_kind())
        bridge.wait("crd", KINDS, "--for=condition=Established")
        bridge.apply(
            {
                "apiVersion": "k8s.cni.cncf.io/v1",
                "kind": "NetworkAttachmentDefinition",
                "metadata": {"name": DEFINITION},
                "spec": {"config": json.dumps({"cniVersion": "1.0.0", "name": NETWORK})},
            }
        )
        with open(login.public_key, encoding="utf-8") as key:
            keys = f"ssh_authorized_keys: ['{key.read().strip()}']"
        bridge.apply(manifest(NAME, f"#cloud-config\n{keys}\n"))
        bridge.wait(f"vm/{NAME}", "--for=condition=Ready")
        bridge.said(NAME, "GUEST-NICS ")
        super().__init__(bridge.platform, login, self.now())

    def now(self) -> Json:
        text = self._bridge.platform.cli(
            "vm", "get", NAME, "-n", self._bridge.namespace, "-o", "json"
        )
        view: Json = json.loads(text)
        return view

    def end(self) -> None:
        """Delete the guest and its network."""
        self._bridge.kubectl("delete", "vm", NAME)
        self._bridge.wait(f"vmi/{NAME}", "--for=delete")
        as_admin(self.platform, "delete", namespace=self._bridge.namespace, name=NETWORK)

    def add(self) -> None:
        self._patch(
            ("add", f"{NICS}/-", {"name": "more", "bridge": {}}),
            ("add", f"{SPEC}/networks/-", {"name": "more", "multus": {"networkName": DEFINITION}}),
        )

    def remove(self, name: str) -> None:
        assert self._names() == ["default", name]
        self._patch(("add", f"{NICS}/1/state", "absent"))

    def plug(self) -> Json:
        nic = super().plug()
        until(lambda: "domain" in self._sources(), lambda: f"in the VMI's status: {self._status()}")
        return nic

    def unplug(self, name: str = "more") -> None:
        super().unplug(name)
        until(lambda: self._names() == ["default"], "it leaves the template")
        until(lambda: len(self._status()) == 1, "it leaves the VMI's status")

    def _patch(self, *steps: tuple[str, str, Any]) -> None:
        patch = [{"op": op, "path": path, "value": value} for op, path, value in steps]
        self._bridge.kubectl("patch", "vm", NAME, "--type=json", "-p", json.dumps(patch))

    def _names(self) -> list[str]:
        spec = self._bridge.get("vm", NAME)["spec"]["template"]["spec"]
        return [one["name"] for one in spec["domain"]["devices"]["interfaces"]]

    def _status(self) -> list[Json]:
        found: list[Json] = self._bridge.get("vmi", NAME)["status"]["interfaces"]
        return found

    def _sources(self) -> str:
        """Return where the VMI's status has the second interface from."""
        return "".join(one["infoSource"] for one in self._status() if one["name"] == "more")
