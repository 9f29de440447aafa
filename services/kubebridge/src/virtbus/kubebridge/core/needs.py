"""References of a VMI to Secrets and ConfigMaps, which are read when the VMI starts."""

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import NamedTuple

from virtbus.kubebridge.core.plain import Object, at, items, text

SECRET, CONFIG_MAP = "Secret", "ConfigMap"
SEEDS = {
    "cloudInitNoCloud": "cloud_init_no_cloud",
    "cloudInitConfigDrive": "cloud_init_config_drive",
}
"""The kinds of seeds, and what they are called in a VM's spec."""


class Use(Enum):
    """What an object's contents become."""

    SEED = auto()
    NETWORK = auto()
    FILES = auto()
    ANSWERS = auto()
    """Windows' answer file."""
    LOGIN = auto()
    KEYS = auto()


class Need(NamedTuple):
    """An object of the VMI's namespace; `field` is where the VMI names it.

    `place` is that of its volume, or (of keys) of its credential.
    """

    kind: str
    name: str
    field: str
    use: Use
    place: int
    optional: bool = False


Given = Mapping[tuple[str, str], Object]
"""What was read, by kind and name; what does not exist is not in it."""

IN_VOLUMES: tuple[tuple[tuple[str, ...], str, Use], ...] = (
    (("containerDisk", "imagePullSecret"), SECRET, Use.LOGIN),
    *(((seed, "secretRef", "name"), SECRET, Use.SEED) for seed in SEEDS),
    *(((seed, "networkDataSecretRef", "name"), SECRET, Use.NETWORK) for seed in SEEDS),
    (("configMap", "name"), CONFIG_MAP, Use.FILES),
    (("secret", "secretName"), SECRET, Use.FILES),
    (("sysprep", "configMap", "name"), CONFIG_MAP, Use.ANSWERS),
    (("sysprep", "secret", "name"), SECRET, Use.ANSWERS),
)
"""Where a volume names an object."""
OF_KEYS = ("sshPublicKey", "source", "secret", "secretName")


def needs(spec: Object, prefix: str = "spec") -> tuple[Need, ...]:
    """Each object that the spec names, in the order of the volumes; then the keys."""
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
