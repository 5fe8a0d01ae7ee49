"""The parser: flags and configs, what is shown of them, and what is reported where they are wrong."""

import argparse
import difflib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning_utilities.core.enums import StrEnum

from project.cli.complaints import complaint
from project.config_files import documents, option
from project.errors import SettingError, UserError
from project.masking import masked
from project.typed import typed
from project.untrusted import compose_yaml, read_yaml, write_text


class SaveConfig(Callback):
    """Writes config.yaml when training begins, and not before: it records what was trained, and runs again as it is."""

    def __init__(self, config: Mapping[str, object] | None) -> None:
        self.config = config

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self.config is not None and not typed(trainer).fast_dev_run:
            save_config(Path(trainer.default_root_dir), self.config)


def save_config(folder: Path, config: Mapping[str, object]) -> None:
    """Writes config.yaml, whole or not at all."""
    mode = 0o666 if masked(config) == config else 0o600
    try:
        write_text(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False), mode)
    except OSError as error:
        raise UserError(
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

_SECTIONS = ("trainer", "model", "data", "checkpoints", "watchdog", "profile", "dashboard")
_UNWRITABLE = "Unable to serialize instance"

# What `fit --help` shows; the rest is on request.
_MATTERS = (
    *("config", "run", "resume", "change", "doctor", "dry_run", "debug", "seed_everything", "ckpt_path"),
    *("to", "out", "batch_size"),
    *("trainer.max_epochs", "trainer.max_steps", "trainer.max_time", "trainer.devices", "trainer.num_nodes"),
    *("trainer.accelerator", "trainer.precision", "trainer.strategy", "trainer.accumulate_grad_batches"),
    *("trainer.val_check_interval", "trainer.limit_train_batches", "trainer.limit_val_batches", "trainer.log_every_n_steps"),
    *("trainer.gradient_clip_val", "trainer.logger", "trainer.callbacks", "trainer.nonfinite"),
    *("model.network", "model.optimizer", "model.lr_scheduler", "model.lr_scaling", "model.lr_reference_batch"),
    *("model.label_smoothing", "model.compile", "data.source", "data.batch_size", "data.global_batch_size"),
    *("data.crop_padding", "data.flip", "data.num_workers", "checkpoints.every_n_steps", "checkpoints.every_n_minutes"),
    *("checkpoints.keep_last", "checkpoints.monitor", "checkpoints.mode", "watchdog.at_least"),
)
_HELP = """\
usage: {prog} {verb} --config CONFIG [--KEY VALUE ...]

{about} The keys that matter, each with its default; they may stand in a config, too. See also
  {prog} {verb} --help_all                 every key
  {prog} {verb} --data.source.help CLASS   what a class takes, for each key that takes a class_path
  {prog} {verb} --config X --print_config  a configuration, complete
Complete, commented configs: configs/*.yaml.
"""


class HelpAll(argparse._HelpAction):
    """The flag --help_all, which shows every key there is."""

    def __call__(self, parser: Any, *args: object, **kwargs: object) -> None:
        print(parser.format_all_help(), end="")
        parser.exit()


# Defaults of Lightning's classes (Timer's interval), for which YAML has no form of its own.
yaml.representer.SafeRepresenter.add_multi_representer(StrEnum, lambda dumper, value: dumper.represent_str(value.value))


class Parser(LightningArgumentParser):
    """A parser that reports what is wrong without listing every flag there is, and takes no abbreviated flags."""

    configs: list[Path] = []  # noqa: RUF012, because the verbs' parsers share it: those that were named, bases first

    build: Callable[[Callable[[], Any]], Any] | None = None
    """Calls the function that makes all objects of a configuration."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def instantiate_classes(self, *args: Any, **kwargs: Any) -> Any:
        make = partial(super().instantiate_classes, *args, **kwargs)
        return make() if self.build is None else self.build(make)

    def format_all_help(self) -> str:
        return str(super().format_help())

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """Leaves out defaults that have no YAML form (functions, say): with what is left, the result is the same."""
        text: str = super().dump(*args, **kwargs)
        if _UNWRITABLE not in text:
            return text
        return str(yaml.safe_dump(_writable(yaml.safe_load(text)), sort_keys=False))

    def format_help(self, *args: Any) -> str:
        """Returns the help; of a verb, a page with what matters."""
        actions = {action.dest: action for action in self._actions}
        if "trainer.max_epochs" not in actions:
            return str(super().format_help(*args))
        prog, _, verb = self.prog.replace(" [options]", "").rpartition(" ")
        lines = [_HELP.format(prog=prog, verb=verb, about=self.description)]
        for key in (key for key in _MATTERS if key in actions):
            default = self.get_default(key)
            default = getattr(default, "class_path", default)  # of a class, its name
            says = (actions[key].help or "").split("Default:")[0].partition("\n\n")[0].replace("``", "")
            lines.append(f"  --{key}" + ("" if default in (None, argparse.SUPPRESS) else f" {default}"))
            lines += textwrap.wrap(textwrap.shorten(says, 240), 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
        return "\n".join(lines) + "\n"

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        raise SettingError(self._plain(message))

    def _plain(self, message: str) -> str:
        """Returns what is wrong, in a line."""
        keys = re.findall(r"does not accept option '([\w.]+)'", message)
        if message.startswith("unrecognized arguments: "):
            keys = re.findall(r"--([\w.]+)", message)
            if not keys:
                return f"{message}. HINT: a key is written --KEY VALUE, as in --trainer.max_epochs 3."
        if keys:
            return " ".join(self._unknown(key, self._keys()) for key in keys)
        if choice := re.match(r"argument subcommand: invalid choice: '([^']+)' \(choose from (.*)\)", message):
            verbs = [*re.findall(r"\w+", choice[2]), "report", "same", "watch"]
            return f"There is no {choice[1]!r}{_meant(choice[1], verbs) or '.'} Choose from {', '.join(verbs)}."
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
            if name not in _SECTIONS or isinstance(value, dict) or by_class or without:
                continue
            line = _line(compose_yaml(path), [name])
            raise SettingError(
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


def _writable(value: object) -> object:
    if isinstance(value, dict):
        return {k: _writable(v) for k, v in value.items() if not str(v).startswith(_UNWRITABLE)}
    return value


def _meant(name: str, known: Iterable[str]) -> str:
    """Returns what may have been meant; of a class's arguments, those that there are."""
    place, _, last = name.rpartition(".")
    beside = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == place]
    if near := difflib.get_close_matches(last, beside, n=1):
        return f". Did you mean {place}{'.' * bool(place)}{near[0]}?"
    if near := difflib.get_close_matches(name, list(known), n=1, cutoff=0.7 if place else 0.6):
        return f". Did you mean {near[0]}?"
    return f". There are: {', '.join(beside)}." if place.endswith("init_args") and beside else ""


def _arguments(key: str, classes: list[str]) -> list[str]:
    """Returns the keys of a class's arguments, of those that an error message names."""
    names: list[str] = []
    for path in classes:
        with suppress(ImportError, AttributeError, ValueError, TypeError):
            names += inspect.signature(resolve_name(path)).parameters
    return [f"{key}.init_args.{name}" for name in names if name not in ("params", "kwargs", "args")]
