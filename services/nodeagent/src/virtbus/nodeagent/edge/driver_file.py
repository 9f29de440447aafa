"""The files that describe hosts to libvirt's test driver."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

EMPTY = "<node><cpu><mhz>2000</mhz><model>x86_64</model></cpu></node>\n"


def test_host(path: Path) -> str:
    """The URI of libvirt's test driver with an empty host, so that nothing but ours is in it."""
    path.write_text(EMPTY)
    return f"test://{path.absolute()}"


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for such files that ends with the context."""
    with TemporaryDirectory(prefix="virtbus-simulate-") as folder:
        yield Path(folder)
