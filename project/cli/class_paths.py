"""The support of functions behind a class_path, which jsonargparse refuses without need, and the reason where there is none.

By itself it takes a function only if its signature names what it returns, gives it no arguments where something is still to
come (a schedule gets its optimiser later), and knows no argument that hides behind **kwargs, as those of timm.create_model do.
Here any function is taken, and who gets what it returns looks at that.
"""

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules, resolve_name
from typing import Any

from jsonargparse import Namespace
from jsonargparse import _typehints as hints
from jsonargparse._parameter_resolvers import get_signature_parameters
from jsonargparse._util import import_object

from project.errors import UserError
from project.tracebacks import Folded

START = [Path.cwd()]
"""The folder in which the command was given: while a config is read, the working directory is the config's."""

Original = Callable[..., Any]


def take_functions() -> None:
    """Lets jsonargparse take any function, in this process from now on. A version that is built otherwise stays as it is."""
    for name, replacement in (
        ("is_subclass_or_implements_protocol", _is_the_class),
        ("function_returns_subclass", _is_the_class),
        ("adapt_partial_callable_class", _with_what_comes_later),
        ("adapt_class_type", _with_all_arguments),
        ("import_object", _imported),
    ):
        original = getattr(hints, name, None)
        if original is not None and not isinstance(original, partial):
            setattr(hints, name, partial(replacement, original))


def _imported(original: Original, name: str, *args: object, **kwargs: object) -> object:
    """Returns the object that a class path names; an error names the wrong part and suggests a name."""
    try:
        return original(name, *args, **kwargs)
    except (ImportError, AttributeError) as error:
        raise ImportError(_missing(name, error)) from error
    except SyntaxError as error:
        place = f"{error.filename}, line {error.lineno}"
        raise ImportError(f"{name} can't be imported: {place}: {type(error).__name__}: {error.msg}") from error
    except (ValueError, OSError, MemoryError):  # the first is jsonargparse's, of what is no path at all
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()}"
        raise ImportError(f"{name} can't be imported: {Folded(error).where}: {reason}") from error


