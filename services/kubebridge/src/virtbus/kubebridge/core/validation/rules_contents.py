"""Checks of the rules about volumes' contents: seeds, files and keys."""
# ruff: noqa: D103  the rule of each check describes it

from collections.abc import Callable, Iterator

from virtbus.kubebridge.core.objects.plain import Object, at, items, part, text
from virtbus.kubebridge.core.validation.rules_checks import Found

INLINE_BYTES = 2048
_DATA = {
    "userdata": ("userData", "userDataBase64", "secretRef"),
    "networkdata": ("networkData", "networkDataBase64", "networkDataSecretRef"),
}
Check = Callable[[Object], Iterator[Found]]


def _volumes(spec: Object, kind: str) -> Iterator[tuple[str, Object]]:
    for index, volume in enumerate(items(spec, "volumes")):
        if at(volume, kind) is not None:
            yield f"volumes[{index}].{kind}", part(volume, kind)


def data_twice(seed: str) -> Check:
    def check(spec: Object) -> Iterator[Found]:
        for path, one in _volumes(spec, seed):
            for kind, fields in _DATA.items():
                if sum(bool(at(one, field)) for field in fields) > 1:
                    yield path, (kind,)

    return check


def data_of_seed(seed: str) -> Check:
    def check(spec: Object) -> Iterator[Found]:
        for path, one in _volumes(spec, seed):
            if not any(at(one, field) for fields in _DATA.values() for field in fields):
                yield path, ()

    return check


def inline_size(seed: str) -> Check:
    def check(spec: Object) -> Iterator[Found]:
        for path, one in _volumes(spec, seed):
            for kind, (inline, encoded, ref) in _DATA.items():
                size = max(len(text(one, inline).encode()), len(text(one, encoded)) * 3 // 4)
                if size > INLINE_BYTES:
                    yield path, (kind, ref)

    return check


def unnamed(kind: str, name: str) -> Check:
    def check(spec: Object) -> Iterator[Found]:
        for path, one in _volumes(spec, kind):
            if not text(one, name):
                yield f"{path}.{name}", ()

    return check


def answers(spec: Object) -> Iterator[Found]:
    for path, one in _volumes(spec, "sysprep"):
        given = [kind for kind in ("configMap", "secret") if text(one, kind, "name")]
        if len(given) != 1:
            yield path, (" and ".join(given) or "none",)


def _ways(spec: Object) -> Iterator[tuple[str, Object]]:
    for index, one in enumerate(items(spec, "accessCredentials")):
        if at(one, "sshPublicKey") is not None:
            path = f"accessCredentials[{index}].sshPublicKey.propagationMethod"
            yield path, part(one, "sshPublicKey", "propagationMethod")


def kinds_of_credential(spec: Object) -> Iterator[Found]:
    for index, one in enumerate(items(spec, "accessCredentials")):
        given = [kind for kind in ("sshPublicKey", "userPassword") if at(one, kind) is not None]
        if len(given) != 1:
            yield f"accessCredentials[{index}]", (" and ".join(given) or "none",)


def keys_without_source(spec: Object) -> Iterator[Found]:
    for index, one in enumerate(items(spec, "accessCredentials")):
        keys = at(one, "sshPublicKey")
        if keys is not None and not text(keys, "source", "secret", "secretName"):
            yield f"accessCredentials[{index}].sshPublicKey.source", ()


def ways_of_keys(spec: Object) -> Iterator[Found]:
    for path, ways in _ways(spec):
        given = [way for way, value in ways.items() if value is not None]
        if len(given) != 1:
            yield path, (" and ".join(given) or "none",)


def keys_without_seed(spec: Object) -> Iterator[Found]:
    for path, ways in _ways(spec):
        for way, seed in (("noCloud", "cloudInitNoCloud"), ("configDrive", "cloudInitConfigDrive")):
            if at(ways, way) is not None and not any(_volumes(spec, seed)):
                yield path, (seed, way)
