"""The parser: reads flags and configs, prints them, and reports errors in them."""

import argparse
import difflib
import inspect
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning_utilities.core.enums import StrEnum

from project.cli.class_paths import Refusal
from project.cli.complaints import complaint
from project.cli.keys import class_paths
from project.cli.verbs import MATTERS, refuse_verb, verb_page
from project.config_files import SECTIONS, documents, option
from project.errors import FaultError, UserError
from project.masking import masked
from project.survive.failure import cause_of
from project.typed import typed
from project.untrusted import compose_yaml, dump_yaml, printable, read_yaml, write_text

log = logging.getLogger(__name__)


class SaveConfig(Callback):
    """Writes config.yaml when training begins, and not before: it records what was trained, and runs again as it is."""

    def __init__(self, config: Mapping[str, object] | None) -> None:
        self.config = config

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Names the folder of a run that crashes before it trains, too: its log stays. One that is refused leaves none."""
        if not typed(trainer).fast_dev_run and cause_of(exception).traceback:
            with suppress(FaultError):
                self.on_train_start(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or self.config is None:
            return
        folder = Path(trainer.default_root_dir)
        if not (folder / "config.yaml").exists():
            log.info("Run: %s", folder)
        if not typed(trainer).fast_dev_run:
            save_config(folder, self.config)


def save_config(folder: Path, config: Mapping[str, object]) -> None:
    """Writes config.yaml, whole or not at all."""
    mode = 0o666 if masked(config) == config else 0o600
    try:
        write_text(folder / "config.yaml", dump_yaml(config), mode)
    except OSError as error:
        raise FaultError(
            f"{folder / 'config.yaml'} can't be written: {error}. HINT: make room, or move away what lies there."
        ) from error


def brought(argv: list[str]) -> tuple[bool, bool]:
    """Returns whether the user's own LightningModule and LightningDataModule are named, by the configs or on the command line.

    A module of one's own may have its loaders itself: then there is no `data`, and that is the user's own, too.
    """
    sections = documents(argv)

    def named(key: str) -> bool:
        values = [section.get(key) for section in sections]
        in_config = any(isinstance(value, str) or (isinstance(value, dict) and "class_path" in value) for value in values)
        return in_config or option(argv, f"--{key}", f"--{key}.class_path") is not None

    model = named("model")
    data_at_all = any(section.get("data") for section in sections) or any(argument.startswith("--data.") for argument in argv)
    return model, named("data") or (model and not data_at_all)


# The parser ----------------------------------------------------------------------------------------------------------

_LIBRARIES = ("project.", "torch.", "torchvision.", "torchmetrics.", "lightning.", "pytorch_lightning.")
_PURE = (
    *("project.", "torch.nn.", "torch.optim.", "torchvision.models.", "torchvision.transforms."),
    *("lightning.pytorch.callbacks.", "pytorch_lightning.callbacks."),
)
_UNWRITABLE = "Unable to serialize instance"
_LONGEST_VALUE = 60  # characters of an argument
_SHORT_SECTION = 12  # keys
_LEARNING_RATE = re.compile(r"(?:^|[._])(?:lr|learning_rate)(?:_[a-z]+)?$")


class HelpAll(argparse._HelpAction):
    """The flag --help_all, which shows every key there is."""

    def __call__(self, parser: Any, *args: object, **kwargs: object) -> None:
        print(LightningArgumentParser.format_help(parser), end="")
        parser.exit()


# Defaults of Lightning's classes (Timer's interval), for which YAML has no form of its own.
yaml.representer.SafeRepresenter.add_multi_representer(StrEnum, lambda dumper, value: dumper.represent_str(value.value))


class Parser(LightningArgumentParser):
    """A parser that reports an error without listing all flags, and accepts no abbreviated flags."""

    configs: list[Path] = []  # noqa: RUF012, because the verbs' parsers share it: those that were named, bases first

    build: Callable[[Callable[[], Any]], Any] | None = None
    """Calls the function that makes all objects of a configuration."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def instantiate_classes(self, *args: Any, **kwargs: Any) -> Any:
        make = partial(super().instantiate_classes, *args, **kwargs)
        return make() if self.build is None else self.build(make)

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """Leaves out defaults that have no YAML form (functions, say): with what is left, the result is the same."""
        text: str = super().dump(*args, **kwargs)
        if _UNWRITABLE not in text:
            return text
        return dump_yaml(_writable(yaml.safe_load(text)))

    def format_help(self, *args: Any) -> str:
        """Returns the help; of a verb, a page with what matters."""
        actions = {action.dest: action for action in self._actions}
        if "trainer.max_epochs" not in actions:
            return str(super().format_help(*args))
        known = {key: (self.get_default(key), actions[key].help or "") for key in MATTERS if key in actions}
        return verb_page(self.prog.replace(" [options]", "").rpartition(" ")[2], known)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        raise UserError(self._plain(message))

    def _plain(self, message: str) -> str:
        """Returns what is wrong, in a line."""
        keys = re.findall(r"does not accept option '([\w.]+)'", message)
        if message.startswith("unrecognized arguments: "):
            keys = re.findall(r"--([\w.]+)", message)
            if not keys:
                return f"{message}. HINT: a config is named by --config FILE, a key by --KEY VALUE."
        if keys:
            return " ".join(self._unknown(key, self._keys()) for key in keys)
        if choice := re.match(r"argument subcommand: invalid choice: '([^']+)' \(choose from (.*)\)", message):
            refuse_verb(choice[1])
        match = re.match(r'Parser key "([\w.]+)"', message)
        if not match:
            return message.strip()
        key = match[1]
        if wrong := re.search(r"Option '(\w+)' is not accepted", message):
            classes = re.findall(r"class_path[ ']*[=:]?[ ']+([\w.]+)'", message)
            return self._unknown(f"{key}.init_args.{wrong[1]}", _arguments(key, classes))
        inner, text = complaint(message)
        full = f"{key}.{inner}".strip(".") if inner != key else key
        if nested := re.search(r"it is NestedArg\(key='([^']+)'", text):
            return self._unknown(f"{full}.{nested[1]}", self._keys())
        if named := re.search(r"as in module\.(\w+)", text):
            text = f"{text}{_meant(named[1], [path.rpartition('.')[2] for path in class_paths()])}"
        return f"{self._where(full)}{full}: {text}"

    def placed(self, text: str) -> str:
        """Returns a text about settings with the flag or the line that has the first of them that the text names."""
        words = {*re.findall(r"[\w.]+\w", text)}
        if text.startswith("The trainer's settings"):  # what follows is Lightning's, which names arguments of its Trainer
            words |= {f"trainer.{name}" for name in re.findall(r"\w+", text)}
        keys = (key for key in self._keys() if (key in words and "." in key) or text.startswith(f"{key}="))
        named = sorted((text.find(key.removeprefix("trainer.")), key) for key in keys)
        for _, key in named:
            if where := self._where(key):
                return f"{where.removesuffix(': ')}{key * where.startswith('--')}: {text}"
        return text

    def refused(self, config: Namespace, refusal: Refusal) -> str:
        """Returns which setting a class refuses, in a line. `config`: the verb's, resolved."""
        odd, error = refusal.odd_arguments, refusal.error
        text = f"{type(error).__name__}: {str(error).strip() or 'no reason given'}"
        made = f"{refusal.class_path} can't be made"
        if odd:
            values = ", ".join(f"{name}={printable(repr(value), _LONGEST_VALUE)}" for name, value in odd.items())
            made = f"{refusal.class_path} can't be made of {values}"
        key = next((key for key, value in _named_classes(config) if value == (refusal.class_path, refusal.arguments)), "")
        if not key:
            return f"{made}: {text}"
        full = f"{key}.init_args.{next(iter(odd))}" if len(odd) == 1 else key
        return f"{self._where(full)}{full}: {made}: {text}. HINT: --{key}.help {refusal.class_path} lists its arguments."

    def refuse_odd_floats(self, config: Namespace) -> None:
        """Refuses nan, and an infinite learning rate, but in the arguments of the user's own classes, which may mean them."""
        named = _named_classes(config)
        own = tuple(f"{key}.init_args." for key, (path, _) in named if not path.startswith(_LIBRARIES))
        for key, number in _floats(config):
            if not key.startswith(own) and (math.isnan(number) or (math.isinf(number) and _LEARNING_RATE.search(key))):
                raise UserError(f"{self._where(key)}{key}={number:g} is of no use to a run. HINT: write a finite number.")

    def _unknown(self, key: str, known: Iterable[str]) -> str:
        return f"{self._where(key).removeprefix('--')}There is no key {key}{_meant(key, known) or '.'}"

    def _where(self, key: str) -> str:
        """Returns the flag, or the config and the line in it, that sets something under a key."""
        parts = key.split(".")
        around = [parts[:end] for end in range(len(parts), 0, -1)]  # or what it stands under
        for place in around:
            name = ".".join(place)
            short = name.replace(".init_args", "")  # may be left out
            if place[-1] != "init_args" and option(sys.argv, f"--{name}", f"--{short}") is not None:
                return "--" if name == key else f"--{name}: "
        for place in around:
            for path in reversed(self.configs):
                if line := _line(compose_yaml(path), place):
                    return f"{path}, line {line}: "
        return ""

    def _keys(self) -> list[str]:
        parsers = [self]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
        return [action.dest for parser in parsers for action in parser._actions]


