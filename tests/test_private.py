"""Holds the list of what is touched of Lightning's and torch's insides, docs/dev/private_names.md: it only becomes shorter.

- A private name is imported, subclassed, overridden, read from an object that is not `self`, or spelt in a string that stands
  for an attribute.
- An override redefines a private method of theirs, or a public method of one of Lightning's private classes.
- A patch replaces a method or an attribute of theirs, or plants one there, from outside.

Print all of them by file: python -m tests.test_private. Write what of the page follows from the code: add `write`.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from tests.conftest import ROOT

PACKAGE = ROOT / "project"
PAGE = ROOT / "docs/dev/private_names.md"
LIMIT = 144
"""Names, overrides and patches together: this number may only go down. The goal is 40."""
LIBRARIES = ("lightning", "torch")
WHERE_TORCH_DEFINES = ("nn", "optim", "amp", "distributed", "utils/data", "utils/tensorboard")
OF_OTHERS = {
    "_actions": "argparse",
    "_file_name": "tensorboard",
    "_generator": "tensorboard",
    "_async_writer": "tensorboard",
    "_writer": "tensorboard",
}
"""Read from an object that the text does not tell the library of."""
PRIVATE = re.compile(r"_[A-Za-z]\w*")
DEFINED = re.compile(
    r"\b(?:def|class) (_[A-Za-z]\w*)|\bself\.(_[A-Za-z]\w*)\s*(?::|=[^=])|^\s*(_[A-Za-z]\w*)\s*(?::|=[^=])", re.M
)
ROW = re.compile(r"^\| `(_\w+)` \| (.*?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
PATCH = re.compile(r"^\| `([^`]+)` \| `([\w/]+\.py)` \| (.*?) ?\|$", re.MULTILINE)

Touched = dict[str, set[str]]
"""By name, the files of project/ that touch it."""


def defined(text: str) -> set[str]:
    return {name for names in DEFINED.findall(text) for name in names if name}


@cache
def library_names() -> set[str]:
    """What Lightning, and the parts of torch that are used here, define."""
    places = [Path(str(importlib.import_module("lightning").__file__)).parent]
    torch = Path(str(importlib.import_module("torch").__file__)).parent
    places += [torch / part for part in WHERE_TORCH_DEFINES]
    return {name for place in places for file in place.rglob("*.py") for name in defined(file.read_text())}


@cache
def package_names() -> set[str]:
    return {name for file in PACKAGE.rglob("*.py") for name in defined(file.read_text())}


def _of_the_libraries(name: str) -> bool:
    return name not in OF_OTHERS and (name in library_names() or name not in package_names())


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except OSError:  # torch.Tensor says that it is defined elsewhere than it is
        return ""


def imported(name: str) -> ModuleType | None:
    """Returns a module; None where it needs Ray, which has none of these, and which scripts/test installs for --all alone."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        return None


