"""Derives the DNS settings of a pod's VM, the guest's name with a domain, and its host aliases.

kubelet applies the pod's DNS policy: the sandbox has the servers and domains of the cluster, of the
node, or of the pod's `dnsConfig`. As for a container, they replace those of the VM's network.

kubelet writes the host aliases to a file, and mounts this file only if the pod already has an
address. If the mount is missing, the aliases are read from the pod on the API server.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv6Address
from typing import Any, NamedTuple

from pydantic import ValidationError

from virtbus.cri.core.configs import Mount, SandboxConfig
from virtbus.schemas.dns import DnsConfig
from virtbus.schemas.errors import Detail
from virtbus.schemas.guest_files import HOSTNAMES_MAX, HostAlias
from virtbus.schemas.ids import HOST_NAME_MAX, is_host_name
from virtbus.schemas.seed import HOST_ALIAS_CHARACTERS_MAX, HOST_ALIASES_MAX

HOSTS = "/etc/hosts"
_OF_KUBELET = re.compile(r"/pods/[^/]+/etc-hosts$")
_ALIASES = "# Entries added by HostAliases."
"""The line of kubelet's file before the pod's host aliases."""
_TOO_MANY = (
    f"the pod's hostAliases have more than {HOST_ALIASES_MAX} lines of {HOSTNAMES_MAX} names, or "
    f"{HOST_ALIAS_CHARACTERS_MAX // 1024} KiB; give the guest fewer"
)
SOURCE, FROM_API = "kubernetes.io/config.source", "api"
"""kubelet's annotation for the source of a pod, and its value for the API server."""
_NO_DOMAIN = "."
"""kubelet's only search domain on a node without a resolv.conf."""
_SANDBOX_FIELDS = {"nameservers": "servers"}


def dns_config(sandbox: SandboxConfig) -> DnsConfig | None:
    """Return the DNS settings of the pod's VM; None if the sandbox has none.

    A server with a zone (`fe80::1%eth0`) is left out, because the zone names a link of the node.

    Raises:
        ValidationError: no guest can have one of the values.
    """
    told = sandbox.dns_config
    if not told.servers and not told.searches:
        return None
    return DnsConfig(
        nameservers=tuple(one for one in told.servers if not _has_zone(one)),
        searches=tuple(one.removesuffix(".") for one in told.searches if one != _NO_DOMAIN),
    )


def _has_zone(server: str) -> bool:
    try:
        return IPv6Address(server).scope_id is not None
    except ValueError:
        return False


def problems(sandbox: SandboxConfig) -> Iterator[Detail]:
    """Yield the problems of the sandbox's DNS settings."""
    try:
        dns_config(sandbox)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            names = [_SANDBOX_FIELDS.get(str(name), str(name)) for name in one["loc"][:1]]
            path = ".".join(("dns_config", *names))
            given = f" {one['input']!r:.80}" if names else ""
            message = f"{path}{given}: {one['msg'].removeprefix('Value error, ')}"
            yield Detail(path=path, message=message)


def hosts_files(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """Return the mounts of kubelet's file with the pod's host aliases."""
    return tuple(
        one for one in mounts if one.container_path == HOSTS and _OF_KUBELET.search(one.host_path)
    )


class Hosts(NamedTuple):
    """The contents of kubelet's file: the pod's name with its domain, and the host aliases.

    A pod without a subdomain has the `fqdn` None.
    """

    fqdn: str | None = None
    aliases: tuple[HostAlias, ...] = ()


def of_file(content: bytes) -> Hosts:
    """Return the contents of kubelet's file.

    Raises:
        ValueError: the file has too many aliases, or a line is not an address with names.
    """
    if len(content) > HOST_ALIAS_CHARACTERS_MAX:
        raise ValueError(_TOO_MANY)
    own, _, section = content.decode().partition(f"\n{_ALIASES}\n")
    aliases = _aliases(line.split() for line in section.splitlines())
    return Hosts(next(_names(own), None), aliases)


def names(sandbox: SandboxConfig, wished: str, hosts: Hosts) -> dict[str, str | None]:
    """Return the seed's fields `hostname` and `fqdn` of the guest.

    `wished` is the host name in cloud-init's meta-data. If it has a domain, only `fqdn` keeps the
    domain. If the sandbox's hostname has a domain, `hostname` keeps the domain, too: kubelet adds a
    domain only for `setHostnameAsFQDN`.
    """
    if wished:
        return {"hostname": wished.partition(".")[0], "fqdn": _with_domain(wished)}
    own = sandbox.hostname if is_host_name(sandbox.hostname, HOST_NAME_MAX) else ""
    return {"hostname": own or None, "fqdn": _with_domain(own) or hosts.fqdn}


def _with_domain(name: str) -> str | None:
    return name if "." in name else None


def _names(text: str) -> Iterator[str]:
    """Yield NAME.DOMAIN from each line of the form `ADDRESS NAME.DOMAIN NAME`."""
    for line in text.splitlines():
        _, *found = line.split() or [""]
        if len(found) == 2 and found[0].startswith(f"{found[1]}.") and is_host_name(found[0]):
            yield found[0]


def of_pod(pod: Mapping[str, Any]) -> tuple[HostAlias, ...]:
    """Return the host aliases of a pod that the API server returned.

    Raises:
        ValueError: the pod has too many aliases, or an alias is not an address with names.
    """
    given = (pod.get("spec") or {}).get("hostAliases") or ()
    return _aliases([str(one.get("ip")), *(one.get("hostnames") or ())] for one in given)


def _aliases(lines: Iterable[Sequence[str]]) -> tuple[HostAlias, ...]:
    found = tuple(
        HostAlias(ip=words[0], hostnames=tuple(words[start : start + HOSTNAMES_MAX]))
        for words in lines
        for start in range(1, len(words), HOSTNAMES_MAX)
    )
    if len(found) > HOST_ALIASES_MAX:
        raise ValueError(_TOO_MANY)
    return found
