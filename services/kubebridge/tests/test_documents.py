"""The aggregated API's own documents match the table of verbs."""

from virtbus.kubebridge.core.api.discovery import (
    OPTIONS,
    aggregated,
    api_resources,
    document_v2,
    document_v3,
    index_v3,
    version,
)
from virtbus.kubebridge.core.api.subresources import EXPAND, VERBS, VERSIONS


def test_every_document_has_each_verb() -> None:
    whole = document_v2()["paths"]
    for one in VERSIONS:
        own = document_v3(one)["paths"]
        assert set(own) <= set(whole)
        listed = {each["name"] for each in api_resources(one)["resources"]}
        for verb in VERBS:
            assert f"{verb.resource}/{verb.name}" in listed
            found = [p for p in own if f"/{verb.resource}/{{name}}/{verb.name}" in p]
            assert found
            assert verb.method.lower() in own[found[0]]
        assert EXPAND in listed
    assert len(index_v3()["paths"]) == len(VERSIONS)


def test_operation_ids_are_unique_and_parameters_are_listed() -> None:
    paths = document_v2()["paths"]
    operations = [op for path in paths.values() for op in path.values() if isinstance(op, dict)]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids))
    for path, item in paths.items():
        assert [f"{{{p['name']}}}" for p in item["parameters"]] == [
            part for part in path.split("/") if part.startswith("{")
        ]
    assert set(OPTIONS) <= {verb.name for verb in VERBS}


def test_aggregated_discovery_equals_the_single_documents() -> None:
    for listed in aggregated()["items"][0]["versions"]:
        names = {
            f"{one['resource']}/{sub['subresource']}"
            for one in listed["resources"]
            for sub in one.get("subresources", ())
        }
        listed_names = {one["name"] for one in api_resources(listed["version"])["resources"]}
        assert names | {EXPAND} == listed_names


def test_virtctl_can_read_the_version() -> None:
    major, minor, patch = version("1")["gitVersion"].removeprefix("v").split(".")
    assert (int(major), int(minor), int(patch)) >= (1, 9, 0)