def _missing(path: str, error: Exception) -> str:
    """Returns which part of a class path can't be imported, and a hint."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        try:
            import_module(module)
        except ModuleNotFoundError as missing:
            if f"{module}.".startswith(f"{missing.name}."):
                continue
            package = (missing.name or "").partition(".")[0]
            place = Folded(missing).where
            return f"{module} can't be imported: {place}: {missing}. HINT: pip install {package}, if it is a package."
        except ImportError as broken:
            return f"{module} can't be imported: {Folded(broken).where}: {broken}."
        inner = [loaded for loaded in sys.modules if loaded.startswith(f"{module}.")] if end == len(parts) - 1 else []
        for place in sorted([module, *inner], key=len):
            guest = sys.modules.get(place)
            names = [name for name, value in vars(guest).items() if end < len(parts) - 1 or callable(value)]
            if near := _near(parts[end], names):
                return f"There is no {path}. Did you mean {'.'.join([place, near, *parts[end + 1 :]])}?"
        return f"There is no {path}: {error}."
    root = parts[0]
    if near := _near(root, [module.name for module in iter_modules([str(START[0])])]):
        if near != root:
            return f"There is no {path}, as there is no module {root}. Did you mean {'.'.join([near, *parts[1:]])}?"
        return f"There is no {path}: Python does not look in the working directory. HINT: set PYTHONPATH={START[0]}"
    places = {file.parent for pattern in ("*", "..") for file in START[0].glob(f"{pattern}/{root}.py")}
    start = (
        f"{root}.py is in {os.path.relpath(min(places), START[0])}: start there, or set PYTHONPATH={min(places).resolve()}"
        if places
        else (f"start where {root}.py is, or set PYTHONPATH to its folder; if it is a package: pip install {root}")
    )
    return f"There is no {path}, as there is no module {root}. HINT: {start}."


def _near(name: str, names: list[str]) -> str | None:
    """Returns the name that is nearest, whatever the case of its letters."""
    by_letters = {known.lower(): known for known in names if not known.startswith("_")}
    near = difflib.get_close_matches(name.lower(), by_letters, n=1)
    return by_letters[near[0]] if near else None


def _is_the_class(original: Original, value: object, *args: object) -> bool:
    return inspect.isfunction(value) or bool(original(value, *args))


def _with_what_comes_later(original: Original, wanted: Any, spec: Namespace) -> tuple[Namespace, set[int] | None]:
    """Returns the specification, and how many of the first arguments come later: what the wanted callable gets."""
    spec, later = original(wanted, spec)
    if later is None and inspect.isfunction(import_object(spec.class_path)):
        later = {len(wanted.__args__) - 1}
    return spec, later


class Refusal(BaseException):
    """Raised when a class that the configuration names can't be made. No Exception: jsonargparse would take it for a type that
    does not fit, and try the next one.
    """

    def __init__(self, class_path: str, arguments: Mapping[str, object], error: Exception) -> None:
        super().__init__(class_path)
        self.class_path, self.arguments, self.error = class_path, arguments, error

    @property
    def odd_arguments(self) -> dict[str, object]:
        """Returns the plain arguments that differ from their defaults; if the error names some, only those."""
        parameters: Mapping[str, inspect.Parameter] = {}
        with suppress(TypeError, ValueError):
            parameters = inspect.signature(resolve_name(self.class_path)).parameters
        odd: dict[str, object] = {
            name: value
            for name, value in self.arguments.items()
            if value is not None and isinstance(value, (bool, int, float, str, list, tuple))
            if name not in parameters or parameters[name].default != value
        }
        words = re.findall(r"-?[\w.]*\w", str(self.error))
        return {name: value for name, value in odd.items() if name in words or str(value) in words} or odd


def _with_all_arguments(
    original: Original, value: Namespace, serialize: bool, instantiate: bool, *args: Any, **kwargs: Any
) -> Any:
    """Passes on the arguments that only **kwargs can take, and raises a `Refusal` where a class can't be made."""
    value = _with_dict_kwargs(value)
    try:
        return original(value, serialize, instantiate, *args, **kwargs)
    except Exception as error:
        if not instantiate:
            raise
        given, cause = value.get("init_args"), error
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            cause = UserError(f"{value['class_path']} can't be called so: {error}. HINT: look at its arguments.")
        raise Refusal(value["class_path"], vars(given) if given else {}, cause) from error


def _with_dict_kwargs(value: Namespace) -> Namespace:
    """Returns a specification whose arguments that only **kwargs can take are what jsonargparse calls `dict_kwargs`."""
    known = _known(import_object(value["class_path"]))
    if known is None:
        return value
    given = value.get("init_args") or {}
    # From the command line there is one, a tuple of its name and its value.
    pairs = {given[0]: given[1]} if isinstance(given, tuple) else vars(given) if given else {}
    if more := {name: argument for name, argument in pairs.items() if name.split(".")[0] not in known}:
        value = value.clone()
        value["dict_kwargs"] = {**(value.get("dict_kwargs") or {}), **more}
        value["init_args"] = Namespace({name: argument for name, argument in pairs.items() if name not in more})  # type: ignore[no-untyped-call]
    return value


@cache  # where a class has no __init__, inspect touches all modules: 3,000 pages that a forked rank would copy
def _known(guest: Any) -> set[str] | None:
    """Returns the arguments in its signature, if it also takes others that can't be determined; otherwise None."""
    try:
        parameters = inspect.signature(guest).parameters.values()
    except (TypeError, ValueError):
        return None
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    names = {parameter.name for parameter in parameters}
    resolved = {parameter.name for parameter in get_signature_parameters(guest, None)}
    return None if resolved - names else names
