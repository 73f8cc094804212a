"""Mutants of a function: where a change goes, and what the changed module looks like.

A mutant is named by its function and by an operator, never by a path or by source text, so
that it survives a module that moves and code that is formatted anew:

    Core.capture                without bool 1 3      the third operand of the first and/or goes
    sqlite:delete               drop call save 1      the first statement that calls ``save`` goes
    sql:do_save                 without and 1         the same, of a named SQL statement

A function is its qualified name, found by a search of the whole package; where several have it,
a word of the module's dotted name stands before it, or an argument's name in brackets behind.
An operator is an action, then a kind of
node, its name where it has one, which of them (in the order of the source, from 1), and what
the action needs:

    drop K          the statement goes               never K, always K    the condition is decided
    negate K        the condition is turned round    swap K OP            another operator
    without K N     operand or element N goes        take K N             only operand N stays
    plus, double, halve K                            the number changes
    set K EXPR      an expression in its place       early                the function returns at once
    once K          a loop becomes an if             exit K               the statement becomes a return

Kinds: call NAME, assign TARGET, name NAME, and without a name: if, test (of if, while, ?:, and
comprehensions), bool, compare, arith, constant, return, raise, with, list.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.source_tree import parse

Function = ast.FunctionDef | ast.AsyncFunctionDef
SQL = "sql"
NAMED = {"call", "assign", "name"}
OPERATORS: dict[str, ast.AST] = {
    "<": ast.Lt(),
    "<=": ast.LtE(),
    ">": ast.Gt(),
    ">=": ast.GtE(),
    "==": ast.Eq(),
    "!=": ast.NotEq(),
    "is": ast.Is(),
    "isnot": ast.IsNot(),
    "in": ast.In(),
    "notin": ast.NotIn(),
    "and": ast.And(),
    "or": ast.Or(),
    "+": ast.Add(),
    "-": ast.Sub(),
}
_SIGN = {type(node): sign for sign, node in OPERATORS.items()}
_OTHER = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_OTHER |= {"is": "isnot", "isnot": "is", "in": "notin", "notin": "in", "+": "-", "-": "+"}


class MutantError(Exception):
    """A mutant that is not to be found, or changes nothing."""


@dataclass(frozen=True)
class Place:
    """A function, or a named SQL statement, in a file of the package."""

    path: Path
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


class Package:
    """All functions of a package, by qualified name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.trees: dict[Path, ast.Module] = {}
        self.places: dict[str, list[Place]] = {}
        for path in sorted(root.rglob("*.py")):
            tree = self.trees[path] = parse(path)
            for name, _ in functions(tree):
                self._add(Place(path, _dotted(root, path), name))
        for path in sorted(root.rglob("*.sql")):
            for name in re.findall(
                r"^-- name: (\w+)$", path.read_text(encoding="utf-8"), re.MULTILINE
            ):
                self._add(Place(path, _dotted(root, path), name))

    def _add(self, place: Place) -> None:
        self.places.setdefault(place.name, []).append(place)

    def find(self, reference: str) -> Place:
        """Return the one function that a reference names."""
        word, _, name = reference.rpartition(":")
        name, _, argument = name.rstrip(")").partition("(")
        known = self.places.get(name, [])
        if argument:
            known = [one for one in known if argument in self._arguments(one)]
        found = [one for one in known if not word or word in one.module.split(".")]
        if word != SQL:
            found = [one for one in found if one.path.suffix == ".py"]
        if len(found) != 1:
            raise MutantError(f"{reference}: {len(found)} functions, {list(map(str, known))}")
        return found[0]

    def _arguments(self, place: Place) -> list[str]:
        arguments = dict(functions(self.trees[place.path]))[place.name].args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        return [one.arg for one in every]

    def reference(self, place: Place) -> str | None:
        """Return the shortest reference that names a function, None if there is none."""
        *packages, module = place.module.split(".")
        for word in ("", *reversed(packages), module):
            reference = f"{word}:{place.name}" if word else place.name
            try:
                if self.find(reference) == place:
                    return reference
            except MutantError:
                continue
        return None

    def mutate(self, changes: tuple[tuple[str, str], ...]) -> dict[Path, str]:
        """Return the texts of the modules with the changes in them."""
        trees: dict[Path, ast.Module] = {}
        texts: dict[Path, str] = {}
        for reference, operator in changes:
            place = self.find(reference)
            if place.path.suffix == ".sql":
                text = texts.get(place.path) or place.path.read_text(encoding="utf-8")
                texts[place.path] = _mutated_sql(text, place.name, operator)
                continue
            if place.path not in trees:
                trees[place.path] = ast.parse(place.path.read_text(encoding="utf-8"))
            tree = trees[place.path]
            function = dict(functions(tree))[place.name]
            before = ast.dump(function)
            apply(function, operator, reference)
            if ast.dump(function) == before:
                raise MutantError(f"{reference}: {operator!r} changes nothing")
        for path, tree in trees.items():
            texts[path] = ast.unparse(tree) + "\n"
            compile(texts[path], str(path), "exec")
        return texts

    def sites(self, packages: tuple[str, ...]) -> Iterator[tuple[Place, str, str]]:
        """Yield function, reference and operator of all that a seed may draw."""
        for places in self.places.values():
            for place in places:
                if place.path.suffix != ".py" or not _within(place.module, packages):
                    continue
                reference = self.reference(place)
                if reference is None:
                    continue
                for operator in operators_of(dict(functions(self.trees[place.path]))[place.name]):
                    yield place, reference, operator


