"""Functions that return the subjects of the bus.

The functions check every token, so an id can neither add tokens nor match other subjects.
"""

import re
from functools import lru_cache
from ipaddress import ip_address

from virtbus.schemas.ids import UNPLACED, check_id, check_uid, name_token, token_name
from virtbus.schemas.image_name import check_image_name, check_scope

PREFIX = "virtbus"
API = f"{PREFIX}.api.v1"
JOIN_KEY = "_join"
NODE_SPEC_KEY = "_spec"
HOST_KEY = "_host"
SIGNING = "_signing"
INSTANCE_KEY = "_instance"
RIVAL_KEY = "_rival"
IMAGES_KEY = "_images"
POOLS_KEY = "_pools"
HOSTS_KEY = "_hosts"
PEER_KEY = "_peer"
RESERVED = "_reserved"
OPERATIONS = "_op"
VOLUMES = "_vol"
VOLUME_KEYS = f"$KV.vm.{VOLUMES}."
"""The prefix of the keys of all volumes."""
SNAPSHOTS = "_snap"
SNAPSHOT_KEYS = f"$KV.vm.{SNAPSHOTS}."
"""The prefix of the keys of all snapshots."""
IMAGE_NAMES = "_img"
IMAGE_NAME_KEYS = f"$KV.vm.{IMAGE_NAMES}."
"""The prefix of the keys of all image names."""
BACKUP_SCHEDULES = "_bsched"
BACKUP_SCHEDULE_KEYS = f"$KV.vm.{BACKUP_SCHEDULES}."
"""The prefix of the keys of all schedules of backups."""
NETWORKS = "_net"
NETWORK_KEYS = f"$KV.vm.{NETWORKS}."
"""The prefix of the keys of all networks."""
SECURITY_GROUPS = "_sg"
SECURITY_GROUP_KEYS = f"$KV.vm.{SECURITY_GROUPS}."
"""The prefix of the keys of all security groups."""
ADDRESSES = "_addr"
ADDRESS_KEYS = f"$KV.vm.{ADDRESSES}."
"""The prefix of the keys of all claimed addresses."""
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")


def _node(node: str) -> str:
    return node if node == UNPLACED else check_id(node)


def api(resource: str, verb: str) -> str:
    """`virtbus.api.v1.<resource>.<verb>`."""
    return f"{API}.{check_id(resource)}.{check_id(verb)}"


def vm_record(node: str, uid: str) -> str:
    """`$KV.vm.<node>.<uid>`: the record of a VM."""
    return f"$KV.vm.{_node(node)}.{check_uid(uid)}"


def vm_anywhere(uid: str) -> str:
    """Filter over one uid on every node. A name claim never matches: its key has more tokens."""
    return f"$KV.vm.*.{check_uid(uid)}"


def vm_all() -> str:
    """Filter over all keys of the bucket `vm`: records, claims, objects, operations and others."""
    return "$KV.vm.>"


def name_claim(namespace: str, name: str) -> str:
    """`$KV.vm._name.<namespace>.<base32(name)>`: the uid that has a name."""
    return f"$KV.vm._name.{check_id(namespace)}.{name_token(check_id(name))}"


def volume_record(namespace: str, name: str) -> str:
    """`$KV.vm._vol.<namespace>.<base32(name)>`: a volume, and the claim of its name."""
    return f"$KV.vm.{VOLUMES}.{check_id(namespace)}.{name_token(check_id(name))}"


def snapshot_record(namespace: str, name: str) -> str:
    """`$KV.vm._snap.<namespace>.<base32(name)>`: a snapshot, and the claim of its name."""
    return f"$KV.vm.{SNAPSHOTS}.{check_id(namespace)}.{name_token(check_id(name))}"


@lru_cache(1024)
def image_name(namespace: str, name: str) -> str:
    """`$KV.vm._img.<namespace>.<base32(name)>`: an image name; `_` is for all namespaces."""
    token = name_token(check_image_name(name))
    return f"$KV.vm.{IMAGE_NAMES}.{check_scope(namespace)}.{token}"


def backup_schedule_record(namespace: str, name: str) -> str:
    """`$KV.vm._bsched.<namespace>.<base32(name)>`: a schedule, and the claim of its name."""
    return f"$KV.vm.{BACKUP_SCHEDULES}.{check_id(namespace)}.{name_token(check_id(name))}"


def network_record(namespace: str, name: str) -> str:
    """`$KV.vm._net.<namespace>.<base32(name)>`: a network; `_` is for all namespaces."""
    return f"$KV.vm.{NETWORKS}.{check_scope(namespace)}.{name_token(check_id(name))}"


