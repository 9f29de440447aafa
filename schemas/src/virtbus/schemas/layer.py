"""Layers: frozen files of a disk. Disks, snapshots and clones rest on layers (ADR 0061)."""

from typing import Annotated

from pydantic import Field

from virtbus.schemas.model import LenientModel

STAGED = ".new-"
"""Prefix of the name of an unfinished file. The file is in the folder of the finished file."""
LAYERS = "layers"
"""The name of the folder of layers, `<state_dir>/disks/layers/`."""
MAX_LAYERS = 24
"""The longest chain below a disk. Each layer costs 1 to 2 % of a sequential read."""
LAYER_NAME = r"^[0-9a-f-]{36}\.[a-z0-9][a-z0-9-]{0,62}\.qcow2$"


def layer_name(snapshot_uid: str, disk: str) -> str:
    """Return the file name of the layer that a snapshot made of a disk."""
    return f"{snapshot_uid}.{disk}.qcow2"


class LayersAsk(LenientModel):
    """`rpc.imaged.layers`: list the layers that nothing needs. The agent removes their files."""


class UnneededLayers(LenientModel):
    """Names of files in `<state_dir>/disks/layers/` that two requests in a row found unused."""

    names: tuple[Annotated[str, Field(pattern=LAYER_NAME)], ...] = ()
