"""Implements `virtbus vm ssh`."""

import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import click

from virtbus.cli import completion_sources
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.get import fetch
from virtbus.cli.vm.serial import node_subject
from virtbus.cli.vm.target import namespace_option


@click.command(
    epilog=examples(
        """
        virtbus vm ssh root@web
        virtbus vm ssh root@web -- uname -a
        virtbus vm ssh debian@db -i ~/.ssh/lab -n team
        """
    )
)
@click.argument("target", metavar="[USER@]NAME", shell_complete=completion_sources.vms)
@click.argument("words", nargs=-1, metavar="[-- CMD...]", type=click.UNPROCESSED)
@click.option("-i", "--identity", metavar="FILE", help="The private key, as in ssh.")
@click.option(
    "-p",
    "--port",
    default=22,
    show_default=True,
    type=click.IntRange(1, 65535),
    help="The port of the guest's sshd.",
)
@namespace_option
@verb
def command(
    invocation: Invocation,
    *,
    target: str,
    words: tuple[str, ...],
    identity: str | None,
    port: int,
    namespace: str,
) -> None:
    """Log in to the guest of the VM NAME with this system's ssh.

    The connection travels over the bus (`vm port-forward --stdio`). The guest's host key is stored
    in ~/.ssh/virtbus_known_hosts under the VM's uid. So a new VM with the name of an old VM has its
    own entry in that file.
    """
    user, at, name = target.rpartition("@")
    view = fetch(invocation, name, namespace)
    node_subject(view, "port")  # raises CliError here, not within ssh
    uid = str(view.get("uid"))
    argv = ["ssh", *ssh_options(uid, port)]
    argv += ["-i", identity] if identity else []
    argv += ["--", f"{user}{at}{uid}", *words]
    invocation.close()
    try:
        os.execvpe("ssh", argv, invocation.environ)  # noqa: S606, S607  the user's own ssh
    except FileNotFoundError:
        hint = "apt-get install openssh-client"
        raise CliError(Exit.REFUSED, "no_ssh", "there is no ssh here", hint=hint) from None


def ssh_options(uid: str, port: int) -> list[str]:
    """Return the ssh options that connect to the guest's port over the bus."""
    ours = [sys.executable, "-m", "virtbus.cli", "vm", "port-forward", uid, str(port), "--stdio"]
    keys = Path.home() / ".ssh" / "virtbus_known_hosts"
    with suppress(OSError):  # ssh then prints a better message
        keys.parent.mkdir(mode=0o700, exist_ok=True)
    options = {
        "ProxyCommand": shlex.join(ours).replace("%", "%%"),
        "HostKeyAlias": f"virtbus-{uid}",
        "StrictHostKeyChecking": "accept-new",
        "UserKnownHostsFile": f'"{keys}"',
    }
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
