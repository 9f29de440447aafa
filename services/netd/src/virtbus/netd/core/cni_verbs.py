"""CNI's verbs STATUS, GC and CHECK: which of them a conflist has, and their data.

ADD and DEL are in `cni.py`. CHECK is of spec 0.4.0; STATUS, GC and `cniVersions` are of 1.1.0.
"""

import json
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple

SUPPORTED = ("0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
_INSIDE = frozenset({"tuning", "sbr", "vrf"})
"""Chained plugins whose CHECK would miss the interface's address, which netd gave to the guest."""


class CniVerb(StrEnum):
    """The verbs that some conflists lack."""

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
    """Return the version for the plugins of a conflist.

    The result is the highest of `cniVersion` and the supported versions in `cniVersions`.
    """
    offered = conf.get("cniVersions")
    known = [one for one in SUPPORTED if isinstance(offered, list) and one in offered]
    own: str = conf["cniVersion"]
    return max((*known, own), key=version_numbers) if known else own


def has_verb(conflist: dict[str, Any], verb: CniVerb) -> bool:
    """Return True if the plugins of a conflist know a verb, and the conflist permits it."""
    off = conflist.get(_OFF.get(verb, ""), False)
    return version_numbers(conflist["cniVersion"]) >= _SINCE[verb] and off not in (True, "true")


def bare_input(
    conflist: dict[str, Any],
    plugin: dict[str, Any],
    valid: Iterable[CniPlace] | None = None,
) -> bytes:
    """Return a plugin's input for STATUS or GC. GC leaves the attachments in `valid` alone."""
    conf = {**plugin, "name": conflist["name"], "cniVersion": conflist["cniVersion"]}
    conf.pop("capabilities", None)
    if valid is not None:
        conf["cni.dev/valid-attachments"] = [
            {"containerID": one.container, "ifname": one.interface} for one in sorted(valid)
        ]
    return json.dumps(conf).encode()


def checked_plugins(conflist: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the plugins whose CHECK says something about the host.

    The first plugin made the interface. Its CHECK would miss the address, which the guest has now.
    netd compares links and addresses itself.
    """
    return [each for each in conflist["plugins"][1:] if each["type"] not in _INSIDE]


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparisons."""
    return tuple(int(part) for part in version.split("."))


def objects(result: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the objects in the list `key` of a result; other items are left out."""
    found = result.get(key)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
