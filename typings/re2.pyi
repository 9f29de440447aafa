class error(Exception): ...

class Options:
    max_mem: int
    log_errors: bool

class _Regexp:
    groups: int
    groupindex: dict[str, int]
    def fullmatch(self, text: str) -> _Match | None: ...

class _Match:
    def __getitem__(self, group: int | str) -> str | None: ...

def compile(pattern: str, options: Options | None = ...) -> _Regexp: ...