def _dotted(root: Path, path: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _within(module: str, packages: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"perdure.{package}.") for package in packages)


def functions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield the functions of a module and of its classes, by qualified name."""
    for node in tree.body:
        if isinstance(node, Function):
            doubled = any(ast.unparse(one).endswith(".setter") for one in node.decorator_list)
            yield f"{prefix}{node.name}{'.setter' if doubled else ''}", node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


# nodes


def preorder(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs in a node, in the order of the source: no annotation, no docstring."""
    yield node
    for field, value in ast.iter_fields(node):
        if field in {"annotation", "returns", "decorator_list", "type_params", "ctx"}:
            continue
        children = value if isinstance(value, list) else [value]
        if field == "body" and isinstance(node, Function) and ast.get_docstring(node) is not None:
            children = children[1:]
        for child in children:
            if isinstance(child, ast.AST):
                yield from preorder(child)


def of_kind(function: Function, kind: str, name: str = "") -> list[ast.AST]:
    """Return the nodes of a kind, in order."""
    return [node for node in preorder(function) if _is(node, kind, name)]


def _is(node: ast.AST, kind: str, name: str) -> bool:
    match kind:
        case "call":
            return isinstance(node, ast.Call) and _last(node.func) == name
        case "assign":
            return name in _targets(node)
        case "name":
            return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) == name
        case "test":
            return isinstance(node, ast.If | ast.While | ast.IfExp | ast.comprehension)
        case "constant":
            return isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    return isinstance(node, _KINDS[kind])


_KINDS: dict[str, type[ast.AST] | tuple[type[ast.AST], ...]] = {
    "if": ast.If,
    "while": ast.While,
    "bool": ast.BoolOp,
    "compare": ast.Compare,
    "arith": ast.BinOp,
    "return": ast.Return,
    "raise": ast.Raise,
    "with": (ast.With, ast.AsyncWith),
    "list": (ast.Tuple, ast.List, ast.Set),
}


def _last(node: ast.AST) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", "")


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Assign):
        flat = [part for one in node.targets for part in getattr(one, "elts", [one])]
        return [ast.unparse(one) for one in flat]
    if isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
        return [ast.unparse(node.target)]
    return []


class _Exchange(ast.NodeTransformer):
    """Puts something in one node's place."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.old:
            return self.new
        return self.generic_visit(node)


# actions


def apply(function: Function, operator: str, where: str = "") -> None:
    """Change a function's tree."""
    action, *rest = operator.split()
    if action == "early":
        start = 1 if ast.get_docstring(function) is not None else 0
        function.body.insert(start, ast.Return())
        return
    kind, rest = rest[0], rest[1:]
    name = rest.pop(0) if kind in NAMED else ""
    number = int(rest.pop(0))
    found = of_kind(function, kind, name)
    if not 1 <= number <= len(found):
        raise MutantError(f"{where}: {operator!r}, but there are {len(found)}")
    node = found[number - 1]
    new = _changed(function, node, action, rest)
    if new is None:
        raise MutantError(f"{where}: {operator!r} makes no sense")
    old, put = new
    _Exchange(old, put).visit(function)


