"""Authentication by the front proxy, targets of requests, and refusals."""

import json

import pytest
from services.kubebridge.tests.manifests import VM_UID

from virtbus.kubebridge.core.api.access import SubresourceTarget as Target
from virtbus.kubebridge.core.api.access import forbidden, review, target_of
from virtbus.kubebridge.core.api.front_proxy import FrontProxy, User, of_config_map
from virtbus.kubebridge.core.api.subresources import EXPAND
from virtbus.kubebridge.core.runtime.subresource_effects import VM, VMI

BASE = "/apis/subresources.kubevirt.io/v1/namespaces/ns"
DATA = {
    "requestheader-client-ca-file": "PEM",
    "requestheader-allowed-names": '["front-proxy"]',
    "requestheader-username-headers": '["X-User", "X-Remote-User"]',
    "requestheader-group-headers": '["X-Remote-Group"]',
    "requestheader-extra-headers-prefix": '["X-Remote-Extra-"]',
}


def certificate(name: str) -> dict[str, object]:
    return {"subject": ((("organizationName", "o"),), (("commonName", name),))}


def of(**data: str | None) -> FrontProxy:
    changed = DATA | {f"requestheader-{k.replace('_', '-')}": v for k, v in data.items()}
    return of_config_map({"data": {key: value for key, value in changed.items() if value}})


def test_only_the_front_proxys_certificate_is_accepted() -> None:
    proxy = of()
    assert proxy.is_it(certificate("front-proxy"))
    assert not proxy.is_it(certificate("someone"))
    assert not proxy.is_it(None)
    assert not proxy.is_it({})


def test_without_names_any_signed_certificate_is_accepted_and_without_a_ca_none() -> None:
    assert of(allowed_names=None).is_it(certificate("someone"))
    assert of(allowed_names="[]").is_it(certificate("someone"))
    assert not of(client_ca_file=None).is_it(certificate("front-proxy"))
    assert not of_config_map(None).is_it(certificate("front-proxy"))


@pytest.mark.parametrize("names", ["front-proxy", '{"a": 1}', "[1]", "[["])
def test_invalid_names_accept_no_certificate(names: str) -> None:
    assert not of(allowed_names=names).is_it(certificate("front-proxy"))


def test_the_configured_headers_give_the_user_in_their_order() -> None:
    headers = [
        ("X-Remote-User", "second"),
        ("x-user", "ann"),
        ("X-Remote-Group", "a"),
        ("X-Remote-Group", "b"),
        ("X-Remote-Uid", VM_UID),
        ("X-Remote-Extra-Scopes%2fX", "1"),
        ("x-remote-extra-scopes%2fx", "2"),
    ]
    assert of().user(headers) == User("ann", ("a", "b"), VM_UID, (("scopes/x", ("1", "2")),))
    assert of().user([("X-Remote-Group", "a")]) is None
    assert of().user([("X-User", "")]) is None


@pytest.mark.parametrize(
    ("path", "target"),
    [
        (f"{BASE}/{VM}/a/start", Target("v1", "ns", VM, "a", "start")),
        (f"{BASE}/{VMI}/a/vnc/screenshot", Target("v1", "ns", VMI, "a", "vnc/screenshot")),
        (f"{BASE}/{VM}/a/portforward/1", Target("v1", "ns", VM, "a", "portforward", ("1",))),
        (f"{BASE}/{EXPAND}", Target("v1", "ns", EXPAND)),
        (f"{BASE}/{EXPAND}/a", None),
        (f"{BASE}/{VM}", None),
        (f"{BASE}/{VM}/a", None),
        (f"{BASE}/{VM}//start", None),
        (f"{BASE}/pods/a/exec", None),
        (f"{BASE.replace('v1', 'v2')}/{VM}/a/start", None),
        (f"{BASE.replace('subresources', 'other')}/{VM}/a/start", None),
        (f"{BASE.replace('/ns', '/')}/{VM}/a/start", None),
    ],
)  # fmt: skip
def test_an_address_has_one_target_or_none(path: str, target: Target | None) -> None:
    assert target_of(path) == target


def test_a_review_has_the_whole_user_and_no_port() -> None:
    user = User("ann", ("a",), "u", (("k", ("v",)),))
    target = target_of(f"{BASE}/{VM}/a/portforward/22/tcp")
    assert target is not None
    spec = review(user, "GET", target)["spec"]
    assert spec["resourceAttributes"] == {
        "group": "subresources.kubevirt.io",
        "version": "v1",
        "namespace": "ns",
        "resource": VM,
        "subresource": "portforward",
        "name": "a",
        "verb": "get",
    }
    assert (spec["user"], spec["groups"], spec["uid"]) == ("ann", ["a"], "u")
    assert json.dumps(spec["extra"]) == '{"k": ["v"]}'
    expand = target_of(f"{BASE}/{EXPAND}")
    assert expand is not None
    said = forbidden(User("bob"), "PUT", expand, "no role")
    assert said.message == (
        f'{EXPAND}.subresources.kubevirt.io is forbidden: User "bob" cannot update resource '
        f'"{EXPAND}" in API group "subresources.kubevirt.io" in the namespace "ns": no role'
    )
