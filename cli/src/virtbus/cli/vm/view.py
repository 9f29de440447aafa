"""Formats a VM for display. A view is the API's `VmView` as a map."""

from collections.abc import Iterable, Mapping
from typing import Any

from virtbus.cli import output, units

HEADER = ("NAME", "STATE", "NODE", "ADDRESS", "IMAGE", "CPUS", "MEMORY", "AGE")
_COUNTERS = (
    *("INTERFACE", "TO GUEST", "PACKETS", "DROPPED"),
    *("FROM GUEST", "PACKETS", "DROPPED", "REFUSED"),
)
_IMAGE_WIDTH = 28
_DIGEST_SHOWN = 4
ORPHANED = "virtbus.io/orphaned"


def addresses(view: Mapping[str, Any]) -> list[str]:
    """Return the guest's addresses without their prefix lengths."""
    return [
        str(address).partition("/")[0]
        for interface in view.get("interfaces") or ()
        for address in interface.get("addresses") or ()
    ]


def _domain(view: Mapping[str, Any]) -> Mapping[str, Any]:
    found = (view.get("spec") or {}).get("domain") or {}
    return found if isinstance(found, Mapping) else {}


def vcpus(view: Mapping[str, Any]) -> int:
    """Return the number of the guest's CPUs."""
    cpu = _domain(view).get("cpu") or {}
    return int(cpu.get("sockets", 1)) * int(cpu.get("cores", 1)) * int(cpu.get("threads", 1))


def memory(view: Mapping[str, Any]) -> str:
    """Return the guest's memory with its unit, for example 256MiB."""
    guest = (_domain(view).get("memory") or {}).get("guest")
    return units.size(guest)


def image(view: Mapping[str, Any]) -> str:
    """Return the reference of the first image among the volumes; `-` if no volume has an image."""
    for volume in (view.get("spec") or {}).get("volumes") or ():
        if volume.get("image"):
            return str(volume["image"].get("ref", ""))
        if volume.get("container_disk"):
            return str(volume["container_disk"].get("image", ""))
    return "-"


def short(reference: str) -> str:
    """Shorten a long image reference to the end of its path and 4 digits of its digest."""
    if len(reference) <= _IMAGE_WIDTH:
        return reference
    place, at, digest = reference.partition("@sha256:")
    folder, slash, last = place.rpartition("/")
    name = f"…/{last}" if folder and slash else last
    if len(name) > _IMAGE_WIDTH:
        name = f"…{name[1 - _IMAGE_WIDTH :]}"
    return f"{name}{at}{digest[:_DIGEST_SHOWN]}…" if at else name


def node(view: Mapping[str, Any]) -> str:
    """Return the node, or `-` if there is none."""
    name = str(view.get("node") or "_")
    return "-" if name == "_" else name


def state(view: Mapping[str, Any]) -> str:
    """Return the state (`schemas.states.VmState`)."""
    return str(view.get("state") or "Pending")


def shown_state(view: Mapping[str, Any]) -> str:
    """Return the state, with `,orphaned` if the VM's Kubernetes cluster no longer knows the VM."""
    word = state(view)
    return f"{word},orphaned" if ORPHANED in (view.get("annotations") or {}) else word


