"""Decides which verbs of CNI a conflist has, and builds the data of STATUS, GC and CHECK.

ADD and DEL are in `cni.py`. CHECK is of spec 0.4.0; STATUS, GC and `cniVersions` are of 1.1.0.
"""

import base64
import json
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple

SUPPORTED = ("0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
_CACHE_KIND = "cniCacheV1"
_INSIDE = frozenset({"tuning", "sbr", "vrf"})
"""Chained plugins that compare the interface in the namespace, whose address the guest has."""


class CniVerb(StrEnum):
    """The verbs that not every conflist has."""

    CHECK = "CHECK"
    STATUS = "STATUS"
    GC = "GC"


_SINCE = {CniVerb.CHECK: (0, 4, 0), CniVerb.STATUS: (1, 1, 0), CniVerb.GC: (1, 1, 0)}
_OFF = {CniVerb.CHECK: "disableCheck", CniVerb.GC: "disableGC"}


class CniPlace(NamedTuple):
    """An attachment as plugins know it."""

    network: str
    container: str
    interface: str


def chosen_version(conf: dict[str, Any]) -> str:
    """Return the version for the plugins of a conflist: the highest of `cniVersions` that we know.

    Without one it is `cniVersion`.
    """
    offered = conf.get("cniVersions")
    known = [one for one in SUPPORTED if isinstance(offered, list) and one in offered]
    return max((*known, str(conf["cniVersion"])), key=_numbers) if known else conf["cniVersion"]


def has_verb(conflist: dict[str, Any], verb: CniVerb) -> bool:
    """Return True if the plugins of a conflist know a verb, and the conflist permits it."""
    off = conflist.get(_OFF.get(verb, ""), False)
    return _numbers(conflist["cniVersion"]) >= _SINCE[verb] and off not in (True, "true")


def bare_input(
    conflist: dict[str, Any],
    plugin: dict[str, Any],
    valid: Iterable[CniPlace] | None = None,
) -> bytes:
    """Return a plugin's input without an attachment; `valid` are those that GC leaves alone."""
    conf = {**plugin, "name": conflist["name"], "cniVersion": conflist["cniVersion"]}
    conf.pop("capabilities", None)
    if valid is not None:
        conf["cni.dev/valid-attachments"] = [
            {"containerID": one.container, "ifname": one.interface} for one in sorted(valid)
        ]
    return json.dumps(conf).encode()


def checked_plugins(conflist: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the plugins whose CHECK says something about the host.

    The first one made the interface. It would miss the address, which the guest has; netd compares
    links and addresses itself.
    """
    return [each for each in conflist["plugins"][1:] if each["type"] not in _INSIDE]


def cached_result(
    place: CniPlace,
    netns: str,
    conflist: dict[str, Any],
    runtime: dict[str, Any],
    result: dict[str, Any],
) -> bytes:
    """Return a result as libcni 1.2 stores it in its cache.

    `runtime` has the values of the capabilities. libcni writes maps with sorted keys, without
    spaces, and with three characters of HTML escaped.
    """
    info: dict[str, Any] = {
        "kind": _CACHE_KIND,
        "containerId": place.container,
        "config": base64.b64encode(json.dumps(conflist).encode()).decode(),
        "ifName": place.interface,
        "networkName": place.network,
        "netns": netns,
        "cniArgs": [["IgnoreUnknown", "1"], ["MAC", runtime["mac"]]],
        "capabilityArgs": _sorted(runtime),
        "result": _sorted(result),
    }
    text = json.dumps(info, separators=(",", ":"), ensure_ascii=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode()


def cache_name(place: CniPlace) -> str:
    """Return the name of an attachment's file in the cache."""
    return f"{place.network}-{place.container}-{place.interface}"


def _sorted(value: dict[str, Any]) -> Any:
    return json.loads(json.dumps(value, sort_keys=True))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
