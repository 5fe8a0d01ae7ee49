"""Reads the keys of the YAML, their choices and defaults from its schema: nothing is loaded that takes time.

The schema lies beside the configs; `python -m project schema` makes it.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from project.cli.verbs import verb_page
from project.config_files import CONFIGS
from project.errors import UserError
from project.untrusted import read_json

FILE = "project.schema.json"
_CONFIG = "Path to a configuration file in json or yaml format."
Node = Mapping[str, Any]
"""A part of the schema: a key, with what it may hold."""


@cache
def document() -> Node:
    """Returns the whole schema, which is the node of all keys."""
    if not (place := CONFIGS / FILE).is_file():
        raise UserError(f"There is no {place}. HINT: python -m project schema > {place}")
    return read_json(place)


def of_verb(verb: str) -> dict[str, Node]:
    """Returns the keys that a verb takes in addition to those of `fit`."""
    return dict(document()["x-verbs"].get(verb, {}).get("properties", {}))


def help_page(verb: str) -> str:
    """Returns the text of `python -m project VERB --help`, of a verb that takes these keys."""
    nodes = {"config": {"description": _CONFIG}, **group(document()), **of_verb(verb)}
    nodes |= {f"{key}.{name}": part for key, node in nodes.items() for name, part in group(node).items()}
    known = {key: (node.get("default"), str(node.get("description", ""))) for key, node in nodes.items()}
    return verb_page(verb, known)


def forms(node: Node) -> Iterator[Node]:
    """Yields each form that a key's value may have."""
    if reference := node.get("$ref"):
        yield from forms(document()["$defs"][reference.rpartition("/")[2]])
    elif "anyOf" in node:
        for form in node["anyOf"]:
            yield from forms(form)
    else:
        yield node


def choices(node: Node) -> list[str]:
    """Returns the values that a key may have, as far as they are few."""
    values: list[str] = []
    for form in forms(node):
        kinds = form.get("type", ())
        values += [str(value) for value in form.get("enum", ()) if value is not None]
        values += ["true", "false"] if "boolean" in ([kinds] if isinstance(kinds, str) else kinds) else []
    return list(dict.fromkeys(values))


def classes(node: Node) -> dict[str, Node]:
    """Returns the classes that a key may name, by their paths: the node of each one's arguments."""
    known = {}
    for form in forms(node):
        properties = form.get("properties", {})
        if path := properties.get("class_path", {}).get("const"):
            known[path] = properties["init_args"]
    return known


def class_paths() -> set[str]:
    """Returns the paths of all classes that the schema knows."""
    return {path for node in document()["$defs"].values() for form in node.get("anyOf", [node]) for path in classes(form)}


def class_of(node: Node, name: str | None) -> str | None:
    """Returns the path of a class that is named by it, or by its last part; without a name, the default's."""
    if name is None:
        default = node.get("default")
        return str(default["class_path"]) if isinstance(default, Mapping) and "class_path" in default else None
    return next((path for path in classes(node) if name in (path, path.rpartition(".")[2])), None)


def arguments(node: Node, name: str | None) -> dict[str, Node]:
    """Returns the arguments of a class that a key names."""
    path = class_of(node, name)
    return group(classes(node)[path]) if path in classes(node) else {}


def group(node: Node) -> dict[str, Node]:
    """Returns the keys below a key that is no class."""
    keys: dict[str, Node] = {}
    for form in forms(node):
        properties = form.get("properties", {})
        if "class_path" not in properties:
            keys |= {name: key for name, key in properties.items() if name != "$schema"}
    return keys


def below(node: Node, name: str | None) -> dict[str, Node]:
    """Returns all that may stand below a key, of the class of this name if the key takes one."""
    keys = group(node)
    if classes(node):
        keys["class_path"] = {"enum": list(classes(node))}
        if inner := arguments(node, name):
            keys["init_args"] = {"properties": inner}
    return keys
