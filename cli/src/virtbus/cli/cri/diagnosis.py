"""Implements `virtbus cri diag` and `dump-metadata` for a node, and `gen` for a cluster."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from virtbus.cli.cri.host_files import UNITS, manifest
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, local
from virtbus.cli.lazy import examples

LINES = "20000"
COMMAND_S = 30.0
LOG_BYTES = 4 * 1024**2
_SERVICES = ("virtbus-nodeagent", "virtbus-netd", "virtbus-imaged", *UNITS)
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "versions": (sys.executable, "-m", "virtbus.cli", "version", "-o", "json"),
    "doctor": (sys.executable, "-m", "virtbus.cli", "doctor"),
    "processes": ("ps", "auxww"),
    "addresses": ("ip", "-details", "address"),
    "routes": ("ip", "route", "show", "table", "all"),
    "namespaces": ("ip", "-all", "netns", "exec", "ip", "address"),
    "rules": ("nft", "list", "ruleset"),
    "mounts": ("findmnt", "--list"),
    "units": ("systemctl", "status", "--no-pager", *_SERVICES),
    "journal": ("journalctl", "--no-pager", "-n", LINES, *(f"-u{one}" for one in _SERVICES)),
}
"""The commands of a diagnosis, by the name of the output file. No output contains a secret."""
_STATE = click.option(
    "--state-dir",
    default="/var/lib/virtbus",
    show_default=True,
    type=click.Path(path_type=Path),
    help="State folder of virtbus-cri.",
)


@click.command(epilog=examples("virtbus cri diag /tmp/node1"))
@click.argument("folder", type=click.Path(path_type=Path))
@_STATE
@local
def diag(invocation: Invocation, folder: Path, state_dir: Path) -> None:
    """Collect the state of this node's VM pods in a new FOLDER, without secrets.

    FOLDER has the stored pods, the definitions of this host's VMs, the logs, and the host's
    network. If a source fails, the file NAME.error has the reason, and the other sources are still
    collected.
    """
    try:
        folder.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        message = f"{folder} exists; name a new folder"
        raise CliError(Exit.USAGE, "folder_exists", message) from None
    sources = {"pods.json": _dumped(state_dir), **_commanded(), **_domains(), **_emulator_logs()}
    failed = {}
    for name, (text, error) in sources.items():
        (folder / name).write_text(text, encoding="utf-8")
        if error:
            failed[name] = error.splitlines()[0]
            (folder / f"{name}.error").write_text(f"{error}\n", encoding="utf-8")
    value = {"folder": str(folder), "files": sorted(sources), "failed": list(failed)}
    lines = [f"{folder}: {len(sources)} files"]
    lines += [f"failed: {name}: {why}" for name, why in failed.items()]
    invocation.show(value, lambda: "\n".join(lines))


@click.command("dump-metadata", epilog=examples("virtbus cri dump-metadata"))
@_STATE
def dump_metadata(state_dir: Path) -> None:
    """Print the pods that virtbus-cri has stored on this node as JSON.

    SSH keys, environment variables and annotations are removed.
    """
    text, error = _dumped(state_dir)
    if error:
        raise CliError(Exit.NOT_FOUND, "pods_unreadable", error)
    click.echo(text, nl=False)


@click.command(
    epilog=examples(
        """
        virtbus cri gen | kubectl apply -f -
        virtbus cri gen --daemon-set --virtlet | kubectl apply -f -
        """
    )
)
@click.option("--daemon-set", is_flag=True, help="Add the DaemonSet that runs `cri install`.")
@click.option(
    "--virtlet",
    is_flag=True,
    help="Add the kinds of Virtlet's objects, and the right to read them.",
)
def gen(*, daemon_set: bool, virtlet: bool) -> None:
    """Print the objects that a cluster with VM pods needs: the RuntimeClass and its policy."""
    names = ["virtbus", *["daemonset"] * daemon_set, *["virtlet"] * virtlet]
    click.echo("---\n".join(manifest(name) for name in names), nl=False)


# --- sources -----------------------------------------------------------------------------------
Source = tuple[str, str]
"""A source's text and its error. Each may be empty."""


def _dumped(state_dir: Path) -> Source:
    """Return the stored pods without SSH keys, environment variables and annotations."""
    pods: dict[str, Any] = {}
    errors = []
    folder = state_dir / "cri" / "pods"
    if not folder.is_dir():
        return "{}\n", f"{folder} does not exist; name the folder with --state-dir"
    for path in sorted(folder.glob("*.json")):
        try:
            pods[path.stem] = _bare(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            errors.append(f"{path}: {error}")
    return json.dumps(pods, indent=2, sort_keys=True) + "\n", "\n".join(errors)


def _bare(value: Any) -> Any:
    if isinstance(value, list):
        return [_bare(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: "(removed)" if key in _SECRET and one else _bare(one) for key, one in value.items()
    }


_SECRET = frozenset({"key", "envs", "annotations"})
"""Fields with a pod's SSH key, environment and annotations. Annotations may have user data."""


def _commanded() -> dict[str, Source]:
    return {f"{name}.txt": _output(argv) for name, argv in COMMANDS.items()}


def _domains() -> dict[str, Source]:
    """Return the XML of this host's domains. libvirt leaves out secrets."""
    names, error = _output(("virsh", "--readonly", "list", "--all", "--name"))
    found: dict[str, Source] = {"domains.txt": (names, error)}
    for name in names.split():
        argv = ("virsh", "--readonly", "dumpxml", "--domain", name)
        found[f"domain-{Path(name).name}.xml"] = _output(argv)
    return found


def _emulator_logs() -> dict[str, Source]:
    found = {}
    for path in sorted(Path("/var/log/libvirt/qemu").glob("*.log")):
        try:
            with path.open("rb") as log:
                log.seek(max(0, path.stat().st_size - LOG_BYTES))
                found[f"qemu-{path.name}"] = (log.read().decode(errors="replace"), "")
        except OSError as error:
            found[f"qemu-{path.name}"] = ("", str(error))
    return found


def _output(argv: tuple[str, ...]) -> Source:
    if shutil.which(argv[0]) is None:
        return "", f"{argv[0]} is not installed"
    try:
        done = subprocess.run(  # noqa: S603  fixed commands, no shell
            argv, capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    why = done.stderr.strip() or f"exit code {done.returncode}"
    return done.stdout, why if done.returncode else ""
