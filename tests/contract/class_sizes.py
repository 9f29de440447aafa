"""Prints each class with behaviour that has many methods or attributes, with the reason.

`make check` runs it. It fails for a class over a bound without a row in REASONS, and for a row
whose class is within the bounds. Methods are all functions in the body of the class; attributes are
the names that they assign to `self`. Fields of models are data, and a Protocol has no behaviour.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
WORKSPACE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]
METHODS, ATTRIBUTES = 20, 12
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

REASONS: dict[str, str] = {
    "nodeagent.operation_runner.OperationRunner": (
        "the operations by their states, and the ports of the three kinds of work on running guests"
    ),
    "bus.client.connection.NatsLink": (
        "one connection is one state machine: each call of nats-py and each loss of the "
        "connection changes the same state"
    ),
    "bus.client.watch.PullWatch": "one pull is one state machine: list, follow, doubt, list again",
    "bus.provisioning.server.Server": (
        "one nats-server: its process, its configuration and its accounts change together"
    ),
    "cli.up.bus_disk.BusDisk": (
        "eight methods; the attributes are the times and texts that keep restarts and messages rare"
    ),
    "controller.edge.commit.Commits": (
        "claim, commit and end of a VM are one protocol: each step is safe only with the others"
    ),
    "controller.core.fleet.Fleet": (
        "the cache of all buckets: records, statuses and nodes are consistent only together"
    ),
    "controller.service.ControllerService": (
        "wires the parts of the controller; the attributes are parts"
    ),
    "imaged.disks.Disks": "one lock a VM covers ensure, release and quarantine of its disks",
    "imaged.requests.Requests": "one method for each verb of imaged, which it decodes",
    "imaged.edge.store.ImageStore": (
        "one folder with one lock: images, names and leases are consistent only together"
    ),
    "netd.attachments.Attachments": "one turn a VM covers each change of its attachment",
    "nodeagent.assignments.Assignments": (
        "one item of the watch is decided with all that is known of its uid: the listing, the "
        "disk, the domain, the actor, the record that follows"
    ),
    "nodeagent.edge.hypervisor.LibvirtHypervisor": (
        "has the methods of the port `Hypervisor`; calls, limits, guests and displays have "
        "modules of their own"
    ),
    "nodeagent.edge.record_files.AgentFiles": "has the methods of the port `RecordFiles`",
    "nodeagent.heartbeat.Heartbeat": "one heartbeat: each attribute is an input of the record",
    "nodeagent.instance.Ownership": (
        "one key on the bus: claim and renewal share its revision and its tokens"
    ),
}
"""Class → the reason why it stays in one piece."""


class Size(NamedTuple):
    """The size of one class."""

    name: str
    methods: int
    attributes: int

    @property
    def over(self) -> bool:
        return self.methods > METHODS or self.attributes > ATTRIBUTES


def sizes() -> Iterator[Size]:
    """Yield the size of each class of each member of the workspace."""
    for member in WORKSPACE["members"]:
        for path in sorted(ROOT.glob(f"{member}/src/**/*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).partition("virtbus.")[2]
            yield from sizes_in(module, path.read_text())


def sizes_in(module: str, text: str) -> Iterator[Size]:
    """Yield the size of each class of one module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and not any("Protocol" in base for base in _bases(node)):
            methods = [n for n in node.body if isinstance(n, FUNCTIONS)]
            names = {name for method in methods for name in _assigned(method)}
            yield Size(f"{module}.{node.name}", len(methods), len(names))


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base) for base in node.bases]


def _assigned(method: ast.AST) -> Iterator[str]:
    for node in ast.walk(method):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


def main() -> int:
    """Print the large classes; return 1 if REASONS does not account for exactly these."""
    large = {size.name: size for size in sizes() if size.over}
    lines = [
        f"warning: {name}: {size.methods} methods, {size.attributes} attributes: "
        f"{REASONS.get(name, 'no reason')}"
        for name, size in large.items()
    ]
    wrong = sorted(large.keys() ^ REASONS.keys())
    for name in wrong:
        what = "needs a reason or a split" if name in large else "is not large any more"
        lines.append(f"error: {name} {what}: REASONS in tests/contract/class_sizes.py")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
