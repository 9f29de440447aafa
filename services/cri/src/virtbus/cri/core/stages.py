"""Names the stage and the reason of a pod's failure in the texts that kubelet shows as events."""

import re
from typing import Literal

from virtbus.schemas.errors import Code, VirtbusError

Stage = Literal["pod", "image", "network", "volume", "start", "guest"]
"""The failed part: the pod's definition, one of its parts, the start of its VM, or its guest."""

_WORDS: tuple[tuple[Stage, str], ...] = (
    ("pod", "invalid|second_container|source_|cluster_|kubeconfig_|handler_unknown"),
    ("volume", "volume|device|director|disk_|pool_|host_disk"),
    ("image", "image|digest_|container_disk|container_name|layer_|manifest_|registry_|login_"),
    ("image", "conversion_|compressed_|content_|header_|virtual_size_|redirect_|wrong_arch"),
    ("network", "network|cni_|address|mac_|mtu_|subnet_|port_|tap_|link_|bridge_|nic_|netd_"),
    ("network", "no_network|no_bridge|no_ipv6|static_address|vni_|lease_refused|not_attached"),
    ("guest", "guest_"),
)
"""The beginnings of errors' reasons."""
_BY_REASON = tuple((stage, re.compile(words)) for stage, words in _WORDS)
_BY_PATH: tuple[tuple[str, Stage], ...] = (
    ("mounts", "volume"),
    ("devices", "volume"),
    ("port_mappings", "network"),
    ("linux.security_context", "network"),
    ("image", "image"),
)
"""The beginnings of the paths in the details of `pod_refused`."""
_STAGED = re.compile(r"(pod|image|network|volume|start|guest) \([a-z0-9_]+\): ")


def text(stage: str, reason: str, message: str) -> str:
    """Return a failure with its stage and reason. `stage` is the node's word, empty if unknown."""
    found = stage or "start"
    if found in {"image", "start"}:  # the agent's `image` means all disks
        found = _by_reason(reason) or found
    return f"{found} ({reason or 'unknown'}): {message}"


def staged(error: VirtbusError, default: Stage) -> VirtbusError:
    """Return an error of a call with its stage and reason in its text."""
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
