"""Virtlet's translations of image names are read from YAML, in a fixed order."""

from pathlib import Path

import pytest

from virtbus.imaged.core.image_aliases import table_of
from virtbus.imaged.core.name_rules import RuleFile, read_rules
from virtbus.imaged.core.virtlet_mappings import read_mappings
from virtbus.imaged.edge.alias_files import AliasFiles
from virtbus.schemas.errors import VirtbusError

CONFIG = r"""
prefix: prod
translations:
- {name: linux/1, url: "https://acme.example/linux.qcow2", transport: slow}
- {regexp: 'linux/(\d+\.\d+)', url: "http://acme.example/linux_$1.qcow2"}
transports:
  "": {timeout: 250}
  slow: {timeout: 90000, maxRedirects: 0, proxy: "http://proxy.example:8080",
         tls: {serverName: images.example}}
"""


def mapping(url: str) -> str:
    """Return a VirtletImageMapping with one name."""
    return (
        "apiVersion: virtlet.k8s/v1\nkind: VirtletImageMapping\nmetadata: {name: m}\n"
        f"spec: {{translations: [{{name: one, url: '{url}'}}]}}\n"
    )


def url_of(name: str, *files: RuleFile) -> str:
    return table_of(files).resolve(name).source.ref


def test_a_configuration_has_its_prefix_names_expressions_and_transports() -> None:
    found = read_mappings(CONFIG, "a.yaml")
    assert not found.problems
    assert url_of("prod/linux/1", found) == "https://acme.example/linux.qcow2"
    assert url_of("prod/linux/2.11", found) == "http://acme.example/linux_2.11.qcow2"
    exact, by_default = (rule.transport for rule in found.rules)
    assert (by_default.timeout_s, by_default.max_redirects) == (0.25, 9)
    assert (exact.timeout_s, exact.max_redirects, exact.proxy, exact.server_name) == (
        90,
        0,
        "http://proxy.example:8080",
        "images.example",
    )


@pytest.mark.parametrize(
    ("regexp", "name", "url"),
    [
        (r"linux/(\d+\.\d+)", "acme/linux/2.11-x", "https://h/2.11"),
        (r"(a|ab)(c|bcd)?", "xabcd", "https://h/a"),
        ("^linux(.*)$", "linux1", "https://h/1"),
        ("^linux(.*)$", "alinux1", None),
        ("(?i)LINUX(.)", "alinux1z", "https://h/1"),
    ],
)
def test_an_expression_matches_a_part_of_a_name_as_in_virtlet(
    regexp: str, name: str, url: str | None
) -> None:
    """The URL is only the template: the rest of the name has no part in it."""
    found = read_mappings(f"translations: [{{regexp: '{regexp}', url: 'https://h/$1'}}]", "a.yaml")
    assert not found.problems
    if url is not None:
        assert url_of(name, found) == url
        return
    with pytest.raises(VirtbusError) as caught:
        url_of(name, found)
    assert caught.value.reason == "image_unknown"


def test_a_mapping_precedes_files_in_any_order_and_a_file_precedes_no_other() -> None:
    crd = read_mappings(mapping("https://crd.example/a"), "a.yaml")
    config = "translations: [{name: one, url: 'https://file.example/a'}]"
    plain = read_mappings(config, "b.yaml")
    for files in ((crd, plain), (plain, crd)):
        assert url_of("one", *files) == "https://crd.example/a"
    own = read_rules("[[image]]\nname='one'\nurl='https://toml.example/a'", "c.toml")
    for files in ((own, plain), (plain, own), (crd, crd)):
        with pytest.raises(VirtbusError, match="ambiguous"):
            url_of("one", *files)


def test_objects_of_the_cluster_are_read_as_kubectl_writes_them() -> None:
    text = (
        "kind: List\napiVersion: v1\nitems:\n"
        "- kind: VirtletImageMapping\n  spec: {translations: [{name: a, url: 'https://h/a'}]}\n"
        "- kind: ConfigMap\n  data:\n    x.yaml: |\n"
        "      translations: [{name: b, url: 'https://h/b'}]\n"
    )
    found = read_mappings(text, "all.yaml")
    assert not found.problems
    assert [url_of(name, found) for name in "ab"] == ["https://h/a", "https://h/b"]


TIMEOUTS = ("5s", "-1", "9", "1.5", "true", "[]", "604800001")


