"""Implements `virtbus vm flatten` and `virtbus volume flatten`."""

from typing import Any

import click

from virtbus.bus.runtime.ids import uuid7
from virtbus.cli import completion_sources, operation
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm import target


def _options(function: Any) -> Any:
    for option in (
        click.option(
            "--wait/--no-wait",
            default=True,
            show_default=True,
            help="Wait until the work has ended.",
        ),
        click.option(
            "--id",
            "id_",
            metavar="UUID",
            help="An id of your choice: the same command may be repeated.",
        ),
    ):
        function = option(function)
    return function


@click.command(epilog=examples("virtbus vm flatten web2"))
@target.name_argument
@_options
@target.namespace_option
@verb
def of_vm(invocation: Invocation, *, name: str, namespace: str, **flags: Any) -> None:
    """Copy the layers below the disks of the VM NAME into the disks. The guest may run.

    Afterwards a clone depends on no snapshot, and reads are faster. Disks still rest on their
    images.
    """
    _flatten(invocation, {"vm": name, "namespace": namespace}, **flags)


@click.command(epilog=examples("virtbus volume flatten data-1"))
@click.argument("name", shell_complete=completion_sources.volumes)
@_options
@target.namespace_option
@verb
def of_volume(invocation: Invocation, *, name: str, namespace: str, **flags: Any) -> None:
    """Copy the layers below the volume NAME into the volume. A VM that holds it must be off."""
    _flatten(invocation, {"volume": name, "namespace": namespace}, **flags)


def _flatten(invocation: Invocation, asked: dict[str, Any], *, id_: str | None, wait: bool) -> None:
    view = invocation.call("operation", "flatten", asked | {"id": id_ or uuid7()})
    if wait:
        view = operation.until_ended(invocation, view)
    invocation.show(view, lambda: operation.table([view]))
    if wait:
        operation.refuse_failed(view)
    else:
        invocation.note(f"`virtbus operation watch {view.get('id')}` shows its progress")
