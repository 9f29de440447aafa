"""Defines the arguments and options that name VMs and namespaces: NAME with `-n`, or uid."""

import os
from collections.abc import Callable
from typing import Any

import click

from virtbus.cli import completion_sources

_UID_SHAPE = (8, 4, 4, 4, 12)
_HEX = frozenset("0123456789abcdef")


def is_uid(text: str) -> bool:
    """Return True for a UUID in canonical form, in upper or lower case."""
    parts = text.lower().split("-")
    return tuple(map(len, parts)) == _UID_SHAPE and set("".join(parts)) <= _HEX


def ref(name: str, namespace: str) -> dict[str, str]:
    """Return the request fields (`VmRef`) for the argument NAME, which may be a uid."""
    return {"uid": name.lower()} if is_uid(name) else {"name": name, "namespace": namespace}


def namespace_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `-n NAMESPACE`. Its default is $VIRTBUS_NAMESPACE, or `default`."""
    return click.option(
        "-n",
        "--namespace",
        default=lambda: os.environ.get("VIRTBUS_NAMESPACE", "default"),
        metavar="NS",
        show_default="default",
        help="The namespace. [env: VIRTBUS_NAMESPACE]",
    )(function)


def namespace_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `-n NAMESPACE`, which filters a list. Its default is $VIRTBUS_NAMESPACE, or all."""
    return click.option(
        "-n",
        "--namespace",
        default=lambda: os.environ.get("VIRTBUS_NAMESPACE"),
        metavar="NS",
        show_default="all",
        help="Only this namespace. [env: VIRTBUS_NAMESPACE]",
    )(function)


def name_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument NAME, a VM's name or uid, with completion from the bus."""
    return click.argument("name", shell_complete=completion_sources.vms)(function)


def names_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument NAMES: one or more names or uids of VMs."""
    return click.argument("names", nargs=-1, required=True, shell_complete=completion_sources.vms)(
        function
    )