def refuse_odd_sections(configs: Iterable[Path]) -> None:
    """Refuses a section that is a number or a list, which would be taken for a class's arguments."""
    for path in configs:
        sections = read_yaml(path) or {}
        for name, value in sections.items():
            by_class = name in ("model", "data") and isinstance(value, str)
            # A module of the user's own may bring its loaders: its run's config.yaml has no data.
            own = isinstance(sections.get("model"), dict) and "class_path" in sections["model"]
            without = name == "data" and value is None and own
            if name not in SECTIONS or isinstance(value, dict) or by_class or without:
                continue
            line = _line(compose_yaml(path), [name])
            raise UserError(
                f"{path}, line {line}: {name} holds keys and values, as in '{name}: {{KEY: VALUE}}', and it is {value!r}."
            )


def _line(node: yaml.Node | None, parts: list[str]) -> int | None:
    """Returns the line in a YAML document that sets something under a key; of a list, the first entry that does."""
    if isinstance(node, yaml.SequenceNode):
        return next((line for entry in node.value if (line := _line(entry, parts))), None)
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if name.value == parts[0]:
            return _line(value, parts[1:]) if parts[1:] else int(name.start_mark.line) + 1
    return None


def _settings_of(value: object) -> Mapping[str, object]:
    """Returns what a section of a configuration, or a dictionary in it, holds; nothing for a plain value."""
    return vars(value) if isinstance(value, Namespace) else value if isinstance(value, dict) else {}


