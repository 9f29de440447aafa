"""Rules of image names: their order, their problems, and the cost of their expressions.

`VIRTLET` are the cases that Virtlet's own tests fix. They differ in two things on purpose: an
expression matches a whole name, and a name without a rule is an error and not a URL.
"""

import time
from typing import Any

import pytest

from virtbus.imaged.core.image_aliases import MAX_REGEXPS, ImageAliases, table_of
from virtbus.imaged.core.name_patterns import NamePattern
from virtbus.imaged.core.name_rules import Layer, read_rules, rules_of
from virtbus.schemas.errors import VirtbusError

IMAGES = r"""
[[image]]
regexp = '^image(\d+)'
url = 'http://example.net/image_$1.qcow2'
[[image]]
regexp = 'image(\d+)'
url = 'http://example.net/alt_$1.qcow2'
[[image]]
name = 'image1'
url = 'https://example.net/base.qcow2'
"""
PROD = r"""
prefix = 'prod'
[[image]]
regexp = '^linux/(\d+\.\d+)'
url = 'http://acme.example/linux_$1.qcow2'
[[image]]
name = 'linux/1'
url = 'https://acme.example/linux.qcow2'
"""
PIN = "sha256:" + "a" * 64


def table(**files: str) -> ImageAliases:
    return table_of(read_rules(text, f"{name}.toml") for name, text in files.items())


def url_of(names: ImageAliases, name: str) -> str:
    return names.resolve(name).source.ref


def reason(names: ImageAliases, name: str) -> str:
    with pytest.raises(VirtbusError) as caught:
        names.resolve(name)
    return caught.value.reason


def rule(url: str = "http://h/x", **fields: Any) -> str:
    texts = {"url": url, **fields}
    return "[[image]]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in texts.items())


