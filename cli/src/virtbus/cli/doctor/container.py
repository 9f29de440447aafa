"""Doctor inside a container of compose: what is on the host or in another container is unknown."""

import os
from collections.abc import Mapping

from virtbus.cli.doctor.finding import OK, Finding, ok, unknown

COMPOSE = "VIRTBUS_COMPOSE"
"""Set by docker-compose.yml. /.dockerenv is also in containers that are whole hosts."""

OWN = frozenset({"root", "python", "nats-server", "bus", "credentials", "container"})
"""Checks of the container itself, or of what every container of the host shares."""
SERVICES = {
    "qemu": "libvirt",
    "kvm": "libvirt",
    "libvirtd": "libvirt",
    "libvirtd limits": "libvirt",
    "virtlogd": "libvirt",
    "vmwrapper": "netd",
    "nftables": "netd",
    "cni plugins": "netd",
    "forward policy": "netd",
    "image tiny": "imaged",
}
"""Check → the service of docker-compose.yml that has what it looks for."""
LOOKS = {
    "kvm": "docker compose exec libvirt virt-host-validate qemu",
    "forward policy": "docker compose exec netd nft list chain ip filter FORWARD",
    "image tiny": "docker compose exec nats virtbus image list",
}
"""Check → the line that looks in the right place; else the health of that service."""


def judged(finding: Finding, environ: Mapping[str, str] = os.environ) -> Finding:
    """The same finding, but unknown where it is only this container that lacks something."""
    if COMPOSE not in environ or finding.level == OK or finding.name in OWN:
        return finding
    service = SERVICES.get(finding.name)
    if service is None:
        what = "cannot be seen from inside this container"
        return unknown(finding.name, what, "virtbus doctor   (on the host)")
    what = f"is in the container `{service}`, and cannot be seen from here"
    look = LOOKS.get(finding.name, f"docker compose ps {service}")
    return unknown(finding.name, what, look)


def container() -> Finding:
    """Where doctor looks from."""
    if COMPOSE in os.environ:
        return ok("container", "one of compose; `docker compose ps` has the health of each")
    return ok("container", "not of compose: this is looked at as the host itself")
