"""`import pytorch_lightning` means `lightning.pytorch`, which is the same library under another name.

Modules that are written for the one would not be LightningModules of the other, though nothing in them differs.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from lightning.pytorch import LightningModule

from project.errors import UserError

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


def refuse_other_lightning(model: object) -> None:
    """Raises a UserError for a module of the other name's own library, which was imported before this project's Trainer."""
    kind = getattr(sys.modules.get(_NAME), "LightningModule", None)
    if isinstance(kind, type) and isinstance(model, kind) and not isinstance(model, LightningModule):
        raise UserError(
            f"{type(model).__name__} is a LightningModule of pytorch_lightning, and this is lightning.pytorch's Trainer. HINT: "
            "from project import Trainer first, before the import of the library that has it: then both names mean one."
        )
