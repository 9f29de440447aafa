"""The file of an attachment in the cache of results, as libcni 1.3 writes it."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from virtbus.netd.core.cni_verbs import SUPPORTED, CniPlace, objects, version_numbers

_CACHE_KIND = "cniCacheV1"
_ESCAPED = "<>&\u2028\u2029"
"""Characters that Go's encoder of JSON escapes, in addition to those that JSON requires."""
_FIELDS = {
    "interfaces": ("name", "mac", "mtu", "sandbox", "socketPath", "pciID"),
    "ips": ("version", "interface", "address", "gateway"),
    "routes": ("dst", "gw", "mtu", "advmss", "priority", "table", "scope"),
}
_OF_1_0 = frozenset({("interfaces", "mtu"), ("interfaces", "socketPath"), ("interfaces", "pciID")})
_BEFORE_1_0 = frozenset({("ips", "version")})
_DNS_FIELDS = ("nameservers", "domain", "search", "options")
_ALSO_ZERO = frozenset({"name", "version", "interface", "address", "dst", "table", "scope"})


def cache_name(place: CniPlace) -> str:
    """Return the name of an attachment's file in the cache."""
    return f"{place.network}-{place.container}-{place.interface}"


def cached_result(
    place: CniPlace,
    netns: str,
    source: str,
    given: tuple[Mapping[str, str], dict[str, Any]],
    result: dict[str, Any],
) -> bytes:
    """Return the file of an attachment.

    `source` is the text of the conflist. `given` has the words of CNI_ARGS and the values of the
    capabilities.
    """
    arguments, runtime = given
    info = {
        "kind": _CACHE_KIND,
        "containerId": place.container,
        "config": base64.b64encode(source.encode()).decode(),
        "ifName": place.interface,
        "networkName": place.network,
        "netns": netns,
        "cniArgs": list(arguments.items()),
        "capabilityArgs": _sorted(runtime),
        "result": _sorted(_typed(result)),
    }
    return _encoded(info).encode()


def list_text(name: Any, version: Any, plugin: dict[str, Any]) -> str:
    """Return the text of the conflist that libcni makes of a single plugin's configuration."""
    return _encoded(_sorted({"cniVersion": version, "name": name, "plugins": [plugin]}))


def _typed(result: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a result that libcni knows, which it keeps.

    Empty fields are left out, except those in _ALSO_ZERO. If libcni does not know the version, the
    result stays unchanged.
    """
    version = result.get("cniVersion")
    if version not in SUPPORTED:
        return result
    numbers = version_numbers(version)
    left_out = _OF_1_0 if numbers < (1, 0, 0) else _BEFORE_1_0
    found: dict[str, Any] = {"cniVersion": version}
    for key, fields in _FIELDS.items():
        kept = [field for field in fields if (key, field) not in left_out]
        if items := objects(result, key):
            found[key] = [_known(item, kept) for item in items]
    dns = _known(result.get("dns"), _DNS_FIELDS)
    if dns or numbers < (1, 0, 0):
        found["dns"] = dns
    return found


def _known(item: Any, fields: Sequence[str]) -> dict[str, Any]:
    if not isinstance(item, dict):
        return {}
    return {
        field: item[field]
        for field in fields
        if item.get(field) is not None and (item[field] or field in _ALSO_ZERO)
    }


def _sorted(value: dict[str, Any]) -> Any:
    return json.loads(json.dumps(value, sort_keys=True))


def _encoded(value: dict[str, Any]) -> str:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for char in _ESCAPED:
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text
