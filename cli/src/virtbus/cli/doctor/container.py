"""Checks inside a compose container: resources of the host or of other containers are unknown."""

import os
from collections.abc import Mapping

from virtbus.cli.doctor.finding import OK, CheckResult, ok, unknown

COMPOSE = "VIRTBUS_COMPOSE"
"""Set by docker-compose.yml. /.dockerenv is also in containers that are whole hosts."""

OWN = frozenset({"root", "python", "nats-server", "bus", "credentials", "container"})
"""Checks of the container itself, or of resources that every container of the host shares."""
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
"""Check → the service of docker-compose.yml that has the checked resource."""
LOOKS = {
    "kvm": "docker compose exec libvirt virt-host-validate qemu",
    "forward policy": "docker compose exec netd nft list chain ip filter FORWARD",
    "image tiny": "docker compose exec nats virtbus image list",
}
"""Check → the command that checks in the right place; otherwise the health of that service."""


def judged(finding: CheckResult, environ: Mapping[str, str] = os.environ) -> CheckResult:
    """Return the finding, as unknown if only this container lacks the resource."""
    if COMPOSE not in environ or finding.level == OK or finding.name in OWN:
        return finding
    service = SERVICES.get(finding.name)
    if service is None:
        what = "cannot be seen from inside this container"
        return unknown(finding.name, what, "virtbus doctor   (on the host)")
    what = f"is in the container `{service}`, and cannot be seen from here"
    look = LOOKS.get(finding.name, f"docker compose ps {service}")
    return unknown(finding.name, what, look)


def container() -> CheckResult:
    """Return the container that doctor runs in."""
    if COMPOSE in os.environ:
        return ok("container", "one of compose; `docker compose ps` has the health of each")
    return ok("container", "not of compose: this is looked at as the host itself")