def security_group(namespace: str, name: str) -> str:
    """`$KV.vm._sg.<namespace>.<base32(name)>`: a security group, and the claim of its name."""
    return f"{SECURITY_GROUP_KEYS}{check_id(namespace)}.{name_token(check_id(name))}"


def node_group(node: str, namespace: str, name: str) -> str:
    """`$KV.vm.<node>._sg.<namespace>.<base32(name)>`: a security group with VMs on the node."""
    token = name_token(check_id(name))
    return f"$KV.vm.{check_id(node)}.{SECURITY_GROUPS}.{check_id(namespace)}.{token}"


def address_claim(network: str, address: str) -> str:
    """`$KV.vm._addr.<network>.<base32(address)>`: the uid that has an IPv4, IPv6 or MAC address."""
    return f"{ADDRESS_KEYS}{check_uid(network)}.{name_token(_plain_address(address))}"


def claimed_address(key: str) -> tuple[str, str]:
    """Return the network and the address in the key of a claim; raises ValueError."""
    network, _, token = key.removeprefix(ADDRESS_KEYS).partition(".")
    return check_uid(network), _plain_address(token_name(token))


def _plain_address(text: str) -> str:
    if _MAC.fullmatch(text):
        return text
    try:
        return str(ip_address(text))
    except ValueError:
        msg = "must be an IPv4, IPv6 or MAC address"
        raise ValueError(msg) from None


def operation_record(node: str, uid: str) -> str:
    """`$KV.vm.<node>._op.<id>`: an operation of a VM or volume of the node."""
    return f"$KV.vm.{check_id(node)}.{OPERATIONS}.{check_uid(uid)}"


def operation_anywhere(uid: str) -> str:
    """Filter over one operation on every node."""
    return f"$KV.vm.*.{OPERATIONS}.{check_uid(uid)}"


def operation_status(node: str, uid: str) -> str:
    """`$KV.st.<node>._op.<id>`: the progress and the end of an operation."""
    return f"$KV.st.{check_id(node)}.{OPERATIONS}.{check_uid(uid)}"


def join_nonce(node: str) -> str:
    """`$KV.vm.<node>._join`: the bus incarnation that the node joined."""
    return f"$KV.vm.{check_id(node)}.{JOIN_KEY}"


def node_spec(node: str) -> str:
    """`$KV.vm.<node>._spec`: a node's desired state; without this key, the node takes VMs."""
    return f"$KV.vm.{check_id(node)}.{NODE_SPEC_KEY}"


def node_host(node: str) -> str:
    """`$KV.vm.<node>._host`: the node's host and its approved capacity."""
    return f"$KV.vm.{check_id(node)}.{HOST_KEY}"


def node_hosts(node: str) -> str:
    """`$KV.vm.<node>._hosts`: addresses of the fleet's hosts, closed to the node's guests."""
    return f"$KV.vm.{check_id(node)}.{HOSTS_KEY}"


def overlay_peer(node: str, network: str, peer: str) -> str:
    """`$KV.vm.<node>.<network>.<peer>._peer`: the guests of an overlay on another host."""
    return f"$KV.vm.{check_id(node)}.{check_uid(network)}.{check_id(peer)}.{PEER_KEY}"


def node_reserved(node: str) -> str:
    """`$KV.vm._reserved.node.<node>`: the resources of VMs with `Overcommit.STRICT` on a node."""
    return f"$KV.vm.{RESERVED}.node.{check_id(node)}"


def vm_secret(node: str, uid: str) -> str:
    """`$KV.sec.<node>.<uid>`: the secrets of a VM."""
    return f"$KV.sec.{_node(node)}.{check_uid(uid)}"


def signing_key(key: str) -> str:
    """`$KV.sec._signing.<id>`: a key with which controllers sign records."""
    return f"$KV.sec.{SIGNING}.{check_id(key)}"


def signing_keys() -> str:
    """Filter over all keys with which controllers sign records."""
    return f"$KV.sec.{SIGNING}.>"


def vm_status(node: str, uid: str) -> str:
    """`$KV.st.<node>.<uid>`: the status of a VM."""
    return f"$KV.st.{check_id(node)}.{check_uid(uid)}"


def node_instance(node: str) -> str:
    """`$KV.st.<node>._instance`: the one agent that acts for the node."""
    return f"$KV.st.{check_id(node)}.{INSTANCE_KEY}"


def node_rival(node: str) -> str:
    """`$KV.st.<node>._rival`: a refused agent of the same node id; expires."""
    return f"$KV.st.{check_id(node)}.{RIVAL_KEY}"


