"""A module that is never loaded: its code waits, in Python or elsewhere. Loading it leaves a file."""

import hashlib
import os
import time
from pathlib import Path

Path("loading").touch()
if os.environ.get("WAITS_IN") == "C":
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # half an hour, in which no Python code runs in this thread
while True:
    time.sleep(0.1)
