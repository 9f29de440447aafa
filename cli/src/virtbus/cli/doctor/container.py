"""Adapts findings to a Docker Compose container, which hides other containers' resources."""

import os
from collections.abc import Mapping

from virtbus.cli.doctor.finding import OK, CheckResult, ok, unknown

COMPOSE = "VIRTBUS_COMPOSE"
"""Variable set by docker-compose.yml. /.dockerenv is no sign of compose, because it also exists in
containers that serve as hosts."""

OWN = frozenset({"root", "python", "nats-server", "bus", "credentials", "container"})
"""Checks that are valid in a container, because they concern the container or shared resources."""
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
    "image conversion": "imaged",
}
"""By check: the service of docker-compose.yml whose container has the check's resource."""
LOOKS = {
    "kvm": "docker compose exec libvirt virt-host-validate qemu",
    "forward policy": "docker compose exec netd nft list chain ip filter FORWARD",
    "image tiny": "docker compose exec nats virtbus image list",
}
"""By check: the command that repeats the check in the right container. The default command shows
the service's state."""


def judged(finding: CheckResult, environ: Mapping[str, str] = os.environ) -> CheckResult:
    """Return the finding, or "unknown" if the finding's resource is in another container."""
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
    """Report whether doctor runs in a Docker Compose container."""
    if COMPOSE in os.environ:
        return ok("container", "one of compose; `docker compose ps` has the health of each")
    return ok("container", "not of compose: it is checked like a host")
