"""Reads the files of image names in `<config_dir>/images.d`, after each change.

A second folder has Virtlet's objects of the Kubernetes cluster (VirtletImageMappings and a
ConfigMap), which the node's `virtbus-cri` writes. Files ending in `.toml` have virtbus' own format,
files ending in `.yaml` or `.yml` have Virtlet's.
"""

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from virtbus.imaged.core.image_aliases import ImageAliases, Target, table_of
from virtbus.imaged.core.name_rules import IN_CLUSTER, Layer, RuleFile, read_rules, rules_of
from virtbus.imaged.core.virtlet_mappings import read_mappings
from virtbus.schemas.errors import Detail
from virtbus.schemas.image import ImageSource, ImageTarget

_READERS = {".toml": read_rules, ".yaml": read_mappings, ".yml": read_mappings}
MAX_FILE_BYTES = 1024**2
MAX_FILES = 200
DEFAULT_NAMES = ("tiny", "debian")
"""The images of the folder `images/`, which `make setup` and `make debian-image` build."""

_Seen = tuple[tuple[str, int, int, int], ...]
"""Path, inode (or minus the errno of a failure), size and time of change of each file."""
_TICK_NS = 1_000_000_000

log = logging.getLogger(__name__)


class AliasFiles:
    """The sources of names, in order: files, settings (`extra`), and virtbus' own images.

    An unusable file or folder does not affect the other sources.
    """

    def __init__(
        self,
        directory: Path,
        extra: dict[str, str],
        allowed_roots: tuple[str, ...],
        cluster: Path | None = None,
    ) -> None:
        """`cluster` is the folder of the cluster's objects."""
        self._directory = directory
        self._cluster = cluster
        self._extra = extra
        self._roots = allowed_roots
        self._read: tuple[_Seen, ImageAliases] | None = None

    @property
    def directory(self) -> Path:
        return self._directory

    def resolve(self, name: str) -> Target:
        """Return the current target of a name; raises as `ImageAliases.resolve`. Blocks on disk."""
        return self.read().resolve(name)

    def of_bus(self, name: str, target: ImageTarget) -> Target:
        """Return the target of an image name of the bus.

        The bus has only the name of the transport, which a file of this node defines. Blocks on
        the disk; errors as `ImageAliases.transport`.
        """
        source, where = ImageSource(target.url, target.digest), f"image name {name} of the bus"
        if not target.transport:
            return Target(source, where=where)
        known = self.read().transport(target.transport, target.url)
        return Target(source, known.transport, where=known.where)

    def pinned(self, names: Iterable[str]) -> frozenset[str]:
        """Return the `names` for which `ImageAliases.pins` is True.

        Of `name@digest`, the part `name` is looked up. Blocks on the disk.
        """
        table = self.read()
        return frozenset(name for name in names if table.pins(name.partition("@")[0]))

    def read(self) -> ImageAliases:
        """Return the current table, with the problems of all files. Blocks on the disk."""
        seen, paths, listed = self._look()
        if self._read is not None and self._read[0] == seen:
            return self._read[1]
        files = [*listed, *map(self._read_file, paths)]
        files.append(rules_of(sorted(self._extra.items()), Layer.SETTING))
        files.append(rules_of(map(self._default, DEFAULT_NAMES), Layer.OWN))
        table = table_of(files)
        newest_ns = max((changed_ns for *_, changed_ns in seen), default=0)
        # A file may change twice within one tick of the file system's clock, so a table of
        # files that changed just now is read again.
        self._read = (seen, table) if time.time_ns() - newest_ns > _TICK_NS else None
        for problem in table.problems[:20]:
            log.error(
                "image names: %s: %s", problem.path, problem.message,
                extra={"code": "image_names_invalid"},
            )  # fmt: skip
        return table

    def _look(self) -> tuple[_Seen, list[Path], list[RuleFile]]:
        paths: list[Path] = []
        states: list[tuple[str, int, int, int]] = []
        wrong: list[RuleFile] = []
        for folder in self._folders:
            try:
                paths += _named(folder)
            except OSError as error:
                states.append((str(folder), -(error.errno or 0), 0, 0))
                wrong.append(_problem(folder, f"cannot be listed: {error.strerror}"))
        guests = [Path(root) / f"{name}.qcow2" for root in self._roots for name in DEFAULT_NAMES]
        seen = (*states, *(_state(path) for path in (*paths, *guests)))
        if len(paths) > MAX_FILES:
            first = paths[MAX_FILES]
            message = f"there are more than {MAX_FILES} files of names; {first.name} is not read"
            wrong.append(_problem(first.parent, message))
        return seen, paths[:MAX_FILES], wrong

    @property
    def _folders(self) -> tuple[Path, ...]:
        return (self._directory, *filter(None, [self._cluster]))

    def _read_file(self, path: Path) -> RuleFile:
        found = _file(path)
        if path.parent == self._cluster:
            found.rules = [replace(rule, layer=IN_CLUSTER[rule.layer]) for rule in found.rules]
        return found

    def _default(self, name: str) -> tuple[str, str]:
        paths = [Path(root) / f"{name}.qcow2" for root in self._roots]
        found = next((path for path in paths if path.exists()), paths[0])
        return name, f"file://{found}"


def _problem(folder: Path, message: str) -> RuleFile:
    return RuleFile(problems=[Detail(path=str(folder), message=message)])


def _named(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in _READERS)
    except FileNotFoundError:
        return []


def _state(path: Path) -> tuple[str, int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        return str(path), -(error.errno or 0), 0, 0
    return str(path), status.st_ino, status.st_size, status.st_ctime_ns


def _file(path: Path) -> RuleFile:
    try:
        # A FIFO would block the reader.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            body = file.read(MAX_FILE_BYTES + 1) or b""
        if len(body) <= MAX_FILE_BYTES:
            return _READERS[path.suffix](body.decode(), path.name)
        message = f"is larger than {MAX_FILE_BYTES} bytes"
    except UnicodeDecodeError:
        message = "is no UTF-8 text"
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
    return RuleFile(problems=[Detail(path=path.name, message=message)])
