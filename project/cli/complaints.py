"""The complaints of jsonargparse about a wrong value, in a line: the innermost key, what was expected, and the value."""

import re
from dataclasses import dataclass

from project.untrusted import printable

_LONGEST = 300  # characters of a value


@dataclass(frozen=True)
class Complaint:
    """A complaint of jsonargparse about one value, for which it has tried all that its type could mean."""

    key: str
    """The key within the value that was given: that of a class's argument, say; '' for the value itself."""
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


_NOISE = r"Parser key|Subtypes:|Errors:|Given value|Does not validate|Expected a path|Expected a <class 'NoneType'>"
_WITHIN = (
    r"(?:Problem with given class_path '(?P<name>[^']*)'|Type .* expects a function or a callable class|"
    r'Parser key "(?P<key>[^"]+)"):'
)


def complaint(message: str, within: str = "") -> Complaint:
    """Returns the innermost of what is wrong: jsonargparse's lines are indented under the class, or the key, that they are of.

    Of a list or a union it lists what each of its types would have to be; where one of them is a class that was named, that is
    what was meant.
    """
    lines = message.splitlines()
    for at, line in enumerate(lines):
        opening = re.search(_WITHIN, line)
        if opening is None or (opening["key"] and at == 0 and not within):  # the value's own key, which the caller knows
            continue
        inner = [line[opening.end() :], *_under(lines, at)]
        if opening["key"]:
            return complaint("\n".join(inner), f"{within}.{opening['key']}".strip("."))
        rest = complaint("\n".join(inner), f"{within}.init_args".strip("."))
        inside = rest.key not in (within, f"{within}.init_args".strip("."))
        about = f"{opening['name']}: " if opening["name"] and not inside else ""
        return Complaint(rest.key if inside else within, f"{about}{rest.text}")
    return Complaint(within, _expected(lines))


def _under(lines: list[str], at: int) -> list[str]:
    """Returns the lines that are indented more than this one."""

    def depth(line: str) -> int:
        return len(line) - len(line.lstrip())

    inner = []
    for line in lines[at + 1 :]:
        if line.strip() and depth(line) <= depth(lines[at]):
            break
        inner.append(line)
    return inner


def _expected(lines: list[str]) -> str:
    """Returns what each type would have to be, and what the value is."""
    lines = [line.strip().removeprefix("- ") for line in lines]
    value = next((line.removeprefix("Given value: ") for line in lines if line.startswith("Given value: ")), None)
    says = []
    for line in lines:
        if line and not re.match(_NOISE, line):
            text, got, given = line.partition(". Got value: ")
            value = given if got and value is None else value
            says.append(text)
    numbers = {"Expected a <class 'int'>", "Expected a <class 'float'>"} & {*says}
    says = [re.sub(r"Expected a dot import path string.*", "Expected the path of a class", line) for line in says]
    types = [line for line in says if not (numbers and line == "Expected the path of a class")]
    text = "; ".join(dict.fromkeys(re.sub(r"<(?:class|enum) '([\w.]+)'>", r"\1", line) for line in types or says)).strip()
    text = re.sub(r"Expected a (?=[aeio])", "Expected an ", text)
    text = re.sub(r"'\w+' object has no attribute 'keys'.*", "Its init_args hold keys and values", text)
    value = value.partition(". Got value: ")[0] if value else value
    if value is None or f" {value}" in text:
        return text
    return f"{text or 'It can not be read'}, and it is {printable(value, _LONGEST)}"


def condensed(message: str) -> str:
    """Returns what is wrong with a value, in a line."""
    return str(complaint(message))
