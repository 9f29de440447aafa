"""Implements `virtbus config`."""

import sys

import click

from virtbus.cli import output
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.lazy import LazyGroup, examples

SERVICES = ("controller", "nodeagent", "netd", "imaged")


@click.group(
    cls=LazyGroup,
    verbs={"check": ("virtbus.cli.config:check", "Read all settings as the services would.")},
)
def command() -> None:
    """Check the services' settings: defaults < /etc/virtbus/<service>.toml < VIRTBUS_* < flags."""


@click.command(
    name="check",
    epilog=examples("virtbus config check\nvirtbus config check netd imaged --show"),
)
@click.argument("services", nargs=-1, type=click.Choice(SERVICES))
@click.option("--show", is_flag=True, help="Print the settings in force.")
def check(services: tuple[str, ...], *, show: bool) -> None:
    """Read the settings of all services, or of the named services, and report errors."""
    problems: list[dict[str, str]] = []
    for service in services or SERVICES:
        ok, printed, complaint = _checked(service)
        output.write(f"{service}: {output.paint_state('ok' if ok else 'fail', sys.stdout)}")
        if ok and show:
            output.write("\n".join(f"  {line}" for line in printed.splitlines()))
        if not ok:
            problems += [_detail(service, line) for line in complaint.splitlines() if line]
    if problems:
        raise CliError(Exit.REFUSED, "config", "settings are wrong", details=problems)


def _detail(service: str, line: str) -> dict[str, str]:
    return {"path": service, "message": line.removeprefix("error: ").removeprefix(f"{service}: ")}


def _checked(service: str) -> tuple[bool, str, str]:
    """Return a service's success, settings and error text."""
    import subprocess  # no other verb of this module needs it

    ended = subprocess.run(  # noqa: S603  our own module, a fixed list of names
        [sys.executable, "-m", f"virtbus.{service}", "--check-config"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    return ended.returncode == 0, ended.stdout, ended.stderr
