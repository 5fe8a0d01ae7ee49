"""The complaints of jsonargparse about a wrong value, in a line: the innermost key, what was expected, and the value."""

import re
from functools import partial
from itertools import takewhile

from project.untrusted import printable

_LONGEST = 300  # characters of a value
_NOISE = r"Parser key|Subtypes:|Errors:|Given value|Does not validate|Expected a path|Expected a <class 'NoneType'>"
_WITHIN = (
    r"(?:Problem with given class_path '(?P<name>[^']*)'|Type .* expects a function or a callable class|"
    r'Parser key "(?P<key>[^"]+)"):'
)


def complaint(message: str, within: str = "") -> tuple[str, str]:
    """Returns the innermost of what is wrong, and its key within the value that was given ('' for the value itself).

    The lines of jsonargparse are indented under the class, or the key, that they are of. Of a list or a union it lists what
    each of its types would have to be; where one of them is a class that was named, that is what was meant.
    """
    lines = message.splitlines()
    for at, line in enumerate(lines):
        opening = re.search(_WITHIN, line)
        if opening is None or (opening["key"] and at == 0 and not within):  # the value's own key, which the caller knows
            continue
        deeper = takewhile(partial(_is_deeper, line), lines[at + 1 :])
        inner = "\n".join([line[opening.end() :], *deeper])
        if opening["key"]:
            return complaint(inner, f"{within}.{opening['key']}".strip("."))
        arguments = f"{within}.init_args".strip(".")
        key, text = complaint(inner, arguments)
        if key not in (within, arguments):
            return key, text
        name = opening["name"]
        is_named = not name or re.search(rf"\b{re.escape(name)}\b", text)
        return within, text if is_named else f"{name}: {text}"
    return within, _expected(lines)


def _is_deeper(line: str, other: str) -> bool:
    return not other.strip() or len(other) - len(other.lstrip()) > len(line) - len(line.lstrip())


def _expected(lines: list[str]) -> str:
    """Returns the expected form of each type, and a description of the value."""
    lines = [line.strip().removeprefix("- ") for line in lines]
    value = next((line.removeprefix("Given value: ") for line in lines if line.startswith("Given value: ")), None)
    says = []
    for line in lines:
        if line and not re.match(_NOISE, line):
            text, got, given = line.partition(". Got value: ")
            value = given if got and value is None else value
            says.append(
                re.sub(r"Expected a dot import path string: (\w*).*", r"Expected the path of a class, as in module.\1", text)
            )
    numbers = {"Expected a <class 'int'>", "Expected a <class 'float'>"} & {*says}
    types = [line for line in says if not (numbers and line.startswith("Expected the path of a class"))]
    text = "; ".join(dict.fromkeys(re.sub(r"<(?:class|enum) '([\w.]+)'>", r"\1", line) for line in types)).strip()
    text = re.sub(
        r"a typing\.Literal\[(.*?)\]", r"one of \1", re.sub(r"a collections\.abc\.(Iterable|Sequence)\b", "a list", text)
    )
    text = re.sub(r"Expected a (?=[aeio])", "Expected an ", text)
    text = re.sub(r"'\w+' object has no attribute 'keys'.*", "Its init_args hold keys and values", text)
    value = re.sub(r"^Namespace\(class_path='([\w.]+)'\)$", r"\1", value.partition(". Got value: ")[0]) if value else value
    if value is None or f" {value}" in text:
        return text
    return f"{text or 'It can not be read'}, and it is {printable(value, _LONGEST)}"
