"""Starts `virtbus up` and `virtbus node up`: checks the node id and the host, then runs `up`."""

import asyncio
import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from virtbus.cli import output
from virtbus.cli.doctor.finding import FAIL, OK, CheckResult
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.up.plan import NODE_ONLY, Place

if TYPE_CHECKING:
    from collections.abc import Callable

    from virtbus.cli.up.run import Keeper
    from virtbus.cli.up.terminal import Terminal


def node_name(state: Path) -> str:
    """Return this host's node id: from the environment, the state folder, or the hostname."""
    from virtbus.bus.runtime.settings import node_id  # slow import: pydantic

    return os.environ.get("VIRTBUS_NODE") or node_id(state)


def check_name(node: str, option: str = "--node") -> None:
    """Check a node id; the error message names `option`, the option that gave the id.

    Raises:
        CliError: the id is invalid.
    """
    from virtbus.schemas.ids import check_id  # slow import: pydantic

    try:
        check_id(node)
    except ValueError as error:
        raise CliError(Exit.USAGE, "usage", f"{option} {node!r}: {error}") from None


def preflight(place: Place, *, force: bool) -> None:
    """Check the host and print its problems before anything starts.

    Raises:
        CliError: a requirement for running VMs is missing, and `force` is False.
    """
    from virtbus.cli.doctor.command import quick  # runs virsh

    findings = quick(place.state_dir, own_bus=place.runs != NODE_ONLY)
    for finding in findings:
        if finding.level != OK:
            output.write(finding.as_text())
    broken: list[CheckResult] = [finding for finding in findings if finding.level == FAIL]
    if broken and not force:
        raise CliError(
            Exit.UNAVAILABLE,
            "not_ready",
            "this host is not ready for virtbus: " + ", ".join(f.name for f in broken),
            hint="fix the problems above (`virtbus doctor` shows all), or try --simulate",
        )


def run(place: Place, bus: "Callable[[Terminal], AbstractAsyncContextManager[Keeper]]") -> None:
    """Run `up` on this bus until SIGINT or SIGTERM arrives."""
    # slow imports, which would delay --help and errors
    from virtbus.bus.runtime.logs import setup
    from virtbus.cli.up.run import up
    from virtbus.cli.up.terminal import Terminal

    setup("up", place.node, level="WARNING", style="text")
    terminal = Terminal(place.log_level)
    asyncio.run(up(place, bus(terminal), terminal, os.environ))
