"""The mutants of a module: one small change each, made in its syntax tree and in memory alone.

Left alone: texts, annotations, decorators, what is there for type checkers alone; tables at the top of a
module, such as of a data sheet's figures, and the upper ends of a scenario's fields, which a test could
only repeat; and ``strict=`` of ``zip``, which changes nothing but what is refused.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

Node = TypeVar("Node", bound=ast.AST)

COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
CALLED: Final = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
FLOAT_FACTOR: Final = 1.5
SANITY: Final = ("le", "lt", "max_length")
"""Keywords of pydantic's fields: how large a value may be before it is absurd."""


@dataclass(frozen=True)
class Mutant:
    """A change: of the node that is number ``node`` of ``ast.walk``, in the way of number ``way``."""

    module: str
    """Path of the file below the repository, with slashes."""
    node: int
    way: int
    line: int
    function: str
    """Qualified name of what it stands in; empty at the top of the module."""
    before: str
    after: str
    number: int
    """How many equal changes of the same function come before it."""

    @property
    def key(self) -> str:
        """A name that stays when lines move."""
        number = f" #{self.number}" if self.number else ""
        return f"{self.module}::{self.function}::{self.before}  →  {self.after}{number}"


def changes(node: ast.AST) -> list[ast.AST]:
    """What may stand in a node's place, a new node each."""
    found: list[ast.AST] = []
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[place] = COMPARED[type(operator)]()
            found.append(changed)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        found.append(ast.BoolOp(other, copy.deepcopy(node.values)))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
        found.append(copy.deepcopy(node.operand))
    elif isinstance(node, ast.BinOp) and not (_is_text(node.left) or _is_text(node.right)):
        if type(node.op) in COMPUTED:
            found.append(_with(node, op=COMPUTED[type(node.op)]()))
    elif isinstance(node, ast.AugAssign) and type(node.op) in COMPUTED and not _is_text(node.value):
        found.append(_with(node, op=COMPUTED[type(node.op)]()))
    elif isinstance(node, ast.Constant):
        found += _constants(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
        found += _calls(node, node.func)
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)) and _is_plain(node.test):
        found.append(_with(node, test=ast.UnaryOp(ast.Not(), copy.deepcopy(node.test))))
    elif isinstance(node, ast.comprehension):
        for place, test in enumerate(node.ifs):
            if _is_plain(test):
                tests = [*node.ifs[:place], ast.UnaryOp(ast.Not(), test), *node.ifs[place + 1 :]]
                found.append(_with(node, ifs=tests))
    elif isinstance(node, (ast.Break, ast.Continue)):
        found.append(ast.Continue() if isinstance(node, ast.Break) else ast.Break())
    elif isinstance(node, ast.Raise) or (
        isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    ):
        found.append(ast.Pass())
    return found


def _with(node: Node, **fields: object) -> Node:
    changed = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _constants(value: object) -> list[ast.AST]:
    if isinstance(value, bool):
        return [ast.Constant(not value)]
    if isinstance(value, int):
        return [ast.Constant(value + 1)]
    if isinstance(value, float):
        return [ast.Constant(value * FLOAT_FACTOR if value else 1.0)]
    return []


def _calls(node: ast.Call, called: ast.Name | ast.Attribute) -> list[ast.AST]:
    if isinstance(called, ast.Name) and called.id in CALLED:
        return [_with(node, func=ast.Name(CALLED[called.id], ast.Load()))]
    if isinstance(called, ast.Attribute) and called.attr in CALLED:
        return [_with(node, func=_with(called, attr=CALLED[called.attr]))]
    return []


def _is_plain(test: ast.expr) -> bool:
    """A condition that no other operator changes."""
    return isinstance(test, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.NamedExpr))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )


def _left_alone(tree: ast.AST) -> set[int]:
    """Ids of the nodes that are no part of what runs, or whose change says nothing."""
    roots: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            roots += [*node.decorator_list, node.returns]
            if any(ast.unparse(each) in ("overload", "abstractmethod") for each in node.decorator_list):
                roots += node.body
        elif isinstance(node, ast.ClassDef):
            roots += [*node.decorator_list, *node.keywords]
            if any("Protocol" in ast.unparse(each) for each in node.bases):
                roots += node.body
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            roots.append(node.annotation)
        elif isinstance(node, ast.FormattedValue):
            roots.append(node.format_spec)
        elif isinstance(node, ast.keyword) and node.arg in ("strict", *SANITY):
            roots.append(node.value)
        elif isinstance(node, ast.Module):
            roots += [each for statement in node.body for each in _tables(statement)]
        elif isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "__name__ == '__main__'",
        ):
            roots.append(node)
    return {id(each) for root in roots if root is not None for each in ast.walk(root)}


def _tables(statement: ast.stmt) -> list[ast.expr]:
    """What a module says as data: collections and records with their values, and names of types."""
    value = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
    if isinstance(value, (ast.Dict, ast.List, ast.Tuple, ast.Set, ast.Call)):
        return [value]
    return [value] if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr) else []


def _functions(tree: ast.AST) -> dict[int, str]:
    """Node's id → qualified name of the function or class that it stands in."""
    found: dict[int, str] = {}

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            found[id(child)] = name
            inner = name
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{name}.{child.name}" if name else child.name
            walk(child, inner)

    walk(tree, "")
    return found


def _shown(node: ast.AST) -> str:
    """A node in a line: of a statement with a body, its head."""
    if isinstance(node, ast.comprehension):
        return ast.unparse(ast.GeneratorExp(ast.Name("_", ast.Load()), [node]))[1:-1]
    if isinstance(node, (ast.If, ast.While)):
        return f"{'if' if isinstance(node, ast.If) else 'while'} {ast.unparse(node.test)}:"
    return " ".join(ast.unparse(ast.fix_missing_locations(node)).split())


def mutants(module: str, source: str) -> Iterator[Mutant]:
    tree = ast.parse(source)
    passed_over, functions = _left_alone(tree), _functions(tree)
    parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found: list[tuple[int, int, int, str, str, str]] = []
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in passed_over:
            continue
        # A comprehension has no line of its own.
        line = getattr(node, "lineno", 0) or getattr(getattr(node, "target", None), "lineno", 0)
        for way, changed in enumerate(changes(node)):
            before, after = _shown(node), _shown(changed)
            if isinstance(node, ast.Constant):  # with what is around it, to be found again
                around = parents[id(node)]
                before = _shown(around) if isinstance(around, ast.expr) else _statement(node, parents)
                after = f"{node.value!r} is {_shown(changed)}"
            found.append((line, number, way, functions[id(node)], before, after))
    seen: Counter[tuple[str, str, str]] = Counter()
    for line, number, way, function, before, after in sorted(found):
        kind = (function, before, after)
        yield Mutant(module, number, way, line, function, before, after, seen[kind])
        seen[kind] += 1


def _statement(node: ast.AST, parents: dict[int, ast.AST]) -> str:
    """The nearest part around it that can be shown in a line."""
    around = parents[id(node)]
    while not isinstance(around, (ast.expr, ast.stmt)):
        around = parents[id(around)]
    if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return f"def {around.name}({ast.unparse(around.args)})"
    return _shown(around)


def mutated(mutant: Mutant, source: str) -> ast.Module:
    tree = ast.parse(source)
    target = next(node for number, node in enumerate(ast.walk(tree)) if number == mutant.node)
    changed = changes(target)[mutant.way]

    class Put(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return ast.copy_location(changed, node) if node is target else self.generic_visit(node)

    Put().generic_visit(tree)  # no mutant changes the module itself
    return ast.fix_missing_locations(tree)
