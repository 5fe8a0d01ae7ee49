"""A host whose clock is wrong, or jumps: a library, loaded before all others, that shifts the time of day.

    clock = Clock(folder / "h2")
    host.start(words, env={**environment(), **clock.env}, ...)
    clock.jump(3600)                         # an hour ahead from now on, in all programs that were started so

Monotonic clocks, which nobody sets, stay as they are.
"""

import subprocess
from pathlib import Path

from tests.cluster.machine import missing

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
    char text[32] = {0};
    const char *path = getenv("CLOCK_SHIFT");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    if (read(file, text, sizeof text - 1) < 0) text[0] = 0;
    close(file);
    return atol(text);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec at;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (out) *out = at.tv_sec;
    return at.tv_sec;
}
"""


class Clock:
    def __init__(self, folder: Path, seconds: int = 0) -> None:
        folder.mkdir()
        self._shift, library = folder / "shift", folder / "clock.so"
        self.jump(seconds)
        words = ["gcc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library), "-ldl"]
        try:
            subprocess.run(words, input=_SOURCE, text=True, check=True, capture_output=True)
        except FileNotFoundError:
            missing("gcc not found (apt-get install gcc libc6-dev)")
        self.env = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(self._shift)}

    def jump(self, seconds: int) -> None:
        """From now on so many seconds ahead of the truth, or behind."""
        new = self._shift.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self._shift)  # a reader never sees half of it
