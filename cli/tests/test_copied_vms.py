"""A VM that is made like another one has nothing that only one VM can have."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from virtbus.cli.backup import _refuse_taken, _spec_of
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation
from virtbus.cli.vm.copied_nics import copied_nics


def test_a_copied_nic_has_no_addresses_and_ports_of_the_other_vm() -> None:
    nic: dict[str, Any] = {"name": "eth0", "network": "lan", "mac_address": "02:00:00:00:00:01"}
    nic |= {"addresses": ["10.0.0.7"], "publish": ["80:80"]}
    assert copied_nics({"interfaces": [nic]}) == [{"name": "eth0", "network": "lan"}]
    assert copied_nics({}) == []


def test_a_backup_with_a_device_of_its_node_is_not_restored() -> None:
    device = {"name": "data", "host_device": {"path": "/dev/loop0"}}
    spec = {"volumes": [{"name": "root", "image": {"ref": "tiny"}}, device]}
    with pytest.raises(CliError, match="disk data is a device or file"):
        _spec_of({"spec": spec, "disks": [{"name": "root"}]}, "web2", stopped=False)


@pytest.mark.parametrize("exit_code", [None, Exit.NOT_FOUND, Exit.UNAVAILABLE])
def test_a_restore_needs_a_free_name(exit_code: Exit | None) -> None:
    def call(*_: object) -> dict[str, Any]:
        if exit_code is not None:
            raise CliError(exit_code, "scripted", "scripted")
        return {"name": "web2"}

    asked = cast("Invocation", SimpleNamespace(call=call))
    if exit_code is Exit.NOT_FOUND:
        _refuse_taken(asked, "web2", "default")
        return
    with pytest.raises(CliError, match="there is a VM named web2" if not exit_code else "scripted"):
        _refuse_taken(asked, "web2", "default")