def row(view: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the VM's cells for the columns of HEADER."""
    return (
        str(view.get("name", "")),
        shown_state(view),
        node(view),
        ",".join(addresses(view)) or "-",
        short(image(view)),
        str(vcpus(view)),
        memory(view),
        units.ago(view.get("created_ns")),
    )


def table(views: Iterable[Mapping[str, Any]]) -> str:
    """Return a table of VMs, with a column NAMESPACE if any VM is outside `default`."""
    found = list(views)
    if all(view.get("namespace", "default") == "default" for view in found):
        return output.table(HEADER, [row(view) for view in found])
    rows = [(str(view.get("namespace", "")), *row(view)) for view in found]
    return output.table(("NAMESPACE", *HEADER), rows)


def condition(view: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    """Return the condition of type `kind`; None if the VM has none."""
    for item in view.get("conditions") or ():
        if item.get("type") == kind:
            return dict(item)
    return None


def describe(view: Mapping[str, Any]) -> str:
    """Return the text of `vm get`: the VM's main fields, interfaces and conditions."""
    parts = [output.fields(_facts(view))]
    interfaces = view.get("interfaces") or ()
    if interfaces:
        rows = [
            (
                i.get("name", ""),
                i.get("network", "default"),
                i.get("mac", ""),
                ", ".join(i.get("addresses") or ()) or "-",
                i.get("gateway") or "-",
            )
            for i in interfaces
        ]
        parts.append(output.table(("INTERFACE", "NETWORK", "MAC", "ADDRESSES", "GATEWAY"), rows))
    if limits := view.get("disk_limits"):
        cells = [(name, _figures(one)) for name, one in sorted(limits.items())]
        parts.append(output.table(("DISK", "LIMITS IN FORCE"), cells))
    if limits := view.get("resources"):
        cells = [(name, str(one)) for name, one in limits.items() if one is not None]
        parts.append(output.table(("LIMIT ON THE HOST", "IN FORCE"), cells))
    if view.get("counters"):
        parts.append(output.table(_COUNTERS, [_counted(one) for one in view["counters"]]))
    conditions = view.get("conditions") or ()
    if conditions:
        rows = [
            (
                c.get("type", ""),
                "yes" if c.get("status") else "no",
                c.get("reason", "") or "-",
                units.ago(c.get("since_ns")),
                c.get("message", "") or "-",
            )
            for c in conditions
        ]
        parts.append(output.table(("CONDITION", "IS", "REASON", "SINCE", "MESSAGE"), rows))
    return "\n\n".join(parts)


def _figures(limits: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in limits.items())


def _counted(nic: Mapping[str, Any]) -> tuple[str, ...]:
    """Return an interface's cells for the columns of _COUNTERS."""
    cells = [str(nic.get("name", ""))]
    for way in ("to_guest", "from_guest"):
        traffic = nic.get(way) or {}
        cells.append(units.size(traffic.get("bytes", 0)))
        cells += [str(traffic.get(word, 0)) for word in ("packets", "dropped")]
    refused = nic.get("refused") or {}
    return (*cells, ", ".join(f"{rule} {count}" for rule, count in refused.items()) or "-")


def _published(view: Mapping[str, Any]) -> list[str]:
    interfaces = view.get("interfaces") or ()
    return [str(port) for one in interfaces for port in one.get("published") or ()]


def _last_end(view: Mapping[str, Any]) -> str:
    """Return how and when the last run of the guest ended; empty if no run has ended."""
    end = view.get("last_exit")
    if not end:
        return ""
    asked = "as asked" if end.get("asked") else "by itself or from outside"
    return f"{end.get('how')} {asked}, {units.ago(end.get('at_ns'))} ago"


def _facts(view: Mapping[str, Any]) -> list[tuple[str, object]]:
    labels = view.get("labels") or {}
    return [
        ("Name", view.get("name")),
        ("Namespace", view.get("namespace")),
        ("State", shown_state(view) + (" (being deleted)" if view.get("deleting") else "")),
        ("Reason", view.get("reason")),
        ("Message", view.get("message")),
        ("Node", node(view)),
        ("Image", image(view)),
        ("CPUs", vcpus(view)),
        ("Memory", memory(view)),
        ("Accelerator", view.get("accelerator")),
        ("Published", ", ".join(_published(view))),
        ("Run strategy", (view.get("spec") or {}).get("run_strategy")),
        ("Labels", ", ".join(f"{k}={v}" for k, v in labels.items())),
        ("Created", units.ago(view.get("created_ns")) + " ago"),
        ("Running for", units.ago(view.get("started_ns")) if view.get("started_ns") else ""),
        ("Reboots", view.get("reboots") or ""),
        ("Last end", _last_end(view)),
        ("Uid", view.get("uid")),
        ("Revision", view.get("revision")),
    ]
