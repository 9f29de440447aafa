"""What else a VMI's guest is made of: Secrets, read when the VMI starts."""

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from virtbus.kubebridge.core.causes import Cause, Reason
from virtbus.kubebridge.core.plain import Object, at, items, part, text

USER_DATA, NETWORK_DATA = ("userdata", "userData"), ("networkdata", "networkData")


class Need(NamedTuple):
    """An object of the VMI's namespace; `field` is where the VMI names it."""

    kind: str
    name: str
    field: str


Given = Mapping[tuple[str, str], Object]
"""What was read, by kind and name; what does not exist is not in it."""


def needs(spec: Object, prefix: str = "spec") -> tuple[Need, ...]:
    """Each Secret that the spec names, in the order of the fields."""
    return tuple(dict.fromkeys(_needs(spec, prefix)))


def _needs(spec: Object, prefix: str) -> Iterator[Need]:
    for index, volume in enumerate(items(spec, "volumes")):
        for ref in ("secretRef", "networkDataSecretRef"):
            if name := text(volume, "cloudInitNoCloud", ref, "name"):
                field = f"{prefix}.volumes[{index}].cloudInitNoCloud.{ref}.name"
                yield Need("Secret", name, field)
    for index, credential in enumerate(items(spec, "accessCredentials")):
        if name := text(credential, "sshPublicKey", "source", "secret", "secretName"):
            at_ = f"{prefix}.accessCredentials[{index}].sshPublicKey.source.secret.secretName"
            yield Need("Secret", name, at_)


def contents(need: Need, given: Given) -> tuple[dict[str, str], tuple[Cause, ...]]:
    """The texts of a Secret, and what is wrong with it."""
    secret = given.get((need.kind, need.name))
    if secret is None:
        message = f"{need.kind} {need.name} does not exist; create it, the VMI waits for it"
        return {}, (Cause(need.field, message, Reason.NOT_FOUND),)
    texts, causes = {}, []
    for key, value in part(secret, "data").items():
        try:
            texts[key] = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, ValueError, TypeError):
            causes.append(Cause(need.field, f"key {key!r:.80} of {need.name} is no text in UTF-8"))
    texts |= {k: v for k, v in part(secret, "stringData").items() if isinstance(v, str)}
    return texts, tuple(causes)


def cloud_init(volume: Object, ref: str, texts: Mapping[str, str]) -> dict[str, str]:
    """Our fields of a seed from a Secret's texts, by which reference names it."""
    wanted = {"network_data": NETWORK_DATA}
    if ref == "secretRef":
        wanted = {"user_data": USER_DATA, "network_data": NETWORK_DATA}
    found = {
        ours: next((texts[key] for key in keys if key in texts), None)
        for ours, keys in wanted.items()
    }
    if at(volume, "cloudInitNoCloud", "networkDataSecretRef") and ref == "secretRef":
        found.pop("network_data")
    return {ours: value for ours, value in found.items() if value is not None}


def ssh_keys(texts: Mapping[str, str]) -> list[str]:
    """Each line of each value, as KubeVirt takes them."""
    return [line.strip() for text_ in texts.values() for line in text_.splitlines() if line.strip()]
