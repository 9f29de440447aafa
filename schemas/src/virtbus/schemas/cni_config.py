"""Finds the plugins that a CNI conflist can run, before anything runs them."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import StringConstraints

from virtbus.schemas.errors import Detail, VirtbusError
from virtbus.schemas.wire import invalid

_DEEPEST = 32
PluginsDigest = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


def plugins_in(config: str) -> tuple[tuple[str, str], ...]:
    """Return the path and the value of each `type` in the plugins of a conflist.

    An example of a path is `plugins[0].ipam.type`. A plugin may run another plugin that its
    configuration names, at any depth. So each `type` counts as a plugin.

    Raises:
        ValueError: `config` is no conflist, or is nested too deeply.
    """
    try:
        conf = json.loads(config)
    except (ValueError, RecursionError) as error:
        msg = f"is not JSON ({error})"
        raise ValueError(msg) from None
    plugins = conf.get("plugins") if isinstance(conf, dict) else None
    if not isinstance(plugins, list) or not plugins:
        msg = "has no list `plugins`; write a conflist"
        raise ValueError(msg)
    for index, plugin in enumerate(plugins):
        kind = plugin.get("type") if isinstance(plugin, dict) else None
        if kind is None:
            msg = f"plugins[{index}] has no `type`, the name of a plugin"
            raise ValueError(msg)
    return tuple(_types(plugins, "plugins"))


def plugins_digest(conf: Mapping[str, Any]) -> str:
    """Return a digest of the plugins of a conflist, or of one plugin's own configuration.

    Without plugins the digest is empty. The digest ignores the keys `name` and `cniVersion`.
    """
    plugins = conf.get("plugins", [conf] if "type" in conf else [])
    if not isinstance(plugins, list) or not plugins:
        return ""
    bare = [
        {key: value for key, value in one.items() if key not in {"name", "cniVersion"}}
        if isinstance(one, dict)
        else one
        for one in plugins
    ]
    return hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()


def plugins_differ(index: int, network: str, why: str) -> VirtbusError:
    """Return the error for `spec.networks[index]`, whose network lacks the requested plugins."""
    message = (
        f"{network!r} does not have the CNI plugins that the request names: {why}; make a network "
        "of the kind cni with them, or name no plugins (in Kubernetes: choose the network by the "
        "annotation virtbus.io/network)"
    )
    return invalid((Detail(path=f"spec.networks[{index}].network", message=message),))


def capability(conflist: Mapping[str, Any], name: str) -> bool:
    """Return True if a plugin of a conflist has a capability, such as `ips`."""
    capabilities = (plugin.get("capabilities") for plugin in conflist["plugins"])
    return any(isinstance(each, dict) and each.get(name) is True for each in capabilities)


def _types(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    if depth > _DEEPEST:
        msg = f"{path} is nested too deeply"
        raise ValueError(msg)
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from _types(each, f"{path}[{index}]", depth + 1)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key == "type":
                yield f"{path}.type", each if isinstance(each, str) else repr(each)
            yield from _types(each, f"{path}.{key}", depth + 1)
