"""Which VM is meant: a name in a namespace, or a uid; and the options for it."""

import os
from collections.abc import Callable
from typing import Any

import click

from virtbus.cli import known

_UID_SHAPE = (8, 4, 4, 4, 12)
_HEX = frozenset("0123456789abcdef")


def is_uid(text: str) -> bool:
    """True for a UUID in its canonical form, any case."""
    parts = text.lower().split("-")
    return tuple(map(len, parts)) == _UID_SHAPE and set("".join(parts)) <= _HEX


def ref(name: str, namespace: str) -> dict[str, str]:
    """The `VmRef` map for what was typed."""
    return {"uid": name.lower()} if is_uid(name) else {"name": name, "namespace": namespace}


def namespace_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`-n NAMESPACE`, `default` where none is given."""
    return click.option(
        "-n",
        "--namespace",
        default=lambda: os.environ.get("VIRTBUS_NAMESPACE", "default"),
        metavar="NS",
        show_default="default",
        help="The VM's namespace. [env: VIRTBUS_NAMESPACE]",
    )(function)


def name_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """NAME or uid, completed from the bus."""
    return click.argument("name", shell_complete=known.vms)(function)


def names_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """One or more NAMEs or uids."""
    return click.argument("names", nargs=-1, required=True, shell_complete=known.vms)(function)
