"""Prints the part of scripts/lock.txt that training and some extras need, for pip install --require-hashes.

    python scripts/requirements.py ray,export    training, Ray, and what an export needs
    python scripts/requirements.py test          training and the tests

scripts/setup, Dockerfile and scripts/apptainer.def install what this prints. scripts/lock makes the lock.
"""

import re
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

HERE = Path(__file__).parent


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0]).lower()


def wanted(extras: list[str]) -> set[str]:
    """The names that pyproject.toml lists for training, for building, and for these extras."""
    described = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    project = described["project"]
    known = project["optional-dependencies"]
    if unknown := [extra for extra in extras if extra not in known]:
        sys.exit(f"There is no extra {', '.join(unknown)}. HINT: EXTRAS is some of {','.join(known)}")
    listed = [*described["build-system"]["requires"], *project["dependencies"]]
    for extra in extras:
        for requirement in known[extra]:
            own = re.fullmatch(r"samerun\[(.*)\]", requirement)
            listed += [name for inner in own[1].split(",") for name in known[inner]] if own else [requirement]
    return {name_of(requirement) for requirement in listed}


def entries() -> list[tuple[str, str, set[str]]]:
    """Each entry of the lock: its name, its text, and the names of those which need it."""
    matches = re.findall(r"^(\S.*(?:\n    --hash=.*)+)((?:\n +#.*)*)", (HERE / "lock.txt").read_text(), re.MULTILINE)
    return [
        (name_of(text), text, {name_of(parent) for parent in re.findall(r"# +(?:via +)?(\S+)", why)}) for text, why in matches
    ]


def main() -> None:
    locked = entries()
    needed = wanted([extra for extra in "".join(sys.argv[1:]).split(",") if extra])
    if missing := needed - {name for name, _, _ in locked}:
        sys.exit(f"scripts/lock.txt lacks {', '.join(sorted(missing))}. HINT: scripts/lock makes it anew")
    while added := {name for name, _, parents in locked if parents & needed} - needed:
        needed |= added
    print(*(text for name, text, _ in locked if name in needed), sep="\n")


if __name__ == "__main__":
    main()
