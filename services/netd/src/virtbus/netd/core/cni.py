"""Data of CNI (spec 1.1.0): conflists, environments, inputs and answers."""

import json
import re
from collections.abc import Collection, Iterator
from ipaddress import ip_address, ip_interface
from typing import Any

from virtbus.netd.core.attachment import CniState, Nic
from virtbus.netd.core.cni_verbs import chosen_version
from virtbus.netd.core.libcni_cache import list_text
from virtbus.netd.core.traffic_control import burst_of
from virtbus.schemas.cni_config import capability, plugins_differ, plugins_digest, plugins_in
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.network_object import BUILT_IN, NetworkTarget
from virtbus.schemas.nic import NicLimits
from virtbus.schemas.publish import PublishedPort
from virtbus.schemas.wire import invalid

MAX_OUTPUT_BYTES = 1024 * 1024
_PLUGIN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
_VERSION = re.compile(r"^\d+\.\d+\.\d+$")
_DEFAULT_VERSION = "0.4.0"


def read_conflist(raw: bytes, source: str) -> CniState:
    """Return a conflist. The configuration of a single plugin becomes a list of one plugin.

    Raises:
        VirtbusError: 422 `cni_config`, which names `source` and the problem in it.
    """
    try:
        text = raw.decode()
        conf = json.loads(text)
    except ValueError as error:
        raise _bad(source, f"it is not JSON ({error})") from None
    if not isinstance(conf, dict):
        raise _bad(source, "it is not a JSON object")
    if "plugins" not in conf:
        name, version = conf.get("name"), conf.get("cniVersion", _DEFAULT_VERSION)
        text = list_text(name, version, conf)
        conf = {"cniVersion": version, "name": name, "plugins": [conf]}
    return _checked(conf, text, source)


def conflist_of(target: NetworkTarget, allowed: Collection[str]) -> CniState:
    """Return the conflist in a network object, with a name that is unique to the network.

    Raises:
        VirtbusError: 403 `plugin_forbidden`: a plugin is not among `allowed`. 422 `cni_config`: the
            conflist is not valid.
    """
    source, text = f"the network '{target.name}'", target.spec.config or ""
    try:
        plugins = plugins_in(text)
    except ValueError as error:
        raise _bad(source, str(error)) from None
    for path, plugin in plugins:
        if plugin not in allowed:
            raise VirtbusError(
                Code.DENIED,
                "plugin_forbidden",
                f"{source} runs {plugin} at {path}, which this node does not allow; its operator "
                "adds it to netd's setting cni_plugins_allowed",
                details=(Detail(path=f"spec.config.{path}", message=f"{plugin} is not allowed"),),
            )
    conf = {**json.loads(text), "name": f"virtbus-{target.uid}"}
    return _checked(conf, json.dumps(conf), source)


def refuse_other_plugins(nic: Nic, conflist: dict[str, Any]) -> None:
    """Raise 400 if the record and the network's conflist name different plugins."""
    if nic.plugins_digest not in {"", plugins_digest(conflist)}:
        raise plugins_differ(nic.position, nic.network, "its conflist is another one")


def _checked(conf: dict[str, Any], text: str, source: str) -> CniState:
    name, version, plugins = conf.get("name"), conf.get("cniVersion"), conf["plugins"]
    if not isinstance(name, str) or not _PLUGIN.match(name):
        raise _bad(source, "`name` must be a word of letters, digits, '_', '.' and '-'")
    if not isinstance(version, str) or not _VERSION.match(version):
        raise _bad(source, "`cniVersion` must be a version such as 1.0.0")
    if not isinstance(plugins, list) or not plugins:
        raise _bad(source, "`plugins` must be a list of at least one plugin")
    for at, plugin in enumerate(plugins):
        kind = plugin.get("type") if isinstance(plugin, dict) else None
        if not isinstance(kind, str) or not _PLUGIN.match(kind):
            raise _bad(source, f"plugins[{at}].type must be the file name of a plugin, no path")
    return CniState(conflist={**conf, "cniVersion": chosen_version(conf)}, source=text)


def _bad(source: str, why: str) -> VirtbusError:
    return VirtbusError(
        Code.UNSUPPORTED, "cni_config", f"{source}: {why}; correct it, and create the VM again"
    )


def at_network(error: VirtbusError, nic: Nic) -> VirtbusError:
    """Return the error. If it names no field, add the field of the interface's network."""
    if error.body.details:
        return error
    detail = Detail(path=nic.network_path, message=str(error))
    return VirtbusError.of(error.body.model_copy(update={"details": (detail,)}))


def plugin_input(
    conflist: dict[str, Any], plugin: dict[str, Any], nic: Nic, previous: dict[str, Any] | None
) -> bytes:
    """Return a chained plugin's input: its conf, name, version, capabilities, prevResult."""
    conf = {**plugin, "name": conflist["name"], "cniVersion": conflist["cniVersion"]}
    capabilities = conf.pop("capabilities", None) or {}
    known = runtime_values(conflist, nic)
    given = {name: value for name, value in known.items() if capabilities.get(name)}
    if given:
        conf["runtimeConfig"] = given
    if previous is not None:
        conf["prevResult"] = previous
    return json.dumps(conf).encode()


def runtime_values(conflist: dict[str, Any], nic: Nic) -> dict[str, Any]:
    """Return the values of all capabilities, without empty values.

    A plugin gets the values of the capabilities that its conf declares.
    """
    values = {
        "mac": nic.mac,
        "ips": [_with_prefix(conflist, address) for address in nic.asked],
        "portMappings": [_mapping(port) for port in nic.publish],
        "bandwidth": _bandwidth(nic.limits, nic.mtu) if nic.limits is not None else None,
        "dns": {"servers": list(nic.network_dns)} if nic.network_dns else None,
    }
    return {name: value for name, value in values.items() if value}


