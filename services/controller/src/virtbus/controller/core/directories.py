"""Checks that a VM's namespace may use the host directories in the VM's spec (ADR 0076)."""

from collections.abc import Iterable

from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.filesystem import root_of
from virtbus.schemas.host_paths import host_paths
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.vm import VmSpec

EVERY = "*"


def check_directories(spec: VmSpec, namespace: str, nodes: Iterable[NodeRecord]) -> None:
    """Raise 403 if nodes offer a directory of the spec, but no node opens it to the namespace."""
    used = list(host_paths(spec))
    if not used:
        return
    roots = [node.directories for node in nodes]
    details = []
    for one in used:
        found = [there[root] for there in roots if (root := root_of(one.path, there))]
        if found and not any({namespace, EVERY}.intersection(names) for names in found):
            message = f"{one.path!r} is not open to the namespace {namespace!r}"
            hint = "its operator opens it in the setting directories_allowed of the nodes' agent"
            details.append(Detail(path=one.field, message=message, hint=hint))
    if details:
        message = f"{details[0].path}: {details[0].message}; {details[0].hint}"
        raise VirtbusError(Code.DENIED, "directory_closed", message, details=tuple(details))


def not_offered(directories: Iterable[str], namespace: str, node: NodeRecord) -> str | None:
    """Return why a node does not offer directories to a namespace; None if it offers all of them.

    An empty `namespace` means that kubelet decides which directories the VM may use. The node must
    then still offer the directories.
    """
    there = node.directories
    roots = {one: root_of(one, there) for one in directories}
    if missing := sorted(one for one, root in roots.items() if not root):
        return f"does not offer the directory {', '.join(missing)} (directories_allowed)"
    wanted = {namespace, EVERY}
    closed = sorted(one for one, root in roots.items() if wanted.isdisjoint(there[root]))
    if not namespace or not closed:
        return None
    paths = ", ".join(closed)
    return f"does not open {paths} to the namespace {namespace} (directories_allowed)"
