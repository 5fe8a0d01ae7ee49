"""The verb `completion`: `samerun completion bash` prints what makes the shell complete verbs, keys, their values and runs.

The shell calls `samerun completion words LINE` for each word. Keys come from the schema of the YAML: no library is loaded.
"""

import re
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from project.cli.keys import Node, below, choices, classes, document, of_verb
from project.cli.verbs import VERBS
from project.config_files import RUNS

_ABOUT = """Prints the completion of verbs, keys, their values and runs for the command samerun. For bash, in ~/.bashrc:
eval "$(samerun completion bash)"; for zsh, in ~/.zshrc after compinit: eval "$(samerun completion zsh)"."""
_OF_A_RUN = ("report", "watch", "profile", "same", "runs", "config")
_TRAINING = ("fit", "validate", "test", "predict", "doctor", "export", "manifest", "ray", "prove", "bench")
_FLAGS = ("config", "help", "help_all", "print_config")
_MORE = {"completion": ["bash", "zsh"], "config": ["diff"]}
_SHELLS = {
    "bash": """\
_samerun() {
  mapfile -t COMPREPLY < <(samerun completion words "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
  [[ ${#COMPREPLY[@]} = 1 && ${COMPREPLY[0]} == *. ]] && compopt -o nospace
}
complete -o default -F _samerun samerun
""",
    "zsh": """\
_samerun() {
  local -a words_here
  words_here=("${(@f)$(samerun completion words "${BUFFER[1,CURSOR]}" 2>/dev/null)}")
  [[ $PREFIX == --*=* ]] && compset -P '*='
  if [[ -n $words_here ]]; then
    compadd -S '' -- ${(M)words_here:#*.}
    compadd -- ${words_here:#*.}
  else
    _files
  fi
}
compdef _samerun samerun
""",
}


def main(words: Sequence[str]) -> int:
    """Prints a shell's part, or, for that, what a line may continue with."""
    if len(words) == 2 and words[0] == "words":
        print(*completions(words[1]), sep="\n")
        return 0
    parser = ArgumentParser("samerun completion", description=_ABOUT)
    parser.add_argument("shell", choices=list(_SHELLS))
    print(_SHELLS[parser.parse_args(words).shell], end="")
    return 0


def completions(line: str) -> list[str]:
    """Returns what the last word of a line may become; of --KEY=VALUE, what the value may."""
    *before, current = re.split(r"\s+", line.lstrip())
    if len(before) < 2:
        return [verb for verb in VERBS if verb.startswith(current)]
    verb, previous = before[1], before[-1]
    key, equals, value = current.partition("=")
    if equals or (previous.startswith("--") and "=" not in previous and not current.startswith("-")):
        return _values(key if equals else previous, value if equals else current, before)
    if current.startswith("-"):
        return _keys(current, before) if verb in _TRAINING else []
    if verb in _MORE and len(before) == 2:
        return [name for name in _MORE[verb] if name.startswith(current)]
    return _runs(current) if verb in _OF_A_RUN else []


def _runs(start: str) -> list[str]:
    return sorted(path.name for path in Path(RUNS).glob("[!.]*") if path.name.startswith(start) and path.is_dir())


def _named_classes(before: Sequence[str]) -> Mapping[str, str]:
    """Returns the classes that the line names, by their keys."""
    pairs = [part.partition("=")[::2] for part in before if "=" in part]
    pairs += pairwise(before)
    return {key.removeprefix("--").removesuffix(".class_path"): value for key, value in pairs if key.startswith("--")}


def _node(parts: Sequence[str], before: Sequence[str]) -> Node:
    """Returns the node of a key; an empty one if there is no such key."""
    named, node = _named_classes(before), document()
    if parts and (own := of_verb(before[1]).get(parts[0])):
        return own if len(parts) == 1 else {}
    for depth, part in enumerate(parts):
        node = below(node, named.get(".".join(parts[:depth]))).get(part, {})
    return node


def _keys(current: str, before: Sequence[str]) -> list[str]:
    """Returns the flags that a word may become, up to their next dot."""
    place, dot, last = current.removeprefix("--").rpartition(".")
    keys = below(_node(place.split("."), before), _named_classes(before).get(place)) if dot else dict(below(document(), None))
    if not dot:
        keys |= of_verb(before[1]) | {name: {} for name in _FLAGS}
    flags = []
    for name, node in keys.items():
        if name.startswith(last):
            flag = f"--{place}{dot}{name}"
            flags += [f"{flag}."] if below(node, None) else []
            flags += [flag] if classes(node) or not below(node, None) else []
    return sorted(flags)


def _values(flag: str, start: str, before: Sequence[str]) -> list[str]:
    """Returns the values that a flag may have; for a path it returns none, because the shell completes paths."""
    if flag == "--run":
        return _runs(start)
    node = _node(flag.removeprefix("--").split("."), before)
    names = [path.rpartition(".")[2] for path in classes(node)]
    known = [path for path, name in zip(classes(node), names, strict=True) if names.count(name) > 1 or "." in start]
    return [value for value in dict.fromkeys([*choices(node), *names, *known]) if value.startswith(start)]
