"""`import pytorch_lightning` means `lightning.pytorch`, which is the same library under another name.

Modules that are written for the one would not be LightningModules of the other, though nothing in them differs.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_NAME, _MEANT = "pytorch_lightning", "lightning.pytorch"


class _SameModule(Loader):
    """Loads the module of the other name unchanged."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(spec.name.replace(_NAME, _MEANT, 1))
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _SameModule()) if fullname.partition(".")[0] == _NAME else None


def take_either_lightning() -> None:
    """Makes both names refer to one library in this process; modules imported before stay unchanged."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