def node_images(node: str) -> str:
    """`$KV.st.<node>._images`: the images that the node has."""
    return f"$KV.st.{check_id(node)}.{IMAGES_KEY}"


def node_pools(node: str) -> str:
    """`$KV.st.<node>._pools`: the pools that the node has."""
    return f"$KV.st.{check_id(node)}.{POOLS_KEY}"


def node_record(node: str) -> str:
    """`$KV.node.<id>`: the heartbeat of a node."""
    return f"$KV.node.{check_id(node)}"


def lease(role: str) -> str:
    """`$KV.lease.<role>`: the lease of a role."""
    return f"$KV.lease.{check_id(role)}"


def ready(node: str, uid: str, part: str) -> str:
    """`virtbus.node.<id>.ready.<uid>.<image|net>`: disks or network are ready; may be lost."""
    return f"{PREFIX}.node.{check_id(node)}.ready.{check_uid(uid)}.{check_id(part)}"


def ready_all(node: str) -> str:
    """Filter over a node's ready events."""
    return f"{PREFIX}.node.{check_id(node)}.ready.>"


def rpc(node: str, service: str, verb: str) -> str:
    """`virtbus.node.<id>.rpc.<service>.<verb>`: a request to a service of a node."""
    return f"{PREFIX}.node.{check_id(node)}.rpc.{check_id(service)}.{check_id(verb)}"


def names_ask(node: str) -> str:
    """`virtbus.ask.<node>.names`: a node's question about names of VMs."""
    return f"{PREFIX}.ask.{check_id(node)}.names"


def names_asks() -> str:
    """Filter over the questions of all nodes about names of VMs."""
    return f"{PREFIX}.ask.*.names"


def progress(node: str, uid: str, step: str) -> str:
    """`virtbus.node.<id>.progress.<uid>.<step>`: progress of a long step; may be lost."""
    return f"{PREFIX}.node.{check_id(node)}.progress.{check_uid(uid)}.{check_id(step)}"


def service_report(node: str, service: str) -> str:
    """`virtbus.node.<id>.report.<service>`: the report of a node's service; may be lost."""
    return f"{PREFIX}.node.{check_id(node)}.report.{check_id(service)}"


def service_report_all(node: str) -> str:
    """Filter over the reports of a node's services."""
    return f"{PREFIX}.node.{check_id(node)}.report.*"


def event(node: str, uid: str, kind: str) -> str:
    """`virtbus.evt.<node>.<uid>.<kind>`; a kind such as `vm.accepted` is two tokens."""
    tokens = ".".join(check_id(part) for part in kind.split("."))
    return f"{PREFIX}.evt.{_node(node)}.{check_uid(uid)}.{tokens}"


def node_event(node: str, kind: str) -> str:
    """`virtbus.evt.<node>._.<kind>`: an event of the node itself, such as `node.down`."""
    tokens = ".".join(check_id(part) for part in kind.split("."))
    return f"{PREFIX}.evt.{check_id(node)}.{UNPLACED}.{tokens}"


def events(uid: str | None = None) -> str:
    """Filter over one VM's events, or over all events."""
    return f"{PREFIX}.evt.*.{check_uid(uid)}.>" if uid else f"{PREFIX}.evt.>"


def dead_letter(service: str) -> str:
    """`virtbus.dlq.<service>`: messages that could not be handled."""
    return f"{PREFIX}.dlq.{check_id(service)}"


def watch_renewal(instance: str, token: str) -> str:
    """`virtbus.api.v1.watch.renew.<instance>.<token>`: any message on it renews a watch."""
    return f"{API}.watch.renew.{check_id(instance)}.{check_id(token)}"


def watch_renewals(instance: str) -> str:
    """`virtbus.api.v1.watch.renew.<instance>.*`: the renewals of a controller's watches."""
    return f"{API}.watch.renew.{check_id(instance)}.*"


def stream_input(node: str, verb: str, session: str) -> str:
    """`virtbus.node.<id>.rpc.agent.<verb>.<session>`: data from the client of a stream."""
    return f"{rpc(node, 'agent', verb)}.{check_id(session)}"


def client_span() -> str:
    """`virtbus.report.client.span`: a client's own span of a request; may be lost."""
    return f"{PREFIX}.report.client.span"


def bus_storage() -> str:
    """`virtbus.report.bus.storage`: the disk of the bus, reported by `virtbus up`."""
    return f"{PREFIX}.report.bus.storage"


def storage_probe(bucket: str) -> str:
    """`$KV.<bucket>._probe`: a key whose purge tests whether the bus stores messages."""
    return f"$KV.{check_id(bucket)}._probe"
