"""Implements `virtbus doctor`, and the checks before `virtbus up`."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from virtbus.cli.doctor import bus, container, emulator, host, hypervisor, networking
from virtbus.cli.doctor.finding import FAIL, OK, UNKNOWN, WARN, CheckResult, warn
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, local
from virtbus.cli.lazy import examples

Check = Callable[[], CheckResult]


def checks(state_dir: Path) -> tuple[Check, ...]:
    """Return all checks in the order of the report."""
    return (
        container.container,
        host.root,
        host.python,
        emulator.qemu,
        emulator.kvm,
        hypervisor.libvirtd,
        hypervisor.limits,
        hypervisor.virtlogd,
        emulator.wrapper,
        emulator.conversion,
        networking.nftables,
        networking.forwarding,
        networking.forward_policy,
        networking.bridge_filter,
        networking.namespaces,
        networking.cni,
        bus.nats_server,
        bus.nats,
        bus.creds,
        bus.instance,
        partial(bus.tiny, state_dir),
        partial(host.disk, state_dir),
        partial(host.images, state_dir),
        partial(host.quarantine, state_dir),
        host.cgroups,
        host.reaper,
        host.clock,
    )


def quick(state_dir: Path, *, own_bus: bool = True) -> list[CheckResult]:
    """Run the checks before `virtbus up`. Only `own_bus` needs nats-server."""
    wanted: tuple[Check, ...] = (
        host.root,
        emulator.qemu,
        emulator.kvm,
        hypervisor.libvirtd,
        networking.nftables,
        *([bus.nats_server] if own_bus else []),
        partial(bus.tiny, state_dir),
    )
    return [_look(check) for check in wanted]


def _look(check: Check) -> CheckResult:
    """Run a check. An OSError becomes a warning, so that the other checks still run."""
    try:
        return check()
    except OSError as error:
        called = check.func if isinstance(check, partial) else check
        return warn(called.__name__.replace("_", " "), f"could not be checked: {error}")


@click.command(
    name="doctor",
    epilog=examples(
        """
        virtbus doctor
        virtbus doctor -o json | jq '.findings[] | select(.level != "ok")'
        """
    ),
)
@click.option("--state-dir", metavar="DIR", help="[default: /var/lib/virtbus]")
@local
def command(invocation: Invocation, state_dir: str | None) -> None:
    """Report missing requirements of this host, and the commands that repair them.

    It changes nothing. The exit code is 1 if a check fails. With a warning, VMs can run, but with a
    drawback. The result of a check that is impossible here, for example in a container, is unknown.
    """
    place = Path(state_dir or os.environ.get("VIRTBUS_STATE_DIR") or "/var/lib/virtbus")
    findings = [container.judged(_look(check)) for check in checks(place)]
    count = {level: sum(f.level == level for f in findings) for level in (OK, WARN, UNKNOWN, FAIL)}
    hidden = f"{count[UNKNOWN]} unknown, " if count[UNKNOWN] else ""
    summary = f"\n{count[OK]} ok, {count[WARN]} warnings, {hidden}{count[FAIL]} to repair"
    value = {"findings": [finding.as_map() for finding in findings], "count": count}
    invocation.show(value, lambda: "\n".join([*(f.as_text() for f in findings), summary]))
    if count[FAIL]:
        names = ", ".join(f.name for f in findings if f.level == FAIL)
        raise CliError(Exit.REFUSED, "host_not_ready", f"not ready for VMs: {names}")
