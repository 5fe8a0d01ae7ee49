"""Which private names of Lightning and torch are touched, and where: those of the table in docs/architecture.md, and no others.

A private name is imported, subclassed, overridden, read from an object that is not `self`, or spelt in a string that stands for
an attribute. Print the list with: python -m tests.test_private
"""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = ROOT / "project"
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

Touched = dict[str, set[str]]
"""By name, the files of project/ that touch it."""


def defined(text: str) -> set[str]:
    return {name for names in DEFINED.findall(text) for name in names if name}


@cache
def theirs() -> set[str]:
    """What Lightning, and the parts of torch that are used here, define."""
    places = [Path(str(importlib.import_module("lightning").__file__)).parent]
    torch = Path(str(importlib.import_module("torch").__file__)).parent
    places += [torch / part for part in WHERE_TORCH_DEFINES]
    return {name for place in places for file in place.rglob("*.py") for name in defined(file.read_text())}


@cache
def ours() -> set[str]:
    return {name for file in PACKAGE.rglob("*.py") for name in defined(file.read_text())}


def _of_the_libraries(name: str) -> bool:
    return name not in OF_OTHERS and (name in theirs() or name not in ours())


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except OSError:  # torch.Tensor says that it is defined elsewhere than it is
        return ""


class Reader(ast.NodeVisitor):
    """Finds the private names in a file that are not its own."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: set[str] = set()
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
                self.found.add(alias.name)

    def _module(self, name: str) -> None:
        if name.partition(".")[0] in LIBRARIES:
            self.found |= {part for part in name.split(".") if PRIVATE.fullmatch(part)}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.inherited = self.inherited, {name for base in node.bases for name in self._private_of(base)}
        for one in node.body:
            if isinstance(one, ast.FunctionDef):
                self._own(one.name)
            elif isinstance(one, (ast.Assign, ast.AnnAssign)):
                for target in one.targets if isinstance(one, ast.Assign) else [one.target]:
                    self._own(ast.unparse(target))
        self.generic_visit(node)
        self.inherited = outer

    def _private_of(self, base: ast.expr) -> set[str]:
        """What the classes of Lightning and torch behind a base define."""
        name, _, attribute = ast.unparse(base).partition("[")[0].partition(".")
        if name not in self.imported:
            return set()
        module, member = self.imported[name]
        if module.partition(".")[0] == "ray":  # may not be installed, and has none of these
            return set()
        found = importlib.import_module(module)
        for part in [one for one in (member, *attribute.split(".")) if one]:
            found = getattr(found, part)
        kinds = [one for one in getattr(found, "__mro__", ()) if one.__module__.partition(".")[0] in LIBRARIES]
        return {name for kind in kinds for name in defined(_source(kind)) | vars(kind).keys()}

    def _own(self, name: str) -> None:
        if PRIVATE.fullmatch(name) and name in self.inherited:
            self.found.add(name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if PRIVATE.fullmatch(node.attr):
            of = ast.unparse(node.value)
            if of in ("self", "cls", "super()"):
                self._own(node.attr)
            elif self._is_theirs(of.partition(".")[0], node.attr):
                self.found.add(node.attr)
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
                    self.found |= {part.value} if _of_the_libraries(part.value) else set()

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
    found: Touched = defaultdict(set)
    for place, tree in files():
        for name in Reader(tree).found:
            found[name].add(place)
    return dict(found)


def table() -> Touched:
    rows = ROW.findall((ROOT / "docs/architecture.md").read_text())
    return {name: set(re.findall(r"`([\w/]+\.py)`", where)) for name, where, _, _ in rows}


def test_the_table_has_every_private_name_and_no_other():
    found, said = touched(), table()
    assert found.keys() - said.keys() == set(), "touched, and not in the table of docs/architecture.md"
    assert said.keys() - found.keys() == set(), "in the table, and not touched any more: take the row out"
    assert {name: sorted(places) for name, places in said.items()} == {name: sorted(found[name]) for name in said}


def test_the_count_is_what_the_page_says():
    rooms = {place for places in touched().values() for place in places}
    elsewhere = sorted(place for place in rooms if not place.startswith("train/") and place != "trainer.py")
    text = " ".join((ROOT / "docs/architecture.md").read_text().split())
    assert f"**{len(touched())} names in {len(rooms)} files**" in text
    assert f"{len(elsewhere)} of the files lie outside `train/` and `trainer.py`" in text


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
    assert Reader(ast.parse(text)).found == {*expected.split(), "_backward_sync", "_should", "_trainer"}


if __name__ == "__main__":
    names = touched()
    for file in sorted({place for places in names.values() for place in places}):
        here = sorted(name for name, places in names.items() if file in places)
        print(f"{file} ({len(here)}): {', '.join(here)}")
    print(f"{len(names)} names")
