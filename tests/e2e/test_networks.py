"""Networks as objects: booted guests use them behind groups, and they end after their last VM."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import dns.message
import dns.rdatatype
import dns.rrset
import pytest
from tests.e2e import host
from tests.e2e.login import Login
from tests.e2e.platform import Json, Platform, Refused, address, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def as_admin(platform: Platform, verb: str, **data: Any) -> Any:
    async def asked() -> Any:
        async with platform.bus("admin") as bus:
            return await bus.request(f"virtbus.api.v1.network.{verb}", data, timeout_s=30)

    return asyncio.run(asked())


def vm(platform: Platform, name: str, *networks: str, folder: Path, key: str, wait: str) -> Json:
    spec = {"networks": [{"name": network, "network": network} for network in networks]}
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"image": "tiny", "memory": "128MiB", "spec": spec}))
    return platform.create(name, "-f", str(file), "--ssh-key", key, wait=wait)


def test_guests_use_networks_of_their_own_until_the_last_vm_ends(
    patient: Platform, tmp_path: Path
) -> None:
    login = Login(tmp_path)
    with pytest.raises(Refused) as refused:
        patient.cli("network", "create", "shop", "--subnet", "10.201.0.0/24", "-o", "json")
    assert refused.value.error["reason"] == "admin_only"
    shop = {"kind": "nat", "subnet": "10.201.0.0/24", "gateway": "10.201.0.9", "mtu": 1400}
    as_admin(patient, "create", name="shop", spec=shop)
    patient.cli("network", "create", "lab", "--kind", "isolated", "--subnet", "10.9.0.0/24")

    how: dict[str, Any] = {"folder": tmp_path, "key": login.public_key}
    one = vm(patient, "one", "default", "shop", "lab", wait="ready", **how)
    two = vm(patient, "two", "default", "shop", "lab", wait="ready", **how)
    assert [address(one, nic).rpartition(".")[0] for nic in (1, 2)] == ["10.201.0", "10.9.0"]

    def in_guest(command: str) -> str:
        return login(one, command).strip()

    until(lambda: "10.201.0." in in_guest("ip -4 addr show eth1"), "a lease of the nat network")
    assert in_guest("cat /sys/class/net/eth1/mtu") == "1400"
    for nic in (1, 2):
        in_guest(f"ping -c 1 -W 3 -I eth{nic} {address(two, nic)}")
    in_guest("ping -c 1 -W 3 -I eth1 10.201.0.9")
    assert in_guest("ping -c 1 -W 1 -I eth2 10.9.0.1 >/dev/null 2>&1 || echo closed") == "closed"

    patient.wait_back("netd", patient.kill("netd"))
    in_guest(f"ping -c 1 -W 3 -I eth2 {address(two, 2)}")
    only_rules_open_a_guest(patient, login, one, two)

    listed = json.loads(patient.cli("network", "list", "-o", "json"))
    assert [(each["name"], each["user_count"]) for each in listed["items"]] == [
        ("lab", 2),
        ("shop", 2),
    ]
    with pytest.raises(Refused) as refused:
        patient.cli("network", "delete", "lab", "-o", "json")
    assert refused.value.error["reason"] == "network_in_use"
    patient.delete("one", "two")
    patient.cli("network", "delete", "lab", "shop")
    assert not json.loads(patient.cli("network", "list", "-o", "json"))["items"]
    patient.nothing_left()


DNS, SERVICE, POD = "10.96.0.10", "10.96.0.20", "10.244.7.2"


def test_a_guest_uses_the_names_and_services_of_a_cluster(
    patient: Platform, tmp_path: Path
) -> None:
    login = Login(tmp_path)
    kube = {"kind": "nat", "subnet": "10.202.0.0/24", "dns": [DNS]}
    as_admin(patient, "create", name="kube", spec=kube)
    with cluster():
        how: dict[str, Any] = {"folder": tmp_path, "key": login.public_key}
        one = vm(patient, "one", "kube", wait="ready", **how)
        assert "nameserver 10.202.0.1" in login(one, "cat /etc/resolv.conf")
        assert SERVICE in login(one, "nslookup web.default.svc.cluster.local")
        assert address(one) in login(one, "nslookup one.default.vm.internal")
        request = "printf 'GET / HTTP/1.0\\r\\n\\r\\n'"
        assert "from the pod" in login(one, f"{request} | nc -w 10 {SERVICE} 80")
        patient.delete("one")
    patient.cli("network", "delete", "kube")
    patient.nothing_left()


@contextmanager
def cluster() -> Iterator[None]:
    """A name server and a service as kube-proxy makes them on a node: by DNAT to a pod."""
    with ExitStack() as ends:
        ends.callback(host.run, "ip", "netns", "delete", "vbtest-pod")
        host.run("ip", "netns", "add", "vbtest-pod")
        link = ("type", "veth", "peer", "name", "eth0", "netns", "vbtest-pod")
        host.run("ip", "link", "add", "vbtest-pod0", *link)
        inside = ("ip", "-n", "vbtest-pod")
        for argv in (
            ("ip", "addr", "add", "10.244.7.1/24", "dev", "vbtest-pod0"),
            ("ip", "link", "set", "vbtest-pod0", "up"),
            (*inside, "addr", "add", f"{POD}/24", "dev", "eth0"),
            (*inside, "link", "set", "eth0", "up"),
            (*inside, "route", "add", "default", "via", "10.244.7.1"),
            ("ip", "addr", "add", f"{DNS}/32", "dev", "lo"),
            ("nft", "add", "table", "ip", "vbtest-proxy"),
            ("nft", "add", "chain", "ip", "vbtest-proxy", "pre", HOOK),
            ("nft", "add", "rule", "ip", "vbtest-proxy", "pre", *DNAT),
        ):
            host.run(*argv)
        ends.callback(host.run, "nft", "delete", "table", "ip", "vbtest-proxy")
        ends.callback(host.run, "ip", "addr", "delete", f"{DNS}/32", "dev", "lo")
        serve = ("ip", "netns", "exec", "vbtest-pod", sys.executable, "-c", POD_PROGRAM)
        pod = ends.enter_context(subprocess.Popen(serve))
        ends.callback(pod.kill)
        names = ends.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        names.bind((DNS, 53))
        names.settimeout(0.2)
        over = threading.Event()
        answering = threading.Thread(target=_answer_names, args=(names, over))
        answering.start()
        ends.callback(answering.join)
        ends.callback(over.set)
        yield


HOOK = "{ type nat hook prerouting priority dstnat; }"
DNAT = ("ip", "daddr", SERVICE, "tcp", "dport", "80", "dnat", "to", f"{POD}:8080")
POD_PROGRAM = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Pod(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"from the pod")
HTTPServer(("", 8080), Pod).serve_forever()
"""


