"""Computes a digest of a program's source files without an import."""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

import virtbus


def source_digest(module: str) -> str:
    """Return a SHA-256 of `module` and of all modules of virtbus that it imports, in hex.

    Raises:
        OSError: a source file cannot be read.
    """
    total = hashlib.sha256()
    for name, path in sorted(sources_of(module).items()):
        total.update(f"{name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return total.hexdigest()


def sources_of(module: str) -> dict[str, Path]:
    """Return the files of `module` and of all its virtbus imports, by module name."""
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file_of(name) if name not in found else None
        if path is not None:
            found[name] = path
            waiting += _imported(path)
    return found


def _imported(path: Path) -> Iterator[str]:
    """Yield all imported names that may be virtbus modules, and the packages of these names."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Import():
                names = [one.name for one in node.names]
            case ast.ImportFrom(module=str(package)):
                names = [f"{package}.{one.name}" for one in node.names]
            case _:
                continue
        for name in names:
            parts = name.split(".")
            if parts[0] == virtbus.__name__:
                yield from (".".join(parts[: end + 1]) for end in range(1, len(parts)))


def _file_of(module: str) -> Path | None:
    parts = module.split(".")[1:]
    for root in virtbus.__path__:
        folder = Path(root).joinpath(*parts)
        for path in (folder / "__init__.py", folder.with_suffix(".py")):
            if path.is_file():
                return path
    return None
