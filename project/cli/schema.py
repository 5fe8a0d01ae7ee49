"""The verb `schema`: `python -m project schema` prints the JSON schema of the YAML, by which editors complete and check it.

jsonargparse makes it from the types of the classes that the YAML names. A YAML may name other classes than those that are known
here: of these, any argument is taken. The schema of this version lies beside the configs (`configs/project.schema.json`).
"""

import json
import sys
from argparse import Action, ArgumentParser
from collections.abc import Sequence
from typing import Any, ClassVar

from jsonargparse._completions_jsonschema import ParserJsonschema
from jsonargparse._typehints import get_all_subclass_paths
from lightning.pytorch.cli import LightningArgumentParser

import project.data.text  # classes that configs name, to be known here
import project.model.gpt  # noqa: F401
from project.cli.project_cli import ProjectCLI, open_door
from project.trainer import Trainer

Schema = dict[str, Any]
_KNOWN = ("project.", "torch.optim.", "lightning.pytorch.")
_ABOUT = "Prints the JSON schema of the YAML, for editors: python -m project schema > project.schema.json"
_FIRST_LINE = "# yaml-language-server: $schema=project.schema.json"


def main(words: Sequence[str]) -> int:
    """Prints the schema."""
    epilog = f"The first line of a YAML beside it: {_FIRST_LINE}"
    ArgumentParser("python -m project schema", description=_ABOUT, epilog=epilog).parse_args(words)
    print(text(), end="")
    return 0


def text() -> str:
    """Returns the schema as it is printed, the same in each process."""
    return json.dumps(document(), indent=1, sort_keys=True) + "\n"


class _Made(Exception):
    """Raised when the schema is made, and the command line is to be left alone."""


class _Builder(ParserJsonschema):
    """jsonargparse's schema, with the classes of the libraries that a YAML names most; it takes any other class, too."""

    def __init__(self) -> None:
        self.defs: Schema = {}
        self.def_types: dict[str, type] = {}

    def subclass_def(self, class_type: type, action: object) -> Schema:
        try:
            known = sorted(path for path in get_all_subclass_paths(class_type) if path.startswith(_KNOWN))
        except TypeError:  # a class of classes, whose subclasses can't be listed
            known = []
        other: Schema = self.unknown_class_path_schema()
        if known:
            other["properties"]["class_path"] = {"type": "string", "not": {"enum": known}}
        return {"anyOf": [{"type": "string"}, *(self.class_path_schema(path, action) for path in known), other]}

    def callable_schema(self, typehint: object, action: object) -> Schema:
        """Returns the schema of what makes an object: of its class, or, where there may be several, of any."""
        schema: Schema = super().callable_schema(typehint, action)
        return schema if "anyOf" in schema else {"anyOf": [{"type": "string"}, self.unknown_class_path_schema()]}

    def action_schema(self, action: Action, required: bool, consts: list[object] | None) -> Schema:
        """Returns the schema of a key. None is required, as a YAML may stand on another, which has it."""
        schema: Schema = super().action_schema(action, False, consts)
        if " object at 0x" in str(schema.get("default")):  # it is another text in each process
            del schema["default"]
        return schema

    def set_dest(self, schema: Schema, dest: str, dest_schema: Schema, required: bool, descriptions: Schema) -> None:
        super().set_dest(schema, dest, dest_schema, False, descriptions)

    def class_parser_schema(self, class_type: type | str, action: object, description: str | None = None) -> Schema:
        """Returns the schema of a class's arguments; of another library's settings, which may have a process's number, none."""
        path = class_type if isinstance(class_type, str) else f"{class_type.__module__}.{class_type.__qualname__}"
        if not path.startswith(_KNOWN):
            return {"type": "object"}
        schema: Schema = super().class_parser_schema(class_type, action, description)
        return schema


class _Parsers(ProjectCLI):
    """A front door that makes the parsers of all verbs, and reads no command line."""

    schema: ClassVar[Schema] = {}

    def parse_arguments(self, parser: LightningArgumentParser, args: object) -> None:
        type(self).schema = _Builder().generate(parser)
        raise _Made


def document() -> Schema:
    """Returns the schema of a YAML for `fit`, whose keys the other verbs take, too; their further keys are under `x-verbs`."""
    plain, named = _parsers(own=False), _parsers(own=True)
    verbs = {name: part for name, part in plain["properties"].items() if "properties" in part}
    fit, others = verbs["fit"]["properties"], named["properties"]["fit"]["properties"]
    keys = dict(fit)
    definitions = {**plain.get("$defs", {}), **named.get("$defs", {})}
    for name in ("model", "data"):  # of the project's own classes, or one that is named
        known = [form for form in (keys[name], others[name]) if form]
        keys[name] = {"anyOf": known, **{key: value for key, value in keys[name].items() if key == "description"}}
    keys["base"] = {"description": keys["base"].get("description", ""), "type": ["string", "array", "null"]}
    own = {
        verb: {"properties": {name: key for name, key in part["properties"].items() if key != fit.get(name)}}
        for verb, part in verbs.items()
    }
    return {
        "$schema": plain["$schema"],
        "title": "A training run",
        "type": "object",
        "additionalProperties": False,
        "properties": keys,
        "$defs": definitions,
        "x-verbs": own,
    }


def _parsers(own: bool) -> Schema:
    before, sys.argv = sys.argv, ["project"]
    try:
        open_door(_Parsers, Trainer, own, own)
    except _Made:
        pass
    finally:
        sys.argv = before
    return _Parsers.schema