def _toml(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower()


VIRTLET = {
    "image1": "https://example.net/base.qcow2",
    "image2": "http://example.net/image_2.qcow2",
    "image": None,
    "prod/linux/1": "https://acme.example/linux.qcow2",
    "prod/linux/2.11": "http://acme.example/linux_2.11.qcow2",
    "prod/image1": None,  # Virtlet's "misleading" match of a part of a name
    "linux/1": None,
    "": None,
}


@pytest.mark.parametrize("name", VIRTLET)
def test_virtlets_cases(name: str) -> None:
    names = table(config1=IMAGES, config2=PROD)
    assert names.problems == ()
    if VIRTLET[name] is None:
        assert reason(names, name) == "image_unknown"
    else:
        assert url_of(names, name) == VIRTLET[name]


def test_a_mistyped_name_among_thousands_gets_the_names_next_to_it() -> None:
    rules = "".join(rule(f"http://h/{n}", name=f"debian-{n:05}-amd64") for n in range(3_000))
    with pytest.raises(VirtbusError, match="debian-01234-amd64"):
        table(a=rules).resolve("debian-01234-adm64")


def test_exact_names_then_the_longest_prefix_then_files_and_entries_in_order() -> None:
    names = table(
        a=rule("http://h/a1", regexp=".*") + rule("http://h/a2", regexp="prod/x/.*"),
        b="prefix = 'prod'\n" + rule("http://h/b", regexp="x/.*"),
        c="prefix = 'prod/x'\n" + rule("http://h/c", regexp="[yz]"),
        d=rule("http://h/d", name="prod/x/z"),
        e="prefix = 'prod'\n" + rule("http://h/e", name="x/z"),
        f="prefix = 'prod'\n" + rule("http://h/f", regexp=".*"),
    )
    assert names.problems == ()
    assert url_of(names, "prod/x/y") == "http://h/c"
    assert url_of(names, "prod/x/w") == "http://h/b"
    assert url_of(names, "prod/x/z") == "http://h/e"
    assert url_of(names, "prod/w") == "http://h/f"
    assert url_of(names, "production") == url_of(names, "prod") == "http://h/a1"


def test_files_precede_settings_and_those_our_own_guests() -> None:
    settings = rules_of(
        [("a", "http://h/setting"), ("b", f"http://h/setting@{PIN}")], Layer.SETTING
    )
    guests = rules_of([(name, "http://h/guest") for name in "abc"], Layer.OWN)
    file = read_rules(rule("http://h/file", name="a"), "x.toml")
    for files in ([file, settings, guests], [guests, settings, file]):
        names = table_of(files)
        assert names.problems == ()
        urls = [url_of(names, name) for name in "abc"]
        assert urls == ["http://h/file", f"http://h/setting@{PIN}", "http://h/guest"]


@pytest.mark.parametrize(
    ("template", "url"),
    [
        ("http://h/$1/${2}/${word}$$1", "http://h/a/7/a$1"),
        (r"http://h/\1\2\g<word>", "http://h/a7a"),
        ("docker://r.example/a:$2", "docker://r.example/a:7"),
        ("http://h/$0", "http://h/a/7"),
        ("http://h/$x", "http://h/$x"),
    ],
)
def test_groups_fill_the_url(template: str, url: str) -> None:
    names = table(x=rule(template, regexp=r"(?P<word>\w)/(\d)"))
    assert url_of(names, "a/7") == url


def test_a_file_without_problems_is_read_whole() -> None:
    text = f"""
prefix = "corp"
{rule(name="a", transport="slow", digest=PIN, pin=True)}
{rule(name="b")}
[transports.slow]
timeout_s = 5
max_redirects = 0
[transports.default]
proxy = "http://proxy.example:3128"
"""
    names = table(x=text)
    assert names.problems == ()
    target = names.resolve("corp/a")
    assert (target.transport.timeout_s, target.transport.max_redirects) == (5, 0)
    assert (target.source.digest, target.pin, target.where) == (PIN, True, "x.toml: image[0]")
    assert names.resolve("corp/b").transport.proxy == "http://proxy.example:3128"


WRONG = {
    "[[image]\n": "x.toml",
    "image = 1": "x.toml: image",
    "typo = 1": "x.toml: typo",
    "prefix = '../x'": "x.toml: prefix",
    "prefix = 'a:1'": "x.toml: prefix",
    "prefix = 7": "x.toml: prefix",
    "image = [1]": "x.toml: image[0]",
    "[[image]]\nname = 'a'": "x.toml: image[0].url",
    rule(): "x.toml: image[0].regexp",
    rule(name="a", regexp="b"): "x.toml: image[0].regexp",
    rule("ftp://h/", name="a"): "x.toml: image[0].url",
    rule("b", name="a"): "x.toml: image[0].url",
    rule(f"http://h/@{PIN}", name="a"): "x.toml: image[0].url",
    rule(name=".."): "x.toml: image[0].name",
    rule(name="http://h/"): "x.toml: image[0].name",
    rule(name=f"a@{PIN}"): "x.toml: image[0].name",
    rule(name=1): "x.toml: image[0].name",
    rule(regexp="("): "x.toml: image[0].regexp",
    rule("docker://h.example/a:$1", regexp="("): "x.toml: image[0].regexp",
    rule(regexp=r"(a)\1"): "x.toml: image[0].regexp",
    rule(regexp="(?=a)b"): "x.toml: image[0].regexp",
    rule(regexp="((a{99}){99}){99}"): "x.toml: image[0].regexp",
    rule(regexp="a" * 1001): "x.toml: image[0].regexp",
    rule("http://h/$2", regexp="(a)"): "x.toml: image[0].url",
    rule(r"http://h/\g<x>", regexp="(a)"): "x.toml: image[0].url",
    rule(name="a", digest="md5:0"): "x.toml: image[0].digest",
    rule(name="a", typo="x"): "x.toml: image[0].typo",
    rule(name="a", pin="yes"): "x.toml: image[0].pin",
    rule(name="a", transport="t"): "x.toml: image[0].transport",
    "transports = 1": "x.toml: transports",
    "[transports.t]\ninsecure = true": "x.toml: transports.t.insecure",
    "[transports.t]\nmax_redirects = 11": "x.toml: transports.t.max_redirects",
    "[transports.t]\ntimeout_s = 0": "x.toml: transports.t.timeout_s",
    "[transports.t]\nproxy = 'http://a:b@h:1'": "x.toml: transports.t.proxy",
    "[transports.t]\nproxy = 'socks5://h:1'": "x.toml: transports.t.proxy",
    "[transports.t]\nclient_key_file = 'a'": "x.toml: transports.t",
    "[transports.t]\nserver_name = 'a b'": "x.toml: transports.t.server_name",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_problem_names_its_file_and_field(text: str) -> None:
    names = table(x=text, y=rule(name="good"))
    assert [one.path for one in names.problems] == [WRONG[text]]
    assert url_of(names, "good") == "http://h/x"
    assert reason(names, "unknown") == "image_names_invalid"


def test_all_problems_are_told_at_once() -> None:
    text = rule("x", name="a", digest="1") + rule(regexp="(") + "[transports.t]\nproxy = 'x'\n"
    names = table(x=text, y="[[")
    with pytest.raises(VirtbusError) as caught:
        names.resolve("b")
    paths = {one.path for one in caught.value.body.details}
    assert paths == {
        "x.toml: transports.t.proxy", "x.toml: image[0].url", "x.toml: image[0].digest",
        "x.toml: image[1].regexp", "y.toml",
    }  # fmt: skip


def test_no_other_rule_takes_over_the_names_of_a_broken_one() -> None:
    broken = rule("x", name="a") + rule("x", regexp="b.*")
    names = table(x=broken, y=rule("http://h/other", regexp=".*"))
    assert reason(names, "a") == reason(names, "bcd") == "image_names_invalid"
    assert url_of(names, "c") == "http://h/other"
    guests = rules_of([("a", "http://h/guest")], Layer.OWN)
    assert reason(table_of([read_rules(broken, "x"), guests]), "a") == "image_names_invalid"


@pytest.mark.parametrize("matcher", [{"name": "a"}, {"regexp": "a"}])
def test_an_ambiguous_pair_is_told_and_refused(matcher: dict[str, str]) -> None:
    names = table(x=rule("http://h/1", **matcher), y=rule("http://h/2", **matcher))
    (problem,) = names.problems
    assert problem.path == f"y.toml: image[0].{next(iter(matcher))}"
    assert "x.toml: image[0]" in problem.message
    assert reason(names, "a") == "image_names_invalid"


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|aa)+$", "(.*)*x", "([a-z]+)*x", "(a?){400}a{400}", "(.{0,90}){0,9}x"]
)
def test_no_expression_takes_more_than_linear_time(pattern: str) -> None:
    """By backtracking, the first of them takes 2**1000 steps for this name."""
    name = "a" * 1000 + "!"
    began_s = time.thread_time()
    try:
        assert NamePattern.of(pattern, "").url(name) is None
    except ValueError as error:
        assert "RE2" in str(error)  # noqa: PT017  larger than its memory: refused at load
    assert time.thread_time() - began_s < 0.5


def test_the_number_of_expressions_is_bounded() -> None:
    text = "".join(rule(regexp=f"a{n}") for n in range(MAX_REGEXPS + 1))
    (problem,) = table(x=text).problems
    assert problem.path == f"x.toml: image[{MAX_REGEXPS}].regexp"


def test_a_rule_that_gives_no_url_for_a_name_is_named() -> None:
    names = table(x=rule("docker://r.example/a$1", regexp="a(.*)"))
    assert url_of(names, "a/b") == "docker://r.example/a/b:latest"
    assert reason(names, "a/B") == "image_names_invalid"
