"""Reads untrusted YAML with a limit on its values; no other module parses YAML (ADR 0029).

The cost is linear in the size of the text. Each alias of a value, and each merge key that includes
it, counts the value again before anything is copied. So no text expands beyond the limit. libyaml's
parser is not used, because it recurses on the C stack.
"""

from typing import Any

import yaml

MAX_DEPTH = 32
MAX_NUMBER = 128
"""Maximum length of a number: PyYAML reads `1:1:1…` in quadratic time."""


class YamlError(ValueError):
    """The text is not YAML, or exceeds a limit.

    `line` and `column` count from 1; 0 means unknown. `shown` is the message on several lines, with
    the position. The message and `shown` may contain parts of the document.
    """

    def __init__(self, message: str, line: int = 0, shown: str = "", column: int = 0) -> None:
        super().__init__(message)
        self.line = line
        self.column = column
        self.shown = shown or message


class _OverBudgetError(yaml.MarkedYAMLError):
    pass


def read_yaml(text: str, *, max_values: int) -> Any:
    """Return the value of a YAML document of plain types.

    `max_values` counts scalars, lists and maps, including those that an alias repeats.

    Raises:
        YamlError: the text is not YAML, holds more than one document, refers to itself, nests
            deeper than MAX_DEPTH, or has more than `max_values` values.
    """
    loader = _Loader(text, max_values)
    try:
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(filter(None, (error.context, error.problem)))
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        where = f" (line {line}, column {column})" if mark else ""
        raise YamlError(f"{reason}{where}", line, str(error), column) from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise YamlError(str(error).partition("\n")[0] or type(error).__name__) from None
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """Counts values while nodes are composed, before merge keys are expanded."""

    def __init__(self, text: str, max_values: int) -> None:
        try:
            super().__init__(text)
        except yaml.YAMLError as error:  # a character that YAML does not know
            raise YamlError(str(error).partition("\n")[0]) from None
        self._max_values = max_values
        self._spent = self._depth = 0
        self._sizes: dict[yaml.Node, int] = {}
        """Number of values in each complete node, including those that its aliases repeat."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if node not in self._sizes:
                raise _over("a value holds an alias of itself", event)
            self._spend(self._sizes[node], event)
            return node
        if self._depth >= MAX_DEPTH:
            raise _over(f"nested deeper than {MAX_DEPTH}", event)
        before = self._spent
        self._spend(1, event)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None:
            self._sizes[node] = self._spent - before
        return node

    def _spend(self, count: int, event: yaml.Event) -> None:
        self._spent += count
        if self._spent > self._max_values:
            message = f"more than {self._max_values} values, counted with what aliases repeat"
            raise _over(message, event)

    def fetch_flow_collection_start(self, token: Any) -> None:
        """Raise if too many brackets are open: each slows the scanner for every token."""
        if self.flow_level > MAX_DEPTH:
            problem = f"nested deeper than {MAX_DEPTH}"
            mark: Any = self.get_mark()
            raise _OverBudgetError(problem=problem, problem_mark=mark)
        super().fetch_flow_collection_start(token)

    def construct_yaml_int(self, node: Any) -> Any:
        _check_number(node)
        return super().construct_yaml_int(node)

    def construct_yaml_float(self, node: Any) -> Any:
        _check_number(node)
        return super().construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


def _check_number(node: yaml.Node) -> None:
    if isinstance(node, yaml.ScalarNode) and len(node.value) > MAX_NUMBER:
        problem = f"a number of more than {MAX_NUMBER} characters"
        mark: Any = node.start_mark
        raise _OverBudgetError(problem=problem, problem_mark=mark)


def _over(problem: str, event: yaml.Event) -> _OverBudgetError:
    mark: Any = event.start_mark
    return _OverBudgetError(problem=problem, problem_mark=mark)
