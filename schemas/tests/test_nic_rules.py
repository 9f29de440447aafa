"""Properties of interfaces: what excludes each other, and what a hash covers."""

import pytest
from pydantic import ValidationError

from virtbus.schemas.nic import NICS_MAX
from virtbus.schemas.nic_rules import nic_problems
from virtbus.schemas.vm import Disk, Domain, Interface
from virtbus.schemas.wire import canonical


def problems(*nics: Interface, disks: tuple[Disk, ...] = ()) -> list[tuple[str, str]]:
    found = nic_problems(dict(enumerate(nics)), dict(enumerate(disks)))
    return [(one.path.removeprefix("spec.domain.devices."), one.message) for one in found]


def test_values_that_two_devices_share_are_refused_with_the_other_one() -> None:
    one, other = Interface(name="a", boot_order=2), Interface(name="b", boot_order=2)
    assert problems(one, other) == [
        (
            "interfaces[1].boot_order",
            "2 is the boot order of interface 'a', too; give each its own",
        )
    ]
    (found,) = problems(one, disks=(Disk(name="root", boot_order=2),))
    assert found[1].startswith("2 is the boot order of disk 'root'")
    (found,) = problems(Interface(name="a", acpi_index=7), Interface(name="b", acpi_index=7))
    assert found[0] == "interfaces[1].acpi_index"
    assert found[1] == "7 is the index of interface 'a', too; give each its own"
    assert problems(one, Interface(name="b", boot_order=1), disks=(Disk(name="root"),)) == []


def test_only_virtio_has_several_queues() -> None:
    assert problems(Interface(name="a", queues=4)) == []
    assert problems(Interface.model_validate({"name": "a", "model": "e1000", "queues": 1})) == []
    (found,) = problems(Interface.model_validate({"name": "a", "model": "e1000e", "queues": 2}))
    assert found[0] == "interfaces[0].queues"


def test_a_vm_has_bounds_of_its_queues_and_of_e1000_in_all() -> None:
    many = [Interface(name=f"n{n}", queues=4) for n in range(NICS_MAX)]
    assert problems(*many) == []
    many[3] = Interface(name="n3", queues=5)
    assert problems(*many) == [
        ("interfaces[31].queues", "a VM has at most 128 queues in all, here 129; lower some")
    ]
    models = [
        Interface.model_validate({"name": f"n{n}", "model": ("e1000", "e1000e")[n % 2]})
        for n in range(10)
    ]
    assert problems(*models[:8], Interface(name="v")) == []
    (found,) = problems(*models)
    assert found[0] == "interfaces[8].model"


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "rtl8139"},
        {"boot_order": 0},
        {"acpi_index": 16384},
        {"mtu": 575},
        {"mtu": 65522},
        {"queues": 17},
        {"state": "absent"},
        {"limits": {"inbound": {}}},
        {"limits": {"inbound": {"bytes_per_s": 999}}},
        {"limits": {"outbound": {"bytes_per_s": "1MiB", "burst_bytes": 1599}}},
    ],
)
def test_values_out_of_bounds_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Interface.model_validate({"name": "a", **wrong})


def test_the_hash_of_an_interface_of_an_older_release_stays() -> None:
    plain = canonical(Domain.model_validate({"devices": {"interfaces": [{"name": "a"}]}}))
    assert b'"interfaces":[{"mac_address":null,"model":"virtio","name":"a"}]' in plain
    for more in ({"boot_order": 1}, {"mtu": 1400}, {"state": "down"}, {"queues": 2}):
        nics = {"devices": {"interfaces": [{"name": "a", **more}]}}
        assert canonical(Domain.model_validate(nics)) != plain


def test_a_port_is_published_once_in_a_vm() -> None:
    web = {"host_port": 80, "guest_port": 8080}
    one = Interface.model_validate({"name": "a", "publish": [web]})
    here = {"host_address": "192.0.2.1", "guest_port": 1}
    other = Interface.model_validate({"name": "b", "publish": [web | here]})
    (found,) = problems(one, other)
    assert found[0] == "interfaces[1].publish[0].host_port"
    ipv4, mapped = (
        Interface.model_validate({"name": name, "publish": [web | {"host_address": address}]})
        for name, address in (("a", "192.0.2.1"), ("b", "::ffff:192.0.2.1"))
    )
    assert mapped.publish == ipv4.publish
    (found,) = problems(ipv4, mapped)
    assert found[0] == "interfaces[1].publish[0].host_port"


