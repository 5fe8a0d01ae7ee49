"""`import pytorch_lightning` means `lightning.pytorch`, which is the same library under another name.

Modules that are written for the one would not be LightningModules of the other, though nothing in them differs.
"""

import sys

import lightning.pytorch

_NAME, _MEANT = "pytorch_lightning", lightning.pytorch.__name__


def take_either_lightning() -> None:
    """Lets both names mean one library, in this process from now on; what was imported before stays what it is."""
    if _NAME not in sys.modules:
        for name, module in [*sys.modules.items()]:
            if name == _MEANT or name.startswith(f"{_MEANT}."):
                sys.modules[name.replace(_MEANT, _NAME, 1)] = module
