"""Implements `virtbus cri install` and `virtbus cri uninstall`.

Both commands may be repeated, even after a kill. kubelet's own files belong to the administrator.
The commands only print the changes that these files need.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from virtbus.cli.cri.host_files import CONTAINERD, NODE_LABEL, UNITS, HostFiles
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, local
from virtbus.cli.lazy import examples

READY_S = 20.0
_ROOT = click.option("--root", default="/", hidden=True, type=click.Path(path_type=Path))


@click.command(
    epilog=examples(
        """
        virtbus cri install
        virtbus cri install --container-runtime /run/crio/crio.sock
        """
    )
)
@click.option(
    "--container-runtime",
    metavar="SOCKET",
    default=CONTAINERD,
    show_default=True,
    help="UNIX socket of the runtime that runs this node's containers.",
)
@_ROOT
@local
def install(invocation: Invocation, container_runtime: str, root: Path) -> None:
    """Start the runtime of VM pods and its proxy, and write the RuntimeClass `virtbus`.

    It changes neither kubelet nor the container runtime. The output names the remaining steps.
    """
    host = HostFiles(root)
    _refuse(_hindrances(host, container_runtime, root))
    changed = host.write(container_runtime)
    todo = _started(host, restart=host.drop_in in changed)
    steps = [*todo, *_next_steps(host)]
    value: dict[str, Any] = {"changed": [str(path) for path in changed], "socket": host.proxy}
    lines = [*(f"written: {path}" for path in changed), f"socket: {host.proxy}", *_numbered(steps)]
    invocation.show({**value, "next": steps}, lambda: "\n".join(lines))


@click.command(epilog=examples("virtbus cri uninstall"))
@_ROOT
@local
def uninstall(invocation: Invocation, root: Path) -> None:
    """Stop the runtime of VM pods and its proxy, and remove what `cri install` wrote.

    It is refused while this node has VM pods, or while kubelet uses the proxy.
    """
    host = HostFiles(root)
    _refuse([*_not_root(root), *_users(host)])
    missing = host.missing_units()
    units = [unit for unit in UNITS if unit not in missing]
    steps = []
    if not host.systemd:
        steps.append(f"no systemd runs here; end these services: {' '.join(UNITS)}")
    elif units:
        _run(["systemctl", "disable", "--now", *units])
    removed = host.remove()
    if host.systemd:
        _run(["systemctl", "daemon-reload"])
    kinds = "runtimeclass,validatingadmissionpolicy,validatingadmissionpolicybinding"
    steps.append(f"after the last node: kubectl delete {kinds} virtbus")
    lines = [*(f"removed: {path}" for path in removed), *_numbered(steps)]
    value = {"removed": [str(path) for path in removed], "next": steps}
    invocation.show(value, lambda: "\n".join(lines))


# --- conditions --------------------------------------------------------------------------------
def _hindrances(host: HostFiles, container_runtime: str, root: Path) -> list[tuple[str, str]]:
    found = _not_root(root)
    if missing := host.missing_units():
        found.append((f"units are missing: {' '.join(missing)}", "run deploy/install"))
    if not host.answers(container_runtime):
        found.append(
            (
                f"no container runtime answers on {container_runtime}",
                "start it, or name its socket with --container-runtime",
            )
        )
    return found


def _users(host: HostFiles) -> list[tuple[str, str]]:
    found = []
    if pods := host.vm_pods():
        step = "remove them while kubelet uses the proxy: kubectl drain NODE, kubectl delete pod"
        found.append((f"{pods} VM pods are left on this node", step))
    if named := host.naming_proxy():
        step = f"set its endpoint to unix://{CONTAINERD}, and restart kubelet"
        found.append((f"kubelet uses {host.proxy}: {', '.join(named)}", step))
    return found


def _not_root(root: Path) -> list[tuple[str, str]]:
    if root == Path("/") and os.geteuid() != 0:
        return [("only root may change units", "repeat it with sudo")]
    return []


def _refuse(problems: Sequence[tuple[str, str]]) -> None:
    """Raise CliError if there are problems. The first is the message; details list all."""
    if not problems:
        return
    (first, step), *_ = problems
    details = [{"path": "", "message": text, "hint": hint} for text, hint in problems]
    raise CliError(Exit.REFUSED, "node_not_ready", first, hint=step, details=details)


# --- effects -----------------------------------------------------------------------------------
def _started(host: HostFiles, *, restart: bool) -> list[str]:
    if not host.systemd:
        return [f"no systemd runs here; run these programs: {' '.join(UNITS)}"]
    _run(["systemctl", "daemon-reload"])
    _run(["systemctl", "enable", "--now", *UNITS])
    if restart:
        _run(["systemctl", "restart", "virtbus-criproxy"])
    deadline = time.monotonic() + READY_S
    while (silent := _silent(host)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [f"{unit} does not answer yet; see: journalctl -u {unit}" for unit in silent]


def _silent(host: HostFiles) -> list[str]:
    return [unit for unit in UNITS if not host.answers(host.socket_of(unit))]


def _next_steps(host: HostFiles) -> list[str]:
    endpoint = f"unix://{host.proxy}"
    steps = [
        f"once for the cluster: kubectl apply -f {host.runtime_class}",
        f"for this node: kubectl label node NODE {NODE_LABEL}=true",
    ]
    if not host.driver.exists():
        folder = host.driver.parent.parent
        steps.append(f"{folder} cannot be written, so pods have no flexvolumes of Virtlet")
    if host.naming_proxy():
        return [*steps, "kubelet uses the proxy already"]
    place = host.endpoint_file()
    flag = f"start kubelet with --container-runtime-endpoint={endpoint}"
    steps.append(f"in {place}: set kubelet's runtime endpoint to {endpoint}" if place else flag)
    return [*steps, "systemctl restart kubelet"]


def _numbered(steps: Sequence[str]) -> list[str]:
    return ["next steps:", *(f"  {number}. {step}" for number, step in enumerate(steps, 1))]


def _run(argv: list[str]) -> None:
    program = shutil.which(argv[0])
    if program is None:
        raise CliError(Exit.UNAVAILABLE, "no_systemctl", "systemctl is not in PATH")
    done = subprocess.run(  # noqa: S603  a fixed command with names of our own units
        [program, *argv[1:]], capture_output=True, text=True, check=False
    )
    if done.returncode:
        text = (done.stderr or done.stdout).strip()
        hint = "repair the unit, then repeat this command"
        raise CliError(Exit.UNAVAILABLE, "systemctl_failed", f"{' '.join(argv)}: {text}", hint=hint)
