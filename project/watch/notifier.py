"""The process that reports a run's events to a webhook or a command; it outlives rank 0 by some seconds.

It follows the run's file of starts and stops (life.jsonl), whoever writes there: rank 0, or its warden where that was killed.
So the training waits for no network, and a rank that was killed is reported, too. `watch/notify.py` starts it without
site-packages: it needs the standard library alone.
"""

import http.client
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError

LIMITS = "notified.json"
"""The file in the run's folder with the time of the last message of each kind, which holds over restarts."""
_LOOK = 0.3  # seconds between two looks
_SETTLED = 2.0  # seconds in which more may be said of the end
_PATIENCE = 30.0  # seconds that rank 0's warden has to record its end
_ATTEMPTS = (0.0, 1.0, 5.0)  # seconds before each
_NET, _COMMAND = 10.0, 60.0  # seconds that a webhook, and a command, may take
_LINE = 1 << 16  # bytes
_FAILURES = ("nan", "hang", "lost")
"""The kinds of failures that a line of life.jsonl names; any other one is a `failure`."""


Facts = dict[str, Any]


class Event(NamedTuple):
    """A line of life.jsonl that may be reported."""

    kind: str
    step: int | None
    why: str
    time: float


def event_of(line: bytes) -> Event | None:
    """Returns the event that a line of life.jsonl records; None for half a line, or another program's."""
    try:
        entry = json.loads(line)
        name, step, why = entry["event"], entry.get("step"), str(entry.get("why") or "")
        kind = {"finished": "end", "stopped": "stopped"}.get(entry["state"], "failure") if name == "stop" else str(name)
        if kind == "failure" and entry.get("kind") in _FAILURES:
            kind = entry["kind"]
        return Event(kind, step if isinstance(step, int) else None, why[:1000], float(entry["time"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


class Limits:
    """Lets a message of each kind through every so many seconds, and counts the others, over all starts of the run."""

    def __init__(self, path: Path, every: float) -> None:
        self.path, self.every = path, every

    def _read(self) -> dict[str, list[float]]:
        try:
            with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                known = json.loads(file.read(_LINE))
            return {str(kind): [float(last), int(count)] for kind, (last, count) in known.items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}

    def passes(self, kind: str) -> int | None:
        """Returns how many messages were held back since the last one; None where this one is held back, too."""
        known, now = self._read(), time.time()
        last, count = known.get(kind, [0.0, 0])
        held = 0 <= now - last < self.every
        known[kind] = [last, count + 1] if held else [now, 0]
        with suppress(OSError):  # a full disk
            part = self.path.with_name(f".{os.urandom(4).hex()}.{self.path.name}")
            part.write_text(json.dumps(known))
            part.replace(self.path)
        return None if held else int(count)


class Notifier:
    """Sends events to the webhook or command in the run's YAML."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.limits = Limits(Path(facts["life"]).with_name(LIMITS), facts["every"])

    def send(self, event: Event) -> None:
        """Sends a message, unless its kind is not selected or was sent within the last `every` seconds."""
        wanted = self.facts["on"]
        if event.kind not in wanted and not (event.kind in _FAILURES and "failure" in wanted):
            return
        held = self.limits.passes(event.kind)
        if held is None:
            return
        message = self.message(event, held)
        if self.facts["webhook"]:
            self._post(message)
        if self.facts["command"]:
            self._run(event, message)

    def message(self, event: Event, held: int) -> Facts:
        """Returns what is sent: a text, which Slack and those like it show, and the facts for programs."""
        run, host = self.facts["run"], self.facts["host"]
        facts = {"kind": event.kind, "step": event.step, "why": event.why, "time": event.time}
        what = {
            "start": "has started",
            "end": "has finished",
            "stopped": "was stopped",
            "straggler": "is slowed down",
            "nan": "has failed: not finite",
            "hang": "hangs",
            "lost": "has lost a process",
        }.get(event.kind, "has failed")
        at = "" if event.step is None else f" at step {event.step}"
        more = f" ({held} more like this since the last message)" if held else ""
        text = f"{run} on {host} {what}{at}{f': {event.why}' if event.why else ''}{more}"
        return {"text": text, "run": {"name": run, "host": host, "held_back": held, **facts}}

    def _post(self, message: Facts) -> None:
        name = self.facts["webhook"]
        if not (address := os.environ.get(name, "")).startswith(("https://", "http://")):
            return _warn(f"the environment has no address of http or https in {name}")
        request = urllib.request.Request(address, json.dumps(message).encode(), {"Content-Type": "application/json"})
        error = ""
        for pause in _ATTEMPTS:
            time.sleep(pause)
            try:
                urllib.request.urlopen(request, timeout=_NET).close()
                return None
            except (OSError, ValueError, http.client.HTTPException) as problem:
                # Its text may have the address, which is a secret.
                error = f"{type(problem).__name__} {problem.code if isinstance(problem, HTTPError) else ''}".strip()
        return _warn(f"the webhook whose address is in {name} takes no message: {error}")

    def _run(self, event: Event, message: Facts) -> None:
        facts = {"NOTIFY_EVENT": event.kind, "NOTIFY_RUN": self.facts["run"], "NOTIFY_TEXT": message["text"].replace("\0", " ")}
        try:
            subprocess.run(
                self.facts["command"],
                input=json.dumps(message).encode(),
                stdout=subprocess.DEVNULL,
                timeout=_COMMAND,
                env={**os.environ, **facts},
                check=True,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            known = (
                f"exit code {error.returncode}" if isinstance(error, subprocess.CalledProcessError) else type(error).__name__
            )
            _warn(f"the command {self.facts['command'][0]} has failed: {known}")


def _warn(text: str) -> None:
    print(f"WARNING notify: {text}. Training continues.", file=sys.stderr, flush=True)


class Watch:
    """Follows rank 0: reads its messages from standard input, and new lines of life.jsonl from an offset on."""

    def __init__(self, notifier: Notifier, life: Path, begin: int) -> None:
        self.notifier, self.life, self.at = notifier, life, begin
        self.alive, self.words, self.since = True, "", time.monotonic()
        self.stop: Event | None = None
        self.stopped = 0.0

    def _lines(self) -> Iterator[bytes]:
        """Yields what has come to life.jsonl since the last call, in whole lines."""
        with suppress(OSError), os.fdopen(os.open(self.life, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            file.seek(self.at)
            while (line := file.readline(_LINE)) and (line.endswith(b"\n") or len(line) == _LINE):
                self.at += len(line)
                yield line

    def look(self) -> None:
        """Waits a moment, and sends what has happened but for the end of the run, of which there may be more to say."""
        if self.alive and select.select([0], [], [], _LOOK)[0]:
            data = os.read(0, _LINE)
            self.alive, self.words, self.since = bool(data), self.words + data.decode(errors="replace"), time.monotonic()
        elif not self.alive:
            time.sleep(_LOOK)
        for line in self._lines():
            if (event := event_of(line)) is not None and b'"stop"' in line:
                self.stopped = self.stopped or time.monotonic()
                self.stop = event  # the last one counts: who outlives a rank may know more of its end
            elif event is not None:
                self.notifier.send(event)

    def is_over(self) -> bool:
        """Returns whether all is known of the end."""
        if self.stop is not None:
            return not self.alive or time.monotonic() - self.stopped > _SETTLED
        return not self.alive and (bool(self.words) or time.monotonic() - self.since > _PATIENCE)

    def end(self) -> Event | None:
        """Returns how the run has ended; None if there was nothing to train."""
        why = self.words.strip()
        why = why if len(why) <= 1000 else f"{why[:600]} ... {why[-395:]}"
        if self.stop is not None or why.endswith("ended"):
            return self.stop
        # It has failed before it began to train, and said so; or it was killed, and its warden with it.
        return Event("failure" if why else "lost", None, why or "rank 0 has ended without a word", time.time())


def main() -> None:
    """Follows the run until it has stopped, or until rank 0 has ended without a record of the cause."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they go to the whole group; the rank's end is what counts here
    facts = json.loads(sys.stdin.buffer.readline(_LINE))
    watch = Watch(notifier := Notifier(facts), Path(facts["life"]), facts["begin"])
    while not watch.is_over():
        watch.look()
    if (end := watch.end()) is not None:
        notifier.send(end)


if __name__ == "__main__":
    main()