def _changed(
    function: Function, node: ast.AST, action: str, rest: list[str]
) -> tuple[ast.AST, ast.AST] | None:
    """Return what goes, and what stands there afterwards."""
    if action == "drop":
        return _statement(function, node), ast.Pass()
    if action == "once" and isinstance(node, ast.While):
        return node, ast.If(node.test, node.body, node.orelse)
    if action == "exit":
        return _statement(function, node), ast.Return()
    if action in {"negate", "never", "always"}:
        return _decided(node, action)
    if action == "set":
        expression = ast.parse(" ".join(rest), mode="eval").body
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return):
            assert node.value is not None
            return node.value, expression
        return node, expression
    if action in {"plus", "double", "halve"}:
        if isinstance(node, ast.Assign | ast.Return) and node.value is not None:
            node = node.value
        by, number = {
            "plus": (ast.Add(), 1),
            "double": (ast.Mult(), 2),
            "halve": (ast.Div(), 2),
        }[action]
        return node, ast.BinOp(copy.deepcopy(node), by, ast.Constant(number))
    return _rearranged(node, action, rest)


def _decided(node: ast.AST, action: str) -> tuple[ast.AST, ast.AST]:
    if isinstance(node, ast.comprehension):
        test = node.ifs[0]
    else:
        test = node.test if isinstance(node, ast.If | ast.While | ast.IfExp) else node
    if action == "negate":
        return test, ast.UnaryOp(ast.Not(), copy.deepcopy(test))
    return test, ast.Constant(action == "always")


def _rearranged(node: ast.AST, action: str, rest: list[str]) -> tuple[ast.AST, ast.AST] | None:
    new = copy.deepcopy(node)
    if action == "swap":
        sign = OPERATORS[rest[0]]
        if isinstance(new, ast.Compare):
            at = int(rest[1]) - 1 if len(rest) > 1 else 0
            new.ops[at] = sign  # type: ignore[assignment]
        elif isinstance(new, ast.BoolOp | ast.BinOp):
            new.op = sign  # type: ignore[assignment]
        return node, new
    place = int(rest[0]) - 1
    if action == "without":
        if isinstance(new, ast.BoolOp):
            del new.values[place]
            return node, new if len(new.values) > 1 else new.values[0]
        if isinstance(new, ast.Tuple | ast.List | ast.Set):
            del new.elts[place]
            return node, new
    if action == "take":
        if isinstance(new, ast.Call):
            return node, new.args[place]
        if isinstance(new, ast.BinOp):
            return node, (new.left, new.right)[place]
        if isinstance(new, ast.BoolOp):
            return node, new.values[place]
    return None


def _statement(function: Function, node: ast.AST) -> ast.stmt:
    """Return the innermost statement around a node."""
    inner: ast.stmt | None = None
    for one in preorder(function):
        if isinstance(one, ast.stmt) and one is not function and node in preorder(one):
            inner = one
    assert inner is not None
    return inner


def _mutated_sql(text: str, name: str, operator: str) -> str:
    action, what, number = operator.split()
    assert (action, what) == ("without", "and"), operator
    begin = text.index(f"-- name: {name}\n")
    end = text.find("\n-- name:", begin)
    statement = text[begin : end if end >= 0 else len(text)]
    terms = list(re.finditer(r"(?<=WHERE )[^;]*?(?= AND )|AND [^;]*?(?=\s+AND |;|\n|$)", statement))
    found = terms[int(number) - 1]
    cut = (found.start(), found.end())
    if not found[0].startswith("AND"):
        cut = (cut[0], cut[1] + len(" AND "))
    return text[:begin] + statement[: cut[0]] + statement[cut[1] :] + text[begin + len(statement) :]


# what a seed may draw

_QUIET = {"debug", "info", "warning", "error", "exception", "log", "emit_log"}
_SKIPPED = re.compile(r"__(repr|str|init_subclass|dir|class_getitem)__|_repr_\w+_|\w+\.setter")


