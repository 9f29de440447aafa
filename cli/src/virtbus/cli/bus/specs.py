"""Implements `virtbus bus specs`, which writes a backup's VMs as files for `vm create -f`."""

from pathlib import Path

import click

from virtbus.cli.bus.files import opened
from virtbus.cli.invocation import Invocation, local
from virtbus.cli.lazy import examples


@click.command(
    epilog=examples(
        """
        virtbus bus specs /var/backups/virtbus-2026-11-21 --to specs
        for f in specs/*.json; do virtbus vm create -f "$f"; done
        """
    )
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--to",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder for the files <namespace>.<name>.json. It is created.",
)
@local
def command(invocation: Invocation, *, file: Path, folder: Path) -> None:
    """Write each VM of the backup FILE to a file for `virtbus vm create -f`.

    FILE may be a backup by virtbus 0.1. A written file holds the VM's name, namespace, labels,
    annotations and spec with its secrets, so only its owner can read it. It holds no uid, no node,
    no address and no disk.
    """
    from virtbus.bus.provisioning.backup import parse
    from virtbus.bus.provisioning.credentials import write_secret
    from virtbus.bus.provisioning.specs import specs
    from virtbus.schemas.wire import encode_json

    with opened(file) as content:
        requests = list(specs(parse(content, oldest=1)))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = []
    for request in requests:
        path = folder / f"{request.get('namespace', 'default')}.{request['name']}.json"
        write_secret(path, f"{encode_json(request).decode()}\n")
        written.append(str(path))
    invocation.show({"files": written}, lambda: f"{len(written)} VM(s) in {folder}")
