"""References of a VMI to Secrets and ConfigMaps, which are read when the VMI starts."""

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import NamedTuple

from virtbus.kubebridge.core.objects.unstructured import Object, at, items, text

SECRET, CONFIG_MAP = "Secret", "ConfigMap"
SEEDS = {
    "cloudInitNoCloud": "cloud_init_no_cloud",
    "cloudInitConfigDrive": "cloud_init_config_drive",
}
"""The kinds of seeds, with their names in a VM's spec."""


class Use(Enum):
    """The use of an object's contents."""

    SEED = auto()
    NETWORK = auto()
    FILES = auto()
    ANSWERS = auto()
    """An answer file for Windows setup."""
    LOGIN = auto()
    KEYS = auto()


class Need(NamedTuple):
    """A reference to an object in the VMI's namespace. `field` is the path of the reference.

    `place` is the index of its volume, or of its credential if it holds keys.
    """

    kind: str
    name: str
    field: str
    use: Use
    place: int
    optional: bool = False


Given = Mapping[tuple[str, str], Object]
"""Contents of the objects that were read, by kind and name. Missing objects are absent."""

IN_VOLUMES: tuple[tuple[tuple[str, ...], str, Use], ...] = (
    (("containerDisk", "imagePullSecret"), SECRET, Use.LOGIN),
    *(((seed, "secretRef", "name"), SECRET, Use.SEED) for seed in SEEDS),
    *(((seed, "networkDataSecretRef", "name"), SECRET, Use.NETWORK) for seed in SEEDS),
    (("configMap", "name"), CONFIG_MAP, Use.FILES),
    (("secret", "secretName"), SECRET, Use.FILES),
    (("sysprep", "configMap", "name"), CONFIG_MAP, Use.ANSWERS),
    (("sysprep", "secret", "name"), SECRET, Use.ANSWERS),
)
"""Paths below a volume that name an object."""
OF_KEYS = ("sshPublicKey", "source", "secret", "secretName")


def needs(spec: Object, prefix: str = "spec") -> tuple[Need, ...]:
    """Return all references of the spec: first those of volumes, in order, then those of keys."""
    return tuple(_needs(spec, prefix))


def _needs(spec: Object, prefix: str) -> Iterator[Need]:
    for index, volume in enumerate(items(spec, "volumes")):
        for path, kind, use in IN_VOLUMES:
            if name := text(volume, *path):
                field = f"{prefix}.volumes[{index}].{'.'.join(path)}"
                optional = at(volume, path[0], "optional") is True
                yield Need(kind, name, field, use, index, optional)
    for index, credential in enumerate(items(spec, "accessCredentials")):
        if name := text(credential, *OF_KEYS):
            field = f"{prefix}.accessCredentials[{index}].{'.'.join(OF_KEYS)}"
            yield Need(SECRET, name, field, Use.KEYS, index)
