"""Lookup of the network of the bus to which a multus network refers (ADR 0066).

A NetworkAttachmentDefinition is read in the VM's namespace. The definition names a network object
of the bus, or a conflist of the nodes. The network must have the plugins of the definition's
configuration. If an annotation names the network, any plugins are permitted.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from virtbus.kubebridge.core.objects.status_errors import Cause, Reason
from virtbus.kubebridge.core.objects.unstructured import Object, items, text
from virtbus.schemas.cni_config import plugins_digest

NAD = "NetworkAttachmentDefinition"
ANNOTATION = "virtbus.io/network"
"""The annotation of a NetworkAttachmentDefinition that names a network of the bus."""
_NAME = re.compile("[a-z0-9][a-z0-9-]{0,62}")
CONFIG_CHARS = 65_536
UNREAD_NAME = "unread"
"""A valid name in place of the network's name, while the definitions are unread."""


class Found(NamedTuple):
    """The network of the bus, and a digest of the plugins that the network must have.

    An empty digest permits any plugins.
    """

    name: str
    plugins_digest: str = ""


class Attachment(NamedTuple):
    """A multus network of a VMI. `place` is its index. `namespace` may be empty."""

    place: int
    namespace: str
    name: str


def attachments(spec: Object) -> Iterator[Attachment]:
    """Yield the multus networks of a spec."""
    for index, network in enumerate(items(spec, "networks")):
        if named := text(network, "multus", "networkName"):
            namespace, _, name = named.rpartition("/")
            yield Attachment(index, namespace, name)


def network_of(
    one: Attachment, own: str, given: Mapping[tuple[str, str], Object] | None, field: str
) -> Found | Cause:
    """Return the network, or the reason why it cannot be used.

    `own` is the namespace of the VMI; empty if unknown. `given` is None if no definition was read.
    """
    if one.namespace and own and one.namespace != own:
        message = (
            f"a VM uses only the {NAD}s of its own namespace; create {one.name} in {own}, or use"
            " a network object for all namespaces"
        )
        return Cause(field, message, Reason.NOT_SUPPORTED)
    if given is None:
        return Found(UNREAD_NAME)
    definition = given.get((NAD, one.name))
    try:
        found = Found(one.name) if definition is None else _named(definition, one.name)
    except ValueError as error:
        message = f"the {NAD} {one.name} has no CNI configuration: its spec.config {error}"
        return Cause(field, message)
    if _NAME.fullmatch(found.name) is None:
        message = (
            f"{found.name!r:.80} is no name of a network of the bus; write it into the annotation"
            f" {ANNOTATION} of the {NAD} {one.name}"
        )
        return Cause(field, message)
    return found


def _named(definition: Object, name: str) -> Found:
    """Return the network that a definition names.

    The annotation has precedence. A person wrote it, so that network may have any plugins. Next
    comes the name in the CNI configuration, and last the name of the definition itself.

    Raises:
        ValueError: `spec.config` is not a CNI configuration. Multus refuses it, too.
    """
    if chosen := text(definition, "metadata", "annotations", ANNOTATION):
        return Found(chosen)
    if not (config := text(definition, "spec", "config")):
        return Found(name)
    if len(config) > CONFIG_CHARS:
        msg = f"is longer than {CONFIG_CHARS} characters"
        raise ValueError(msg)
    try:
        read = json.loads(config)
    except (ValueError, RecursionError) as error:
        msg = f"is not JSON ({error})"
        raise ValueError(msg) from None
    conf = read if isinstance(read, dict) else None
    if conf is None:
        msg = "is no JSON object"
        raise ValueError(msg)
    return Found(text(conf, "name") or name, plugins_digest(conf))
