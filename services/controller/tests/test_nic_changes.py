"""Interfaces that an update adds to a VM or removes from it."""

from typing import Any

import pytest
from services.controller.tests.fleets import record

from virtbus.controller.core.mutations import updated
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm import VmRecord, VmSpec

NICS, NETWORKS = "spec.domain.devices.interfaces", "spec.networks"
MAC = "02:00:00:00:00:01"


def with_nics(of: VmRecord, nics: list[Any], networks: list[Any] | None = None) -> VmSpec:
    """Return the record's spec with these interfaces; a name stands for one without properties."""
    plain = of.spec.model_dump()
    full = [{"name": nic} if isinstance(nic, str) else nic for nic in nics]
    plain["domain"]["devices"]["interfaces"] = full
    found = [{"name": nic["name"]} for nic in full] if networks is None else networks
    plain["networks"] = found
    return VmSpec.model_validate(plain)


def update(of: VmRecord, *args: Any) -> VmRecord:
    return updated(of, spec=with_nics(of, *args), labels=None, annotations=None)


def names(of: VmRecord) -> list[str]:
    return [nic.name for nic in of.spec.domain.devices.interfaces]


def test_interfaces_are_added_removed_and_replaced() -> None:
    before = record()
    more = update(before, [{"name": "lan", "mac_address": MAC}, "default", "late"])
    assert (names(more), more.generation) == (["lan", "default", "late"], before.generation + 1)
    fewer = update(more, ["late", {"name": "new", "mtu": 1400}])
    assert names(fewer) == ["late", "new"]
    assert names(update(fewer, [])) == []


def test_an_interface_that_stays_keeps_its_network_mac_and_order() -> None:
    before = update(record(), [{"name": "lan", "mac_address": MAC}, "default"])
    changed: tuple[tuple[list[Any], list[Any] | None, list[str]], ...] = (
        (["new", "lan"], None, [f"{NICS}[1].mac_address"]),
        (["lan"], [{"name": "lan", "network": "x"}], [f"{NICS}[0].mac_address"]),
        (["default", {"name": "lan", "mac_address": MAC}], None, []),
    )
    for nics, networks, paths in changed:
        with pytest.raises(VirtbusError) as caught:
            update(before, nics, networks)
        assert (caught.value.code, caught.value.reason) == (Code.UNSUPPORTED, "immutable")
        found = [detail.path for detail in caught.value.body.details]
        assert set(paths) <= set(found)
    assert f"{NETWORKS}[0].network" in _refused(before, ["lan"], [{"name": "lan", "network": "x"}])


def _refused(of: VmRecord, *args: Any) -> dict[str, str]:
    with pytest.raises(VirtbusError) as caught:
        update(of, *args)
    return {detail.path: detail.message for detail in caught.value.body.details}


def test_an_interface_and_its_network_come_and_go_together_and_once() -> None:
    before = record()
    assert _refused(before, ["default", "lan"], [{"name": "default"}]) == {
        f"{NICS}[1].name": "no network is named 'lan'; add one"
    }
    assert _refused(before, [], [{"name": "default"}]) == {
        f"{NETWORKS}[0].name": "no interface is named 'default'; add one"
    }
    twice = _refused(before, ["default", "lan", "lan"], [{"name": "default"}, {"name": "lan"}])
    assert twice == {f"{NICS}[2].name": "'lan' is used twice"}
