"""Mutations of a Python package: where one can be, and those that a seed draws, in turn over all rooms."""

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT_ROOM = "the root"

OPERATORS = {
    ast.Add: "+ -", ast.Sub: "- +", ast.Mult: "* /", ast.Div: "/ *", ast.FloorDiv: "// %", ast.Mod: "% //",
    ast.Lt: "< <=", ast.LtE: "<= <", ast.Gt: "> >=", ast.GtE: ">= >", ast.Eq: "== !=", ast.NotEq: "!= ==",
    ast.And: "and or", ast.Or: "or and",
}  # fmt: skip
AXES = ("pipe", "data", "expert", "z", "y", "x")
NUMBERS = {0: "1", 1: "0", -1: "0"}


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


DIMENSIONS = _set("axis dim z_dim scatter_dimension split_axis concat_axis")
COLLECTIVES = _set(
    "psum pmean pmax pmin psum_scatter all_gather all_to_all ppermute all_reduce all_reduce_max reduce_scatter "
    "scatter_sequence gather_features scatter_features"
)
REDUCTIONS = _set("sum mean max min prod any all cumsum")
ALONG = REDUCTIONS | _set("concatenate stack softmax log_softmax expand_dims split take argmax")
"""Calls whose last argument is a dimension."""
UNSWAPPED = _set(
    "max min maximum minimum add multiply gcd lcm isclose allclose array_equal logical_and logical_or "
    "isinstance issubclass hasattr getattr setattr delattr cast TypeVar NewType"
)
"""Calls that do the same, or fail at once, with their arguments exchanged."""
SAID = _set("print warn debug info warning error exception log fail sleep wait join tick_params ArgumentParser")
"""Calls whose arguments are text, or time spent waiting."""
LOOKS = _set(
    "help metavar description epilog prog title label fontsize labelsize linewidth alpha dpi zorder figsize color pad "
    "indent flush strict stacklevel frameon columnspacing ncols maxsize timeout unique_indices indices_are_sorted"
)
"""Keywords that are text, looks, or hints with which the result is the same."""


@dataclass(frozen=True)
class Site:
    """A place of a file that can be mutated: its bytes, and what may stand there instead."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Mutation:
    """A drawn mutation; `source` is the whole mutated file."""

    number: int
    room: str
    file: str
    line: int
    kind: str
    before: str
    after: str
    source: bytes


def name_of(node: ast.AST) -> str:
    """The last name of what is called: `lax.psum` is `psum`."""
    return getattr(node, "attr", getattr(node, "id", ""))


def is_text(node: ast.AST) -> bool:
    """Whether a node is a text, or a list or tuple: what only + joins."""
    text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return text or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp | ast.Lambda)


def passed_over(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node that are not mutated: types, texts, what an error says, looks, what only checkers read."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield from node.decorator_list
    yield from (getattr(node, "annotation", None), getattr(node, "returns", None))
    if isinstance(node, ast.If) and re.search("TYPE_CHECKING|__name__", ast.unparse(node.test)):
        yield from (node.test, *node.body)
    elif isinstance(node, ast.Subscript) and name_of(node.value) == "Literal":
        yield node.slice
    elif isinstance(node, ast.Call):
        name = name_of(node.func)
        if name in SAID or name.endswith(("Error", "Warning")):
            yield from (*node.args, *node.keywords)
        yield from (word for word in node.keywords if word.arg in LOOKS)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assert | ast.Raise | ast.JoinedStr) or getattr(child, "name", "") == "__repr__":
            yield child


class Source:
    """A file of the package and the sites in it."""

    def __init__(self, name: str, data: bytes, names: Mapping[str, str]):
        self.name, self.data, self.names = name, data, names
        self.starts = [0, *accumulate(map(len, data.splitlines(keepends=True)))]
        self.nodes = list(self._walk(ast.parse(data)))
        self.axes = sorted({self._axis(node) for _, node in self.nodes} - {""})

    def _walk(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        over = {id(child) for child in passed_over(node)}
        for child in ast.iter_child_nodes(node):
            if id(child) not in over:
                yield node, child
                yield from self._walk(child)

    def _axis(self, node: ast.AST) -> str:
        """The axis that a node names: "x", FEATURE_AXIS."""
        if isinstance(node, ast.Constant) and node.value in AXES:
            return node.value
        return self.names.get(node.id, "") if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else ""

    def span(self, node: Any) -> tuple[int, int]:
        """First byte and end of a node."""
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        """A node as it is written."""
        start, end = self.span(node)
        return self.data[start:end].decode()

    def _alone(self, node: ast.AST) -> str:
        simple = isinstance(node, ast.Name | ast.Call | ast.Attribute | ast.Subscript)
        return self.text(node) if simple else f"({self.text(node)})"

    def sites(self) -> Iterator[Site]:
        """Every site of the file."""
        for parent, node in self.nodes:
            for kind, (start, end), choices in (*self._plain(parent, node), *self._of_call(node)):
                if choices:
                    yield Site(self.name, self.data.count(b"\n", 0, start) + 1, kind, start, end, tuple(choices))

    def _plain(self, parent: ast.AST, node: ast.AST) -> Iterator[tuple[str, tuple[int, int], Sequence[str]]]:
        operands, ops = [], []
        if isinstance(node, ast.BinOp):
            operands, ops = [node.left, node.right], [node.op]
        elif isinstance(node, ast.AugAssign):
            operands, ops = [node.target, node.value], [node.op]
        elif isinstance(node, ast.Compare):
            operands, ops = [node.left, *node.comparators], node.ops
        elif isinstance(node, ast.BoolOp):
            operands, ops = node.values, [node.op] * (len(node.values) - 1)
        for left, op, right in zip(operands, ops, operands[1:], strict=False):
            old, new = OPERATORS.get(type(op), " ").split(" ")
            path = isinstance(op, ast.Div) and re.search("path|folder|dir|home|root|source", ast.unparse(left), re.I)
            joins = isinstance(op, ast.operator) and (is_text(left) or is_text(right))
            if old and not path and not joins:
                start, end = self.span(left)[1], self.span(right)[0]
                at = self.data.find(old.encode(), start, end)
                if at >= 0 and b"#" not in self.data[start:end]:
                    yield "operator", (at, at + len(old)), [new]
        if self._axis(node):
            yield "axis", self.span(node), [f'"{axis}"' for axis in self.axes if axis != self._axis(node)]
        elif isinstance(node, ast.Attribute) and node.attr in AXES and name_of(node.value).endswith("grid"):
            end = self.span(node)[1]
            yield "axis", (end - len(node.attr), end), [axis for axis in AXES if axis != node.attr]
        elif isinstance(node, ast.keyword) and node.arg in DIMENSIONS and self.text(node.value) in map(str, NUMBERS):
            yield "axis", self.span(node.value), [NUMBERS[int(self.text(node.value))]]
        elif isinstance(node, ast.Constant) and not (isinstance(parent, ast.keyword) and parent.arg in DIMENSIONS):
            if isinstance(node.value, bool):
                yield "constant", self.span(node), [str(not node.value)]
            elif isinstance(node.value, int):
                yield "constant", self.span(node), [str(node.value + 1)]
            elif isinstance(node.value, float) and not 0 < node.value < 1e-6:  # smaller ones keep a quotient finite
                yield "constant", self.span(node), [repr(node.value * 2 or 1.0)]

    def _of_call(self, node: ast.AST) -> Iterator[tuple[str, tuple[int, int], Sequence[str]]]:
        if not isinstance(node, ast.Call) or not node.args or any(isinstance(a, ast.Starred) for a in node.args):
            return
        name, base = name_of(node.func), ast.unparse(node.func).rpartition(".")[0]
        of_arrays = base in ("jnp", "np", "lax", "jax.lax", "jax.nn")
        if name in COLLECTIVES or (name in REDUCTIONS and of_arrays):
            yield "reduction", self.span(node), [self._alone(node.args[0])]
        elif name in ("max", "min") and not base and len(node.args) > 1:
            kept = [one for one in node.args if not isinstance(one, ast.Constant)]
            yield "reduction", self.span(node), [self._alone(one) for one in kept[:1]]
        if name in ALONG and of_arrays and len(node.args) > 1 and self.text(node.args[-1]) in map(str, NUMBERS):
            yield "axis", self.span(node.args[-1]), [NUMBERS[int(self.text(node.args[-1]))]]
        elif name not in UNSWAPPED | SAID:
            for left, right in zip(node.args, node.args[1:], strict=False):
                if self.text(left) != self.text(right) and is_text(left) == is_text(right):
                    (start, end), (after, last) = self.span(left), self.span(right)
                    between = self.data[end:after].decode()
                    yield "swap", (start, last), [self.text(right) + between + self.text(left)]


def room(name: str) -> str:
    """The part that a file is in, and its folder there if it has one; the files of the package's root are one room."""
    return "/".join(Path(name).parts[1:-1][:2]) or ROOT_ROOM