def test_the_port_by_which_hosts_exchange_frames_of_overlays_is_not_published() -> None:
    port = {"host_port": 14789, "guest_port": 53, "protocol": "udp"}
    (found,) = problems(Interface.model_validate({"name": "a", "publish": [port]}))
    assert found[0] == "interfaces[0].publish[0].host_port"
    assert found[1].startswith("hosts use 0.0.0.0:14789/udp for overlay networks")
    tcp = Interface.model_validate({"name": "a", "publish": [port | {"protocol": "tcp"}]})
    assert problems(tcp) == []


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "0.0.0.0", "224.0.0.1", "::1", "::ffff:127.0.0.1", "localhost"]
)
def test_only_an_address_that_others_reach_is_published(address: str) -> None:
    port = {"host_port": 80, "guest_port": 80, "host_address": address}
    with pytest.raises(ValidationError):
        Interface.model_validate({"name": "a", "publish": [port]})


def masked(**more: object) -> Interface:
    return Interface.model_validate({"name": "a", "binding": "masquerade", **more})


def test_a_guest_behind_nat_has_ports_and_networks_of_its_own() -> None:
    nic = masked(ports=[{"port": 80}, {"port": 8000, "last_port": 8010, "protocol": "udp"}])
    assert problems(nic) == []
    assert [port.text for port in nic.ports] == ["80/tcp", "8000-8010/udp"]
    own = {"vm_network_cidr": "10.1.0.0/30", "vm_ipv6_network_cidr": "fd00:1::/64"}
    assert problems(masked(**own)) == []
    plain = Interface.model_validate({"name": "a", "ports": [{"port": 80}], **own})
    assert [path for path, _ in problems(plain)] == [
        f"interfaces[0].{field}" for field in ("ports", *own)
    ]


def test_one_interface_of_a_vm_is_behind_nat() -> None:
    (found,) = problems(masked(), Interface(name="c"), masked(name="b"))
    assert found[0] == "interfaces[2].binding"
    assert found[1].startswith("interface 'a' has masquerade")


def test_a_published_port_is_declared() -> None:
    to_80 = {"publish": [{"host_port": 8080, "guest_port": 80}]}
    assert problems(masked(**to_80)) == []
    assert problems(masked(ports=[{"port": 79, "last_port": 81}], **to_80)) == []
    for port in ({"port": 81}, {"port": 80, "protocol": "udp"}):
        (found,) = problems(masked(ports=[port], **to_80))
        assert found == ("interfaces[0].publish[0].guest_port", f"{found[1]}")
        assert found[1].startswith("80/tcp is not among ports")


@pytest.mark.parametrize(
    "wrong",
    [
        {"binding": "slirp"},
        {"ports": [{"port": 0}]},
        {"ports": [{"port": 9, "last_port": 8}]},
        {"vm_network_cidr": "10.0.2.1/24"},
        {"vm_network_cidr": "10.0.2.0/31"},
        {"vm_network_cidr": "127.0.0.0/8"},
        {"vm_network_cidr": "fd00::/64"},
        {"vm_ipv6_network_cidr": "10.0.2.0/24"},
        {"vm_ipv6_network_cidr": "fe80::/64"},
    ],
)
def test_bindings_ports_and_networks_out_of_bounds_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        masked(**wrong)


def test_a_record_of_an_older_release_has_no_field_of_a_binding() -> None:
    plain = Interface(name="a").model_dump(mode="json")
    assert not {"binding", "ports", "vm_network_cidr", "vm_ipv6_network_cidr"} & plain.keys()


def test_ports_are_also_passts() -> None:
    nic = {"name": "a", "ports": [{"port": 22}], "binding": "passt"}
    assert problems(Interface.model_validate(nic)) == []
    wrong = Interface.model_validate({**nic, "vm_network_cidr": "10.1.0.0/30"})
    assert [path for path, _ in problems(wrong)] == ["interfaces[0].vm_network_cidr"]
