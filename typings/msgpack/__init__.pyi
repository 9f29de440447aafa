from collections.abc import Callable
from typing import Any

class UnpackException(Exception): ...

def packb(
    o: Any,
    *,
    default: Callable[[Any], Any] | None = ...,
    use_bin_type: bool = ...,
    unicode_errors: str | None = ...,
) -> bytes: ...
def unpackb(
    packed: bytes,
    *,
    raw: bool = ...,
    object_pairs_hook: Callable[[list[tuple[Any, Any]]], Any] | None = ...,
    list_hook: Callable[[list[Any]], Any] | None = ...,
    strict_map_key: bool = ...,
    ext_hook: Callable[[int, bytes], Any] = ...,
    timestamp: int = ...,
    max_str_len: int = ...,
    max_bin_len: int = ...,
    max_array_len: int = ...,
    max_map_len: int = ...,
) -> Any: ...
