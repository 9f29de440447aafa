"""Adds the stage and the reason of a failure to the texts that kubelet shows as events of a pod."""

import re
from typing import Literal

from virtbus.schemas.errors import Code, VirtbusError

Stage = Literal["pod", "image", "network", "volume", "start", "guest"]
"""The part that failed: the pod's definition, its image, its network, one of its volumes, the start
of its VM, or the guest."""

_WORDS: tuple[tuple[Stage, str], ...] = (
    ("pod", "invalid|second_container|source_|cluster_|kubeconfig_|handler_unknown"),
    ("volume", "volume|device|director|disk_|pool_|host_disk"),
    ("image", "image|digest_|container_disk|container_name|layer_|manifest_|registry_|login_"),
    ("image", "conversion_|compressed_|content_|header_|virtual_size_|redirect_|wrong_arch"),
    ("network", "network|cni_|address|mac_|mtu_|subnet_|port_|tap_|link_|bridge_|nic_|netd_"),
    ("network", "no_network|no_bridge|no_ipv6|static_address|vni_|lease_refused|not_attached"),
    ("guest", "guest_"),
)
"""Stages with patterns. A reason that begins with a match of the pattern belongs to the stage."""
_BY_REASON = tuple((stage, re.compile(words)) for stage, words in _WORDS)
_BY_PATH: tuple[tuple[str, Stage], ...] = (
    ("mounts", "volume"),
    ("devices", "volume"),
    ("port_mappings", "network"),
    ("linux.security_context", "network"),
    ("image", "image"),
)
"""Beginnings of the field paths in an error `pod_refused`, with the stage of each."""
_STAGED = re.compile(r"(pod|image|network|volume|start|guest) \([a-z0-9_]+\): ")


def text(stage: str, reason: str, message: str) -> str:
    """Return the text of a failure, with its stage and reason.

    `stage` is the stage that the node reported; empty without a report.
    """
    found = stage or "start"
    if found in {"image", "start"}:  # the agent reports the stage `image` for any disk
        found = _by_reason(reason) or found
    return f"{found} ({reason or 'unknown'}): {message}"


def staged(error: VirtbusError, default: Stage) -> VirtbusError:
    """Return the error with its stage and reason in the text.

    `default` is the stage of a reason that belongs to no known stage.
    """
    message = str(error)
    if _STAGED.match(message):
        return error
    stage = _by_reason(error.reason) or default
    if error.reason == "pod_refused":
        stage = _by_field(error)
    return VirtbusError(
        Code(error.code),
        error.reason,
        f"{stage} ({error.reason}): {message}",
        details=error.body.details,
    )


def _by_reason(reason: str) -> Stage | None:
    return next((stage for stage, words in _BY_REASON if words.match(reason)), None)


def _by_field(error: VirtbusError) -> Stage:
    path = error.body.details[0].path if error.body.details else ""
    return next((stage for start, stage in _BY_PATH if path.startswith(start)), "pod")
