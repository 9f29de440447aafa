"""Clocks, randomness, files and processes stay in `edge/`.

import-linter checks `core/`. This module checks every other module of a service by its syntax
tree. Exceptions are in ALLOWED with the reason. The controller's `edge/` is checked too: it
reaches the outside only through the bus, and uses the bus's `sources` for clock, randomness and
ids.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    path
    for path in ROOT.glob("services/*/src/virtbus/*/**/*.py")
    if ("edge" not in path.parts or "controller" in path.parts) and path.name != "__main__.py"
)

BANNED_MODULES = {
    *("subprocess", "random", "secrets", "socket", "threading", "multiprocessing", "shutil"),
    *("tempfile", "select", "selectors", "fcntl", "mmap", "ctypes", "signal"),
    *("urllib.request", "http.client", "http.server"),
}
BANNED_CALLS = {
    *("open", "input", "exec", "eval", "uuid.uuid4", "uuid4", "uuid.uuid1", "io.open"),
    *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "asyncio.to_thread"),
    *("asyncio.open_connection", "asyncio.open_unix_connection", "asyncio.start_server"),
    *("asyncio.start_unix_server", "datetime.now", "datetime.utcnow", "date.today"),
}
HARMLESS_OS = {"os.fspath", "os.fsencode", "os.fsdecode", "os.strerror"}
FILE_METHODS = {
    *("read_text", "read_bytes", "write_text", "write_bytes", "unlink", "mkdir", "rmdir"),
    *("iterdir", "glob", "rglob", "touch", "chmod", "symlink_to", "hardlink_to", "readlink"),
    *("is_symlink", "lstat"),
}
PATH_QUESTIONS = {"exists", "is_file", "is_dir", "stat", "resolve"}
"""Methods of pathlib's Path as well, if they are called without an argument."""

ALLOWED: dict[str, dict[str, str]] = {
    "controller/edge/fencing.py": {
        "asyncio.create_subprocess_exec": "runs the fence agent: a door of its own",
        "os.killpg": "ends a fence agent that takes too long",
        "signal": "ends a fence agent that takes too long",
    },
    "controller/edge/watch_server.py": {"Path.touch": "a watcher's own method; no file is touched"},
    "netd/builder.py": {
        "socket": "only the type of the descriptors that an edge opened",
    },
    "netd/reporter.py": {
        "time.monotonic_ns": "turns the wrapper's monotonic times into those of its span",
    },
    "netd/vmwrapper/vmwrapper.py": {
        "time.monotonic_ns": "a program of its own, run by libvirt with the system's interpreter",
    },
}
"""Module below services/ → what it uses → the reason."""


def dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(value, attribute):
            before = dotted(value)
            return f"{before}.{attribute}" if before else ""
        case _:
            return ""


def used(tree: ast.AST) -> Iterator[str]:
    """Return the imports and calls of a module that belong to an edge."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (one.name for one in names if one.name in BANNED_MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                whole = module in BANNED_MODULES
                effects = module in {"os", "time", "uuid"}
                yield from (f"{module}.{one.name}" for one in names if whole or effects)
            case ast.Call(function, arguments):
                yield from effect(function, bare=not arguments)
            case _:
                pass


def effect(function: ast.expr, *, bare: bool) -> Iterator[str]:
    called = dotted(function)
    first, _, rest = called.partition(".")
    of_os = first == "os" and not rest.startswith("path.") and called not in HARMLESS_OS
    of_path = FILE_METHODS | (PATH_QUESTIONS if bare else set())
    if called in BANNED_CALLS or of_os or (first == "time" and rest):
        yield called
    elif isinstance(function, ast.Attribute) and function.attr in of_path:
        yield f"Path.{function.attr}"


def below(path: Path) -> str:
    return str(path.relative_to(ROOT / "services")).replace("/src/virtbus/", ":").split(":")[-1]


def test_a_module_outside_edge_has_no_effects_of_its_own() -> None:
    for path in MODULES:
        found = set(used(ast.parse(path.read_text(encoding="utf-8"))))
        assert sorted(found - set(ALLOWED.get(below(path), {}))) == [], below(path)


@pytest.mark.parametrize("module", ALLOWED)
def test_nothing_is_allowed_that_is_not_used(module: str) -> None:
    paths = {below(path): path for path in MODULES}
    assert module in paths
    found = set(used(ast.parse(paths[module].read_text(encoding="utf-8"))))
    assert set(ALLOWED[module]) - found == set()
    assert all(len(reason.split()) > 3 for reason in ALLOWED[module].values())


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess",
        "from random import choice",
        "import os\nos.replace(a, b)",
        "from os import replace",
        "import time\nx = time.time_ns()",
        "from time import monotonic",
        "import uuid\nuuid.uuid4()",
        "open('x')",
        "path.write_text('x')",
        "import urllib.request",
        "asyncio.create_subprocess_exec('x')",
    ],
)
def test_a_planted_effect_is_found(source: str) -> None:
    assert list(used(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["import os.path\nos.path.join(a, b)", "import asyncio\nloop.time()", "self.open(x)"]
)
def test_code_without_effects_is_not_found(source: str) -> None:
    assert list(used(ast.parse(source))) == []


# --- YAML has one reader (ADR 0029) ------------------------------------------------------------
SOURCES = sorted(
    path
    for folder in ("schemas", "bus", "cli", "services/*", "simulator")
    for path in ROOT.glob(f"{folder}/src/virtbus/**/*.py")
)
YAML_DOOR = "yaml_text.py"
YAML_WRITERS = {"dump", "safe_dump", "SafeDumper", "CSafeDumper", "YAMLError"}


def yaml_read(tree: ast.AST) -> Iterator[str]:
    """Return the uses of PyYAML in a module, except for writing."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (one.name for one in names if one.name.startswith(("yaml.", "ruamel")))
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in {"yaml", "_yaml", "ruamel"}:
                    yield from (one.name for one in names if one.name not in YAML_WRITERS)
            case ast.Attribute(ast.Name("yaml"), attribute) if attribute not in YAML_WRITERS:
                yield attribute
            case _:
                pass


def test_yaml_is_read_by_one_module() -> None:
    readers = {
        path.name
        for path in SOURCES
        if list(yaml_read(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert readers == {YAML_DOOR}


@pytest.mark.parametrize(
    "source",
    ["yaml.safe_load(a)", "yaml.load(a, L)", "from yaml import safe_load", "x = yaml.CSafeLoader"],
)
def test_a_planted_reader_of_yaml_is_found(source: str) -> None:
    assert list(yaml_read(ast.parse(source)))
