"""Which parts of a tree are plain data. Each object is looked at once, however often it is referred to."""

from __future__ import annotations

from collections.abc import Iterator

PLAIN = frozenset({type(None), bool, int, float, str})


class PlainParts:
    """Tells which parts of a tree are plain data: dicts with text for keys, lists, and single values below them.

    What contains itself is not plain: it has no end for those who go down every path. Answers are remembered.
    """

    __slots__ = ("_answers",)

    def __init__(self) -> None:
        self._answers: dict[int, tuple[object, bool]] = {}  # keeps the objects, so that ids stay their own

    def __contains__(self, root: object) -> bool:
        if type(root) in PLAIN:
            return True
        if type(root) is not dict and type(root) is not list:
            return False
        if id(root) in self._answers:
            return self._answers[id(root)][1]
        nodes: list[dict[object, object] | list[object]] = [root]
        levels = [self._below(root)]
        while nodes:
            for child in levels[-1]:
                known = self._answers.get(id(child))
                if known is None and type(child) in (dict, list):
                    nodes.append(child)  # type: ignore[arg-type]  # one of the two
                    levels.append(self._below(child))
                    break
                if known is None or not known[1]:
                    return False  # and so is all that is open: it leads here
            else:
                levels.pop()
                node = nodes.pop()
                self._answers[id(node)] = node, True
        return True

    def _below(self, node: object) -> Iterator[object]:
        """Yield the containers below one, and something that is not plain if there is any; mark the node as open."""
        self._answers[id(node)] = node, False
        if isinstance(node, dict):
            yield from (key for key in node if type(key) is not str)
            node = list(node.values())
        yield from (value for value in node if type(value) not in PLAIN)  # type: ignore[attr-defined]  # one of the two
