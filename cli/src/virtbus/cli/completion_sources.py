"""Reads names from the bus for shell completion. Without a bus, it soon returns no names."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from virtbus.cli.failures import CliError

_TIMEOUT_S = 1.0
_MOST = 200

Completer = Callable[[click.Context, click.Parameter, str], list[Any]]
Known = Callable[[Mapping[str, Any]], Iterable[tuple[str, str]]]
"""Returns (name, description) of each name in an item of an answer."""


def _completer(subject: str, known: Known, *, of_namespace: bool = False) -> Completer:
    """Return a click `shell_complete` function for the names in the answer of `subject`."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem  # only for a completion

        del param
        query: dict[str, Any] = {}
        if of_namespace:
            namespace = ctx.params.get("namespace") or os.environ.get("VIRTBUS_NAMESPACE")
            query = {"namespace": namespace or "default", "limit": _MOST}
        return [
            CompletionItem(name, help=help_text)
            for item in _items(ctx, subject, query)
            for name, help_text in known(item)
            if name.startswith(incomplete)
        ]

    return complete


def _items(
    ctx: click.Context, subject: str, query: Mapping[str, Any]
) -> Iterable[Mapping[str, Any]]:
    from virtbus.cli.wire import access
    from virtbus.cli.wire.session import Session

    given = {k: v for k, v in ctx.find_root().params.items() if v} | ctx.params
    try:
        session = Session(access.find(given.get("server"), given.get("creds"), os.environ))
        page = session.request(subject, query, timeout_s=_TIMEOUT_S)
        session.close()
    except CliError:
        return ()
    items: Iterable[Mapping[str, Any]] = page.get("items") or ()
    return items


vms = _completer(
    "virtbus.api.v1.vm.list",
    lambda vm: [(str(vm["name"]), str(vm.get("state", "")))],
    of_namespace=True,
)
volumes = _completer(
    "virtbus.api.v1.volume.list",
    lambda volume: [(str(volume["name"]), str(volume.get("state", "")))],
    of_namespace=True,
)
snapshots = _completer(
    "virtbus.api.v1.snapshot.list",
    lambda snapshot: [(str(snapshot["name"]), str(snapshot.get("state", "")))],
    of_namespace=True,
)
images = _completer(
    "virtbus.api.v1.image.list",
    lambda image: [(str(name), str(image.get("format", ""))) for name in image.get("names") or ()],
)
image_names = _completer(
    "virtbus.api.v1.imagename.list",
    lambda one: [(str(one["name"]), str((one.get("spec") or {}).get("url", "")))],
    of_namespace=True,
)
networks = _completer(
    "virtbus.api.v1.network.list",
    lambda network: [(str(network["name"]), str((network.get("spec") or {}).get("kind", "")))],
    of_namespace=True,
)
security_groups = _completer(
    "virtbus.api.v1.security-group.list",
    lambda group: [(str(group["name"]), f"{group.get('member_count') or 0} VMs")],
    of_namespace=True,
)
nodes = _completer(
    "virtbus.api.v1.node.list", lambda node: [(str(node["node"]), str(node.get("state", "")))]
)


def node_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument NAME, with completion of node names, to a verb."""
    return click.argument("name", shell_complete=nodes)(function)