class Reader(ast.NodeVisitor):
    """Finds the private names in a file that are not its own."""

    def __init__(self, tree: ast.Module) -> None:
        self.names: set[str] = set()
        self.imported: dict[str, tuple[str, str | None]] = {}  # local name: module, and the name in it
        self.inherited: set[str] = set()  # of the class at hand
        self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.partition(".")[0]
            self.imported[alias.asname or root] = (alias.name if alias.asname else root, None)
            self._module(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        self._module(module)
        for alias in node.names:
            self.imported[alias.asname or alias.name] = (module, alias.name)
            if module.partition(".")[0] in LIBRARIES and PRIVATE.fullmatch(alias.name):
                self.names.add(alias.name)

    def _module(self, name: str) -> None:
        if name.partition(".")[0] in LIBRARIES:
            self.names |= {part for part in name.split(".") if PRIVATE.fullmatch(part)}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.inherited = self.inherited, {name for base in node.bases for name in self._private_of(base)}
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                self._own(statement.name)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                    self._own(ast.unparse(target))
        self.generic_visit(node)
        self.inherited = outer

    def _private_of(self, base: ast.expr) -> set[str]:
        """What the classes of Lightning and torch behind a base define."""
        name, _, attribute = ast.unparse(base).partition("[")[0].partition(".")
        if name not in self.imported:
            return set()
        module, member = self.imported[name]
        if module.partition(".")[0] == "ray" or imported(module) is None:
            return set()
        value = imported(module)
        for part in [part for part in (member, *attribute.split(".")) if part]:
            value = getattr(value, part)
        kinds = [kind for kind in getattr(value, "__mro__", ()) if kind.__module__.partition(".")[0] in LIBRARIES]
        return {name for kind in kinds for name in defined(_source(kind)) | vars(kind).keys()}

    def _own(self, name: str) -> None:
        if PRIVATE.fullmatch(name) and name in self.inherited:
            self.names.add(name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if PRIVATE.fullmatch(node.attr):
            of = ast.unparse(node.value)
            if of in ("self", "cls", "super()"):
                self._own(node.attr)
            elif self._is_theirs(of.partition(".")[0], node.attr):
                self.names.add(node.attr)
        self.generic_visit(node)

    def _is_theirs(self, root: str, name: str) -> bool:
        module = self.imported.get(root, ("", None))[0].partition(".")[0]
        if module and module not in (*LIBRARIES, "project"):
            return False
        return _of_the_libraries(name)

    def _text(self, *nodes: ast.expr | None) -> None:
        """A string that stands for an attribute."""
        for node in nodes:
            for part in node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]:
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and PRIVATE.fullmatch(part.value):
                    self.names |= {part.value} if _of_the_libraries(part.value) else set()

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        if called.endswith(("getattr", "setattr", "hasattr", "delattr", ".get", ".pop")):
            self._text(*node.args)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._text(node.slice)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        self._text(node.left)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        self._text(*node.keys)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._text(node.iter)
        self.generic_visit(node)


def files() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        yield str(file.relative_to(PACKAGE)), ast.parse(file.read_text())


def touched() -> Touched:
    places: Touched = defaultdict(set)
    for place, tree in files():
        for name in Reader(tree).names:
            places[name].add(place)
    return dict(places)


# Overrides -------------------------------------------------------------------------------------------------------------


def overrides() -> Touched:
    """Returns the overridden methods, as `Ours(Theirs).method`, with their file."""
    places: Touched = defaultdict(set)
    for file in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if file.stem == "__main__":
            continue
        module = imported(name)
        for class_name, kind in vars(module).items() if module else ():
            if isinstance(kind, type) and kind.__module__ == name:
                for method in _overridden(kind):
                    places[f"{class_name}{method}"].add(str(file.relative_to(PACKAGE)))
    return dict(places)


def _overridden(kind: type) -> Iterator[str]:
    """Yields a class's overrides, as `(Theirs).method`."""
    bases = [base for base in kind.__mro__[1:] if base.__module__.partition(".")[0] in LIBRARIES]
    for name, value in vars(kind).items():
        if name.startswith("__") or not (callable(value) or isinstance(value, (property, staticmethod, classmethod))):
            continue
        owners = [base for base in bases if name in vars(base)]
        hidden = [base for base in owners if base.__name__.startswith("_") and base.__module__.startswith("lightning")]
        if owners and name.startswith("_"):
            yield f"({owners[0].__name__}).{name}"
        elif hidden:
            yield f"({hidden[0].__name__}).{name}"


# Patches ---------------------------------------------------------------------------------------------------------------


@cache
def their_methods() -> set[str]:
    """Returns the public names of functions and methods that Lightning and the parts of torch define."""
    places = [Path(str(importlib.import_module(name).__file__)).parent for name in ("lightning.pytorch", "lightning.fabric")]
    torch = Path(str(importlib.import_module("torch").__file__)).parent
    files = [file for place in (*places, torch / "nn", torch / "optim", torch / "utils/data") for file in place.rglob("*.py")]
    files += (torch / "profiler").glob("*.py")
    return {name for file in files for name in re.findall(r"\bdef ([a-z]\w*)\(self", file.read_text())}


class Patches(ast.NodeVisitor):
    """Finds the assignments by which a file changes objects, classes and modules of Lightning and torch."""

    def __init__(self, tree: ast.Module) -> None:
        self.targets: set[str] = set()
        self.modules = {
            alias.asname or alias.name: node.module or ""
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        self.modules |= {
            alias.asname or alias.name.partition(".")[0]: alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        self.functions = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        self.functions |= {name for name, module in self.modules.items() if module.startswith("project.") and name.islower()}
        self.visit(tree)

    def _library(self, node: ast.expr) -> str:
        """Returns the library from which the first name of an expression was imported; '' of any other name."""
        return self.modules.get(re.split(r"\W", ast.unparse(node))[0], "").partition(".")[0]

    def _is_function(self, value: ast.expr | None) -> bool:
        if isinstance(value, ast.Call):
            return ast.unparse(value.func) in ("partial", "staticmethod")
        if isinstance(value, ast.Attribute) and ast.unparse(value.value) not in ("self", "cls"):
            return False
        return isinstance(value, ast.Lambda) or ast.unparse(value or ast.Constant("")).rpartition(".")[2] in self.functions

    def _target(self, target: ast.expr, value: ast.expr | None, deleted: bool = False) -> None:
        for part in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
            if isinstance(part, ast.Attribute):
                on, library = ast.unparse(part.value), self._library(part.value)
                if on in ("self", "cls") or library not in ("", "project", *LIBRARIES):
                    continue
                method = part.attr in their_methods() and (deleted or self._is_function(value))
                private = bool(PRIVATE.fullmatch(part.attr)) and _of_the_libraries(part.attr)
                if method or private or part.attr == "__class__" or library in LIBRARIES:
                    self.targets.add(f"{on}.{part.attr}")
            elif isinstance(part, ast.Subscript) and self._is_vars(part.value):
                self.targets.add(ast.unparse(part))

    @staticmethod
    def _is_vars(node: ast.expr) -> bool:
        """Returns whether an expression is another object's attributes as a dict."""
        text = ast.unparse(node)
        return (text.startswith("vars(") or text.endswith(".__dict__")) and text not in ("self.__dict__", "vars(self)")

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._target(target, node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._target(node.target, node.value)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._target(target, None, deleted=True)

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        if called.endswith(".update") and isinstance(node.func, ast.Attribute):
            changed = node.args[0] if called == "dict.update" and node.args else node.func.value
            if self._is_vars(changed):
                self.targets.add(f"{ast.unparse(changed)}[...]")
        elif called in ("setattr", "object.__setattr__"):
            on = ast.unparse(node.args[0])
            if on not in ("self", "cls") and self._library(node.args[0]) in ("", "project", *LIBRARIES):
                self.targets.add(f"setattr({on}, {ast.unparse(node.args[1])})")
        self.generic_visit(node)


def patches() -> set[tuple[str, str]]:
    """Returns the patched attributes, each with its file."""
    return {(target, place) for place, tree in files() for target in Patches(tree).targets}


# The page --------------------------------------------------------------------------------------------------------------


def is_private(touched: str) -> bool:
    """Returns whether an override or a patch is of a private name, which counts among the names already."""
    return bool(re.search(r"(\.|\[')_[A-Za-z]\w*('\])?$", touched))


def total() -> int:
    """Returns how many names, overrides and patches there are, each counted once."""
    public = [name for name in overrides() if not is_private(name)] + [name for name, _ in patches() if not is_private(name)]
    return len(touched()) + len(public)


def counts() -> str:
    names, overridden, patched = touched(), overrides(), patches()
    places = {place for group in (*names.values(), *overridden.values()) for place in group} | {place for _, place in patched}
    elsewhere = [place for place in places if place.split("/")[0] not in ("step", "sharded", "trainer.py")]
    of_private = [sum(map(is_private, overridden)), sum(is_private(name) for name, _ in patched)]
    return (
        f"**{len(names)} names, {len(overridden)} overrides and {len(patched)} patches: {total()} together**, as "
        f"{of_private[0]} of the overrides and {of_private[1]} of the patches are of private names. They are in {len(places)} "
        f"files, {len(elsewhere)} of them outside `step/`, `sharded/` and `trainer.py`. The aim is 40 together, there alone."
    )


def written(page: str) -> str:
    """Returns the page with counts, places and lists as the code has them. Of what is new, the reason is left empty."""
    names = touched()

    def row(match: re.Match[str]) -> str:
        if match[1] not in names:
            return ""
        return f"| `{match[1]}` | {', '.join(f'`{place}`' for place in sorted(names[match[1]]))} | {match[3]} | {match[4]} |\n"

    reasons = {(target, place): reason for target, place, reason in PATCH.findall(page)}
    patched = [
        f"| `{name}` | `{place}` | {reasons.get((name, place), '')} |\n" for name, place in sorted(patches(), key=_place_first)
    ]
    methods: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, places in overrides().items():
        kind, _, method = name.rpartition(".")
        methods[min(places), kind].append(method)
    overridden = [
        f"| `{kind}` | `{place}` | {', '.join(f'`{name}`' for name in sorted(listed))} |\n"
        for (place, kind), listed in sorted(methods.items())
    ]
    page = re.sub(ROW.pattern + "\n", row, page, flags=re.MULTILINE)
    page = re.sub(r"\*\*\d+ names.*?there alone\.", "\n".join(textwrap.wrap(counts(), 128)), page, flags=re.DOTALL)
    page = re.sub(r"(\| class \|.*\n\|.*\n)(\|.*\n)*", lambda head: head[1] + "".join(overridden), page)
    return re.sub(r"(\| patch \|.*\n\|.*\n)(\|.*\n)*", lambda head: head[1] + "".join(patched), page)


def _place_first(patch: tuple[str, str]) -> tuple[str, str]:
    return patch[1], patch[0]


def test_the_page_is_what_the_code_is():
    page = PAGE.read_text()
    assert touched().keys() - {name for name, *_ in ROW.findall(page)} == set(), "write a row for each, with its reason"
    assert written(page) == page, "run python -m tests.test_private write"
    reasons = PATCH.findall(page)
    assert [f"{target} in {place}" for target, place, reason in reasons if not reason] == [], "write why each is there"


def test_fewer_and_fewer_are_touched():
    assert total() <= LIMIT, "see python -m tests.test_private"


def test_each_way_to_a_private_name_is_seen():
    text = """
import torch
from torch.nn import Module
from torch._dynamo import anything
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch import Trainer

class Mine(Trainer):
    _data_connector = None
    def _run(self): return self._signal_connector, self._of_my_own

def look(x: Trainer) -> None:
    torch._foreach_add_([], [])
    x.loop._combined_loader
    getattr(x, "_precision_plugin", None), vars(x)["_results"], "_backward_sync" in vars(x), {"_should": 1}
    for name in ("_trainer", "public"): pass
    f"limit_{x}_batches"
"""
    expected = (
        "_dynamo _FitLoop _data_connector _run _signal_connector _foreach_add_ _combined_loader _precision_plugin _results"
    )
    assert Reader(ast.parse(text)).names == {*expected.split(), "_backward_sync", "_should", "_trainer"}


def test_each_way_to_patch_is_seen():
    text = """
import json
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.distributed import elastic

def ours(): pass

def plant(trainer: Trainer, module, x) -> None:
    LightningModule.log = ours
    elastic.pickle, json.loads = ours, ours
    trainer.strategy.backward = partial(ours, 1)
    trainer.should_stop = x.weight = True
    module.__dict__["cpu"] = lambda: module
    vars(torch.nn.init).update({})
    dict.update(vars(torch.nn.functional), {})
    setattr(trainer, x, 1), setattr(json, x, 1)
    x._results = None
    x.__class__ = Trainer
    x.forward = x
"""
    expected = {"LightningModule.log", "elastic.pickle", "trainer.strategy.backward", "module.__dict__['cpu']"}
    expected |= {
        "vars(torch.nn.init)[...]",
        "vars(torch.nn.functional)[...]",
        "setattr(trainer, x)",
        "x._results",
        "x.__class__",
    }
    assert Patches(ast.parse(text)).targets == expected


if __name__ == "__main__":
    if "write" in sys.argv:
        PAGE.write_text(written(PAGE.read_text()))
    by_file: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for what, entries in (("names", touched()), ("overrides", overrides())):
        for name, places in entries.items():
            for place in places:
                by_file[place][what].append(name)
    for name, place in patches():
        by_file[place]["patches"].append(name)
    for place in sorted(by_file):
        for what, names in by_file[place].items():
            print(f"{place}: {len(names)} {what}: {', '.join(sorted(names))}")
    print(counts().replace("*", "").replace("`", ""))
