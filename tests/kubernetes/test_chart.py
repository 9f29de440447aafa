"""The chart and the plain manifests are equal, and the bridge uses every right in them."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.kubernetes.cluster import CRDS

from virtbus.documents.manifests import NAMESPACE, rendered
from virtbus.kubebridge.core.api.subresources import VERBS
from virtbus.kubebridge.core.runtime.subresource_effects import Verb

CHART = CRDS.parent
PLAIN = CHART / "manifests" / "virtbus.yaml"
VERSION = "1.36.3"
MINE = "app.kubernetes.io/name", "virtbus-kubebridge"

Json = dict[str, Any]


def helm() -> str | None:
    """The path of Helm, if it is installed; building it takes a minute."""
    return os.environ.get("VIRTBUS_HELM") or shutil.which("helm")


def key(one: Json) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def by_name(text: str) -> dict[tuple[str, str], Json]:
    found = [one for one in yaml.safe_load_all(text) if one]
    named = {key(one): one for one in found}
    assert len(named) == len(found)
    return named


def values() -> Json:
    found: Json = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def chart(given: Json, *options: str) -> dict[tuple[str, str], Json]:
    """Return all objects of the chart: by Helm, or without it as the manifests are made."""
    program = helm()
    if program is None:
        release = {"Values": given, "Release": {"Namespace": NAMESPACE}}
        files = sorted((CHART / "templates").glob("*.yaml"))
        return by_name("\n---\n".join(rendered(path.read_text(), release) for path in files))
    asked = ("template", "virtbus", str(CHART), "-n", NAMESPACE, "--kube-version", VERSION)
    done = subprocess.run([program, *asked, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return by_name(done.stdout)


def plain() -> dict[tuple[str, str], Json]:
    return by_name(PLAIN.read_text())


def test_the_plain_manifests_are_the_chart_and_a_namespace() -> None:
    expected = chart(values())
    found = plain()
    namespace = found.pop(("Namespace", NAMESPACE))
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert found == expected


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    program = helm()
    if program is None:
        assert (CHART / "Chart.yaml").exists()  # conftest reports it: nobody requested Helm
        return
    done = subprocess.run([program, "lint", "--strict", str(CHART)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_release_with_own_certificates_only_mounts_them() -> None:
    given = values()
    given["certificates"] = {"secret": "mine", "injectFrom": "kubevirt/mine"}
    given["bus"]["server"] = "tls://bus.example:4222"
    made = chart(
        given,
        "--set=certificates.secret=mine,certificates.injectFrom=kubevirt/mine",
        "--set=bus.server=tls://bus.example:4222",
    )
    pod = made["Deployment", "virtbus-kubebridge"]["spec"]["template"]["spec"]
    assert {"name": "certificates", "secret": {"secretName": "mine", "defaultMode": 0o440}} in pod[
        "volumes"
    ]
    env = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert env["VIRTBUS_CERTIFICATES"] == pod["containers"][0]["volumeMounts"][1]["mountPath"]
    assert env["VIRTBUS_SERVER"] == "tls://bus.example:4222"
    for name in (
        ("APIService", "v1.subresources.kubevirt.io"),
        ("MutatingWebhookConfiguration", "virtbus-kubebridge"),
        ("ValidatingWebhookConfiguration", "virtbus-kubebridge"),
    ):
        notes = made[name]["metadata"]["annotations"]
        assert notes == {"cert-manager.io/inject-ca-from": "kubevirt/mine"}


def test_every_object_has_its_owners_mark() -> None:
    for one in plain().values():
        assert MINE in one["metadata"]["labels"].items(), key(one)


def test_the_crds_of_the_chart_are_the_generated_ones() -> None:
    """Helm installs a chart's `crds/`: there is no second copy (tools/documents/tests)."""
    assert {path.name for path in CRDS.iterdir()} == {
        "virtualmachines.yaml",
        "virtualmachineinstances.yaml",
        "kubevirts.yaml",
    }


def allows(rules: list[Json], verb: Verb) -> bool:
    """Match one verb of the aggregated API as RBAC does."""
    names = {f"{verb.resource}/{verb.name}", f"{verb.resource}/*"}
    return any(
        "subresources.kubevirt.io" in rule["apiGroups"]
        and names & set(rule["resources"])
        and verb.access in rule["verbs"]
        for rule in rules
    )


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: f"{verb.resource}/{verb.name}")
def test_editors_may_all_verbs_and_viewers_change_and_enter_nothing(verb: Verb) -> None:
    roles = plain()
    for role in ("admin", "edit"):
        assert allows(roles["ClusterRole", f"kubevirt.io:{role}"]["rules"], verb)
    answers = verb.success == 200 and not verb.missing and "screenshot" not in verb.name
    viewed = allows(roles["ClusterRole", "kubevirt.io:view"]["rules"], verb)
    assert viewed == (verb.access == "get" and answers)


def test_the_pod_has_no_rights_on_its_host() -> None:
    pod = plain()["Deployment", "virtbus-kubebridge"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert {"hostNetwork", "hostPID", "hostIPC"} & set(pod) == set()


def test_every_helm_feature_of_the_chart_is_rendered_or_refused() -> None:
    given = {"Values": {"a": "1", "b": ""}}
    template = "x: {{ .Values.a }}\n{{- if .Values.b }}\ny: 1\n{{- end }}\nz: 2\n"
    assert rendered(template, given) == "x: 1\nz: 2\n"
    with pytest.raises(ValueError, match="more than a value"):
        rendered("x: {{ .Values.a | quote }}\n", given)
    assert Path(CHART / "Chart.yaml").exists()