def _named_classes(value: object, key: str = "") -> Iterator[tuple[str, tuple[str, Mapping[str, object]]]]:
    """Yields the classes that a configuration names, with their arguments, each after its key."""
    settings = _settings_of(value)
    if isinstance(value, Namespace) and "class_path" in settings:
        given = settings.get("init_args")
        yield key, (str(settings["class_path"]), vars(given) if given else {})
    for name, inner in settings.items():
        yield from _named_classes(inner, f"{key}.{name}".strip("."))
    for entry in value if isinstance(value, (list, tuple)) else ():
        yield from _named_classes(entry, key)


def touches_nothing(config: Namespace) -> bool:
    """Returns whether to make the objects of a configuration touches nothing else: all classes are of libraries that are known
    for it. A class of the user's may write a file, or read one that changes while the run trains.
    """
    return all(path.startswith(_PURE) for _, (path, _) in _named_classes(config))


def _floats(value: object, key: str = "") -> Iterator[tuple[str, float]]:
    """Yields the floats of a configuration, each after its key."""
    for name, inner in _settings_of(value).items():
        yield from _floats(inner, f"{key}.{name}".strip("."))
    for entry in value if isinstance(value, (list, tuple)) else ():
        yield from _floats(entry, key)
    if isinstance(value, float):
        yield key, value


def _writable(value: object) -> object:
    if isinstance(value, dict):
        return {k: _writable(v) for k, v in value.items() if not str(v).startswith(_UNWRITABLE)}
    return value


def _meant(name: str, known: Iterable[str]) -> str:
    """Returns a suggestion for a misspelt name; otherwise lists the keys of a class or of a short section."""
    place, _, last = name.rpartition(".")
    beside = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == place]
    if near := difflib.get_close_matches(last, beside, n=1):
        return f". Did you mean {place}{'.' * bool(place)}{near[0]}?"
    elsewhere = [key for key in known if not name.startswith(f"{key}.")]
    if near := difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.7 if place else 0.6):
        return f". Did you mean {near[0]}?"
    listed = beside and (place.endswith("init_args") or (place and len(beside) <= _SHORT_SECTION))
    return f". There are: {', '.join(beside)}." if listed else ""


def _arguments(key: str, classes: list[str]) -> list[str]:
    """Returns the keys of a class's arguments, of those that an error message names."""
    names: list[str] = []
    for path in classes:
        with suppress(ImportError, AttributeError, ValueError, TypeError):
            names += inspect.signature(resolve_name(path)).parameters
    return [f"{key}.init_args.{name}" for name in names if name not in ("params", "kwargs", "args")]
