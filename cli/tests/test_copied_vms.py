"""A VM that is made like another one has nothing that only one VM can have."""

from virtbus.cli.vm.copied_nics import copied_nics


def test_a_copied_nic_has_no_addresses_and_ports_of_the_other_vm() -> None:
    nic = {"name": "eth0", "network": "lan", "mac_address": "02:00:00:00:00:01"}
    nic |= {"addresses": ["10.0.0.7"], "publish": ["80:80"]}
    assert copied_nics({"interfaces": [nic]}) == [{"name": "eth0", "network": "lan"}]
    assert copied_nics({}) == []