def operators_of(function: Function) -> list[str]:
    """Return the operators that fit a function, in order; no two of the same effect."""
    if _SKIPPED.fullmatch(function.name) or _is_declared(function):
        return []
    counted: dict[tuple[str, str], int] = {}
    told = {id(node) for node in _told(function)}
    tests = {id(getattr(node, "test", None)) for node in preorder(function)}
    found: list[str] = []
    if isinstance(function.returns, ast.Constant) and function.returns.value is None:
        if len(function.body) > 2 and not any(isinstance(n, ast.Yield) for n in preorder(function)):
            found.append("early")
    for node in preorder(function):
        for kind, name, change in _fitting(node, id(node) in tests, function):
            number = counted[kind, name] = counted.get((kind, name), 0) + (change == "")
            if change and id(node) not in told:
                action, *more = change.split()
                spec = [action, kind, *([name] if name else []), str(number), *more]
                found.append(" ".join(spec))
    return found


def _is_declared(function: Function) -> bool:
    """Say whether it has no body of its own: a protocol's, an overload."""
    last = function.body[-1]
    return isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant)


def _told(function: Function) -> Iterator[ast.AST]:
    """Yield what only makes a message or a log line."""
    for node in preorder(function):
        is_log = isinstance(node, ast.Call) and _last(node.func) in _QUIET
        names = _targets(node)
        if is_log or isinstance(node, ast.JoinedStr | ast.Raise) or names == ["message"]:
            if isinstance(node, ast.Raise):
                yield from (one for one in preorder(node) if one is not node)
            else:
                yield from preorder(node)


def _fitting(node: ast.AST, is_test: bool, function: Function) -> Iterator[tuple[str, str, str]]:
    """Yield kind, name, and '' to count the node or a change of it."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "test", "", ""
        yield "test", "", "negate"
    elif isinstance(node, ast.comprehension):
        yield "test", "", ""
        if node.ifs:
            yield "test", "", "always"
    elif isinstance(node, ast.Compare):
        yield "compare", "", ""
        sign = _SIGN.get(type(node.ops[0]), "")
        if sign in _OTHER and (sign[0] in "<>" or not is_test):
            yield "compare", "", f"swap {_OTHER[sign]}"
    elif isinstance(node, ast.BoolOp):
        yield "bool", "", ""
        yield from (("bool", "", f"without {n + 1}") for n in range(len(node.values)))
    elif isinstance(node, ast.BinOp):
        yield "arith", "", ""
        sign = _SIGN.get(type(node.op), "")
        if sign in _OTHER and not _is_text(node):
            yield "arith", "", f"swap {_OTHER[sign]}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant", "", ""
        if isinstance(node.value, bool):
            yield "constant", "", f"set {not node.value}"
        else:
            yield "constant", "", "plus"
    elif isinstance(node, ast.Raise):
        yield "raise", "", ""
        yield "raise", "", "drop"
    yield from _of_names(node, function)


def _of_names(node: ast.AST, function: Function) -> Iterator[tuple[str, str, str]]:
    names = _targets(node)
    yield from (("assign", name, "") for name in names)
    kept = [name for name in names if "." in name or "[" in name or isinstance(node, ast.AugAssign)]
    if kept and function.name != "__init__" and " " not in kept[0]:
        yield "assign", kept[0], "drop"
    if isinstance(node, ast.Call) and (name := _last(node.func)):
        yield "call", name, ""
        if id(node) in _alone(function) and name not in _QUIET and name != "__init__":
            yield "call", name, "drop"
        elif name in {"min", "max"} and len(node.args) == 2:
            yield "call", name, "take 1"
            yield "call", name, "take 2"


def _alone(function: Function) -> set[int]:
    """Return the calls that are statements of their own."""
    calls = set()
    for node in preorder(function):
        if isinstance(node, ast.Expr):
            value = node.value.value if isinstance(node.value, ast.Await) else node.value
            calls.add(id(value))
    return calls


def _is_text(node: ast.BinOp) -> bool:
    texts = (ast.JoinedStr, ast.Tuple, ast.List, ast.Dict)
    sides = (node.left, node.right)
    return any(
        isinstance(one, texts)
        or (isinstance(one, ast.Constant) and not isinstance(one.value, int | float))
        for one in sides
    )
