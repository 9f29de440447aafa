"""Networks as objects: booted guests use them, and they end after their last VM."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.login import Login
from tests.e2e.platform import Json, Platform, Refused, address, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def as_admin(platform: Platform, verb: str, **data: Any) -> Any:
    async def asked() -> Any:
        async with platform.bus("admin") as bus:
            return await bus.request(f"virtbus.api.v1.network.{verb}", data, timeout_s=30)

    return asyncio.run(asked())


def vm(platform: Platform, name: str, *networks: str, folder: Path, key: str, wait: str) -> Json:
    spec = {"networks": [{"name": network, "network": network} for network in networks]}
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"image": "tiny", "memory": "128MiB", "spec": spec}))
    return platform.create(name, "-f", str(file), "--ssh-key", key, wait=wait)


def test_guests_use_networks_of_their_own_until_the_last_vm_ends(
    patient: Platform, tmp_path: Path
) -> None:
    login = Login(tmp_path)
    with pytest.raises(Refused) as refused:
        patient.cli("network", "create", "shop", "--subnet", "10.201.0.0/24", "-o", "json")
    assert refused.value.error["reason"] == "admin_only"
    shop = {"kind": "nat", "subnet": "10.201.0.0/24", "gateway": "10.201.0.9", "mtu": 1400}
    as_admin(patient, "create", name="shop", spec=shop)
    patient.cli("network", "create", "lab", "--kind", "isolated", "--subnet", "10.9.0.0/24")

    how: dict[str, Any] = {"folder": tmp_path, "key": login.public_key}
    one = vm(patient, "one", "default", "shop", "lab", wait="ready", **how)
    two = vm(patient, "two", "default", "shop", "lab", wait="ready", **how)
    assert [address(one, nic).rpartition(".")[0] for nic in (1, 2)] == ["10.201.0", "10.9.0"]

    def in_guest(command: str) -> str:
        return login(one, command).strip()

    until(lambda: "10.201.0." in in_guest("ip -4 addr show eth1"), "a lease of the nat network")
    assert in_guest("cat /sys/class/net/eth1/mtu") == "1400"
    for nic in (1, 2):
        in_guest(f"ping -c 1 -W 3 -I eth{nic} {address(two, nic)}")
    in_guest("ping -c 1 -W 3 -I eth1 10.201.0.9")
    assert in_guest("ping -c 1 -W 1 -I eth2 10.9.0.1 >/dev/null 2>&1 || echo closed") == "closed"

    patient.wait_back("netd", patient.kill("netd"))
    in_guest(f"ping -c 1 -W 3 -I eth2 {address(two, 2)}")

    listed = json.loads(patient.cli("network", "list", "-o", "json"))
    assert [(each["name"], each["user_count"]) for each in listed["items"]] == [
        ("lab", 2),
        ("shop", 2),
    ]
    with pytest.raises(Refused) as refused:
        patient.cli("network", "delete", "lab", "-o", "json")
    assert refused.value.error["reason"] == "network_in_use"
    patient.delete("one", "two")
    patient.cli("network", "delete", "lab", "shop")
    assert not json.loads(patient.cli("network", "list", "-o", "json"))["items"]
    patient.nothing_left()
