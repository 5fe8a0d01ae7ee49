"""Installs tests.standin.emulate as soon as torch is imported: Python runs a file of this name at its start."""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder(MetaPathFinder):
    _asks_others = False

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch" or self._asks_others:
            return None
        self._asks_others = True
        spec = importlib.util.find_spec("torch")
        self._asks_others = False
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            from tests.standin import emulate

            emulate.install()

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