def _mapping(port: PublishedPort) -> dict[str, Any]:
    return {
        "hostPort": port.host_port,
        "containerPort": port.guest_port,
        "protocol": port.protocol,
        "hostIP": port.host_address or "",
    }


def _bandwidth(limits: NicLimits, mtu: int) -> dict[str, int]:
    """Return limits in bits, as CNI has them. `ingress` is the direction to the guest."""
    found = {}
    for way, limit in (("ingress", limits.inbound), ("egress", limits.outbound)):
        if limit is not None:
            found[f"{way}Rate"] = limit.bytes_per_s * 8
            found[f"{way}Burst"] = burst_of(limit, mtu) * 8
    return found


def _with_prefix(conflist: dict[str, Any], address: str) -> str:
    """Return an address with the prefix of the subnet that a plugin for addresses names.

    The plugin `static` needs the prefix; `host-local` takes addresses with and without it.
    """
    for text in _subnets(conflist["plugins"]):
        try:
            network = ip_interface(text).network
        except ValueError:
            continue
        if ip_address(address) in network:
            return f"{address}/{network.prefixlen}"
    return address


def _subnets(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _subnets(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key in {"subnet", "address"} and isinstance(each, str):
                yield each
            yield from _subnets(each)


def planned(nic: Nic, state: CniState) -> Nic:
    """Return an interface with the conflist that its plugins get.

    The plugin `dhcp` is left out: the server's answers go to the guest, so the plugin's daemon
    could not renew a DHCP lease. The guest itself sends requests to the server.

    Raises:
        VirtbusError: 422 `static_address`: the plugins cannot give the record's addresses. 400: no
            plugin takes the published ports.
    """
    conflist = state.conflist
    asks = any(_asks_server(plugin) for plugin in conflist["plugins"])
    _refuse_static(conflist, nic, asks=asks)
    _refuse_ports(conflist, nic, asks=asks)
    if asks:
        plugins = [
            {**plugin, "ipam": {}} if _asks_server(plugin) else plugin
            for plugin in conflist["plugins"]
        ]
        state = state.model_copy(update={"conflist": {**conflist, "plugins": plugins}})
    return nic.model_copy(update={"cni": state, "asks_segment": asks})


def _asks_server(plugin: dict[str, Any]) -> bool:
    ipam = plugin.get("ipam")
    return isinstance(ipam, dict) and ipam.get("type") == "dhcp"


def _refuse_static(conflist: dict[str, Any], nic: Nic, *, asks: bool) -> None:
    if not nic.asked or (capability(conflist, "ips") and not asks):
        return
    if asks:
        message = f"a DHCP server gives the addresses of '{nic.network}'; leave them out"
    else:
        message = (
            f"the plugins of '{nic.network}' choose addresses; leave them out, or add the "
            "capability ips to a plugin of its conflist"
        )
    path = f"{nic.path}.addresses"
    detail = Detail(path=path, message=message)
    raise VirtbusError(Code.UNSUPPORTED, "static_address", message, details=(detail,))


def _refuse_ports(conflist: dict[str, Any], nic: Nic, *, asks: bool) -> None:
    if not nic.publish or (capability(conflist, "portMappings") and not asks):
        return
    message = (
        f"the address on '{nic.network}' is not known before the guest has a lease; publish on an "
        f"interface of '{BUILT_IN}'"
        if asks
        else f"no plugin of '{nic.network}' leads ports to a guest; add portmap with the "
        f"capability portMappings to its conflist, or publish on an interface of '{BUILT_IN}'"
    )
    path = f"{nic.path}.publish"
    raise invalid((Detail(path=path, message=message),))


def environment(
    command: str, uid: str, nic: Nic, netns_path: str, plugin_path: str
) -> dict[str, str]:
    """Return the environment of the CNI specification for one attachment."""
    return {
        **bare_environment(command, plugin_path),
        "CNI_CONTAINERID": uid,
        "CNI_NETNS": netns_path,
        "CNI_IFNAME": nic.eth,
        "CNI_ARGS": ";".join(f"{name}={value}" for name, value in arguments(nic).items()),
    }


def arguments(nic: Nic) -> dict[str, str]:
    """Return the words of CNI_ARGS for an interface, in their order."""
    return {"IgnoreUnknown": "1", **nic.plugin_args, "MAC": nic.mac}


def bare_environment(command: str, plugin_path: str) -> dict[str, str]:
    """Return the environment of a verb without an attachment, with one CPU for Go.

    Plugins are short-lived Go programs. With threads and a garbage collector for every CPU of the
    host, their start would cost more than their work.
    """
    return {
        "GOMAXPROCS": "1",
        "CNI_COMMAND": command,
        "CNI_PATH": plugin_path,
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    }


def read_result(output: bytes, plugin: str) -> dict[str, Any]:
    """Return the result that a plugin printed on ADD.

    Raises:
        VirtbusError: 500 `cni_result` if the output is not a result (NET-10: exit 0 without
        output).
    """
    try:
        result = json.loads(output)
    except ValueError:
        result = None
    if not isinstance(result, dict):
        raise VirtbusError(
            Code.INTERNAL,
            "cni_result",
            f"CNI plugin {plugin} ended well but printed no result; check its log and version",
        )
    return result


def failure_text(output: bytes, errors: bytes) -> str:
    """Return a failed plugin's message: `msg` and `details` of its error object, or its stderr."""
    try:
        body = json.loads(output)
    except ValueError:
        body = None
    if isinstance(body, dict) and body.get("msg"):
        message = f"{body['msg']} {body.get('details') or ''}"
    else:
        message = (errors or output).decode("utf-8", "replace")
    return " ".join(message.split())[:500] or "no message"