@pytest.mark.parametrize("value", ["0", "null", "10", "604800000"])
def test_a_timeout_in_milliseconds_or_none_is_taken(value: str) -> None:
    assert not read_mappings(f"transports: {{a: {{timeout: {value}}}}}", "a.yaml").problems


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "is no YAML"),
        ("[]", "prefix, translations and transports"),
        ("kind: Pod", "only VirtletImageMapping"),
        ("kind: List\nitems: [{kind: List, items: []}]", "must be a VirtletImageMapping"),
        ("kind: VirtletImageMapping", "prefix, translations and transports"),
        ("kind: ConfigMap\ndata: {a: 'b: ['}", "is no YAML"),
        ("translation: []", "unknown field"),
        ("translations: [{url: 'https://h/a'}]", "name or regexp"),
        ("translations: [{name: a, url: nowhere}]", "URL"),
        ("translations: 7", "must be a list"),
        ("translations: [7]", ""),
        ("transports: 7", "must be tables"),
        ("transports: {a: {tls: {insecure: true}}}", "TOML file with"),
        ("transports: {a: {tls: {certificates: [{cert: x}]}}}", "tls"),
        ("transports: {a: {timeouts: 1}}", "timeouts"),
        *((f"transports: {{a: {{timeout: {wrong}}}}}", "a.timeout: must be") for wrong in TIMEOUTS),
    ],
)
def test_a_wrong_file_has_a_problem_that_names_it(text: str, words: str) -> None:
    problems = read_mappings(text, "a.yaml").problems
    assert problems
    assert all(one.path.startswith("a.yaml") for one in problems)
    assert any(words in f"{one.path}: {one.message}" for one in problems), problems


def test_a_wrong_entry_refuses_its_own_name_only() -> None:
    text = "translations: [{name: bad, url: nowhere}, {name: good, url: 'https://h/a'}]\n"
    found = read_mappings(text, "a.yaml")
    assert url_of("good", found) == "https://h/a"
    with pytest.raises(VirtbusError) as caught:
        url_of("bad", found)
    assert caught.value.reason == "image_names_invalid"


def test_the_folder_has_both_forms(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(mapping("https://h/one"))
    (tmp_path / "b.toml").write_text("[[image]]\nname='two'\nurl='https://h/two'")
    (tmp_path / "c.json").write_text("no file of ours")
    names = AliasFiles(tmp_path, {}, (str(tmp_path),))
    assert names.resolve("one").source.ref == "https://h/one"
    assert names.resolve("two").source.ref == "https://h/two"


def test_the_folder_of_the_cluster_has_its_own_place_in_the_order(tmp_path: Path) -> None:
    files, cluster = tmp_path / "images.d", tmp_path / "cluster"
    for folder in (files, cluster):
        folder.mkdir()
    one = "{name: %s, url: 'https://h/%s'}"
    rule = "kind: VirtletImageMapping\nspec: {translations: [%s]}"
    plain = 'kind: ConfigMap\ndata: {a.yaml: "translations: [%s]"}'
    (cluster / "1.yaml").write_text(rule % (one % ("a", "cluster")))
    (files / "1.yaml").write_text(rule % (one % ("a", "file")))
    (files / "2.yaml").write_text(plain % (one % ("b", "file")))
    (cluster / "2.yaml").write_text(plain % f"{one % ('b', 'cluster')}, {one % ('c', 'cluster')}")
    names = AliasFiles(files, {"c": "https://h/setting"}, (str(tmp_path),), cluster)
    found = {name: names.resolve(name).source.ref for name in "abc"}
    assert found == {"a": "https://h/cluster", "b": "https://h/file", "c": "https://h/cluster"}


def test_an_expression_of_the_cluster_precedes_the_same_one_in_a_file(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster"
    cluster.mkdir()
    rule = "kind: VirtletImageMapping\nspec: {translations: [{regexp: 'x.*', url: '%s'}]}"
    (tmp_path / "1.yaml").write_text(rule % "https://h/file")
    (cluster / "1.yaml").write_text(rule % "https://h/cluster")
    names = AliasFiles(tmp_path, {}, (str(tmp_path),), cluster)
    assert names.resolve("xyz").source.ref == "https://h/cluster"


def test_a_folder_of_the_cluster_that_cannot_be_listed_takes_no_other_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = tmp_path / "cluster"
    cluster.write_text("")  # listing it fails also for root
    rule = "kind: VirtletImageMapping\nspec: {translations: [{name: x, url: 'https://h/x'}]}"
    (tmp_path / "1.yaml").write_text(rule)
    names = AliasFiles(tmp_path, {}, (str(tmp_path),), cluster)
    assert names.resolve("x").source.ref == "https://h/x"
    assert f"{cluster}: cannot be listed: Not a directory" in caplog.text
