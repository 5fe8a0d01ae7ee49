"""What an image is to have: the dependencies of pyproject.toml, a line each, and those of its extras.

    python scripts/requirements.py pyproject.toml ray,export

Dockerfile and scripts/apptainer.def install this list, so that a layer of libraries does not depend on the code. Python 3.11.
"""

import sys
from pathlib import Path

import tomllib

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
extras = [one for one in sys.argv[2].split(",") if one]
known = project["optional-dependencies"]
if unknown := [one for one in extras if one not in known]:
    sys.exit(f"There is no extra {', '.join(unknown)}. HINT: EXTRAS is some of {','.join(known)}")
print(*project["dependencies"], *(one for extra in extras for one in known[extra]), sep="\n")