def axis_names(files: Mapping[str, bytes]) -> dict[str, str]:
    """The constants that name an axis: FEATURE_AXIS is "x"."""
    found = {}
    for data in files.values():
        for node in ast.parse(data).body:
            if isinstance(node, ast.Assign):
                names, values = (getattr(side, "elts", [side]) for side in (node.targets[0], node.value))
                for name, value in zip(names, values, strict=False):
                    if name_of(name).endswith("_AXIS") and isinstance(value, ast.Constant):
                        found[name_of(name)] = str(value.value)
    return found


def drawn(files: Mapping[str, bytes], seed: int, count: int) -> list[Mutation]:
    """Mutations of files (path: content): rooms in turn, of each a kind, then a site; fewer if there are no more."""
    chance, names = random.Random(seed), axis_names(files)
    rooms: dict[str, dict[str, list[Site]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(files):
        for site in Source(name, files[name], names).sites():
            rooms[room(name)][site.kind].append(site)
    order, mutations = sorted(rooms), list[Mutation]()
    chance.shuffle(order)
    while order and len(mutations) < count:
        place = order.pop(0)
        sites = rooms[place][chance.choice(sorted(rooms[place]))]
        site = sites.pop(chance.randrange(len(sites)))
        rooms[place] = {kind: left for kind, left in rooms[place].items() if left}
        mutation = applied(site, files[site.file], chance.choice(site.choices), len(mutations) + 1)
        mutations += [mutation] if mutation else []
        order += [place] if rooms[place] else []
    return mutations


def applied(site: Site, data: bytes, choice: str, number: int) -> Mutation | None:
    """A mutation at a site, unless what comes out is no Python."""
    source = data[: site.start] + choice.encode() + data[site.end :]
    try:
        compile(source, site.file, "exec")
    except SyntaxError:
        return None
    first, end = data.rfind(b"\n", 0, site.start) + 1, (data + b"\n").find(b"\n", site.end)
    lines = data[first:end], source[first : end + len(source) - len(data)]
    before, after = (" ".join(text.decode().split()) for text in lines)
    return Mutation(number, room(site.file), site.file, site.line, site.kind, before, after, source)