def _answer_names(names: socket.socket, over: threading.Event) -> None:
    while not over.is_set():
        try:
            data, source = names.recvfrom(4096)
        except TimeoutError:
            continue
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query, recursion_available=True)
        question = query.question[0]
        if question.rdtype == dns.rdatatype.A:
            answer.answer.append(dns.rrset.from_text(question.name, 60, "IN", "A", SERVICE))
        names.sendto(answer.to_wire(), source)


def only_rules_open_a_guest(platform: Platform, login: Login, one: Json, two: Json) -> None:
    """Two guests behind security groups: what a rule allows passes, and all else is dropped."""
    target = address(two)

    def label(view: Json, **labels: str) -> None:
        now = platform.get(view["name"])
        about = {"uid": now["uid"], "revision": now["revision"], "labels": labels}
        platform.ask("vm.update", about)

    def opens() -> bool:
        # a rule that drops the open connection would leave nc waiting for its end
        asked = f"timeout 10 nc -w 1 {target} 22 </dev/null | head -c 4"
        return login(one, asked) == "SSH-"

    def dropped() -> int:
        shown = json.loads(platform.cli("vm", "get", "two", "--counters", "-o", "json"))
        count: int = (shown["counters"][0].get("refused") or {}).get("ingress", 0)
        return count

    host = "tcp:22@10.127.0.1/32"
    platform.cli("security-group", "create", "front", "--select", "app=front")
    rules = ("--ingress", "tcp:22@group:front")
    platform.cli("security-group", "create", "db", "--select", "app=db", *rules, "--ingress", host)
    assert opens()
    label(two, app="db")
    # a guest that is slow to answer is no proof, so each attempt counts only with its drops
    until(lambda: not opens() and dropped(), "a connection that no rule allows is dropped, counted")
    with socket.create_connection((target, 22), 5) as held:
        assert held.recv(4) == b"SSH-"
        label(one, app="front")
        until(opens, "the label makes it a member of the group that the rule names")
        platform.cli("security-group", "update", "db", *rules)
        before = dropped()

        def drops_more() -> bool:
            held.sendall(b"x")  # a part of a version line; bytes sent before the change still pass
            return dropped() > before

        until(drops_more, "the connection that only the removed rule allowed ends")
        assert opens()
        label(one)
        until(lambda: not opens(), "without the label, no rule allows it")
    platform.cli("security-group", "delete", "db", "front")
    until(opens, "without groups, the guest is open")
