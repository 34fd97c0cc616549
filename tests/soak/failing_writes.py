"""Fails every operation that writes to a run's files or output, one in each run, and looks at what comes of it.

    python -m tests.soak.failing_writes --folder /tmp/failing [--first 1] [--stride 1]

A library that is loaded before libc (it needs a C compiler) counts the calls that write below the run directory or to
standard output and error, of Python, TensorStore and XLA alike, and fails the n-th with ENOSPC. Every run must either
make all its steps or end with a reason; the same command afterwards must finish with the losses of an undisturbed run
and a whole checkpoint.
"""

import argparse
import collections
import ctypes
import dataclasses
import faulthandler
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[4096];
static long calls, nth;
static char failed[4200];

void watch(const char *path, long n) { calls = 0; nth = n; failed[0] = 0; strncpy(root, path, sizeof root - 1); }
void ignore(void) { root[0] = 0; }
long counted(void) { return calls; }
const char *what(void) { return failed; }

static int fails(const char *name, const char *path) {
  if (!root[0] || !path || !strstr(path, root)) return 0;
  if (__sync_add_and_fetch(&calls, 1) != nth) return 0;
  snprintf(failed, sizeof failed, "%s %s", name, path);
  errno = ENOSPC;
  return 1;
}
static int fd_fails(const char *name, int fd) {
  char link[64], path[4096];
  if (!root[0]) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return fails(name, path);
}
#define REAL(name) static typeof(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define ON_PATH(type, name, path, params, args) \
  type name params { REAL(name); return fails(#name, path) ? (type)-1 : real args; }
#define ON_FD(type, name, params, args) \
  type name params { REAL(name); return fd_fails(#name, fd) ? (type)-1 : real args; }
#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT))
#define OPEN(name) int name(const char *path, int flags, ...) { REAL(name); va_list rest; va_start(rest, flags); \
  int mode = va_arg(rest, int); va_end(rest); \
  return WRITES(flags) && fails(#name, path) ? -1 : real(path, flags, mode); }
#define OPENAT(name) int name(int at, const char *path, int flags, ...) { REAL(name); va_list rest; \
  va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
  return WRITES(flags) && fails(#name, path) ? -1 : real(at, path, flags, mode); }
#define FOPEN(name) FILE *name(const char *path, const char *mode) { REAL(name); \
  return mode[0] != 'r' && fails(#name, path) ? NULL : real(path, mode); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64) FOPEN(fopen) FOPEN(fopen64)
ON_FD(ssize_t, write, (int fd, const void *data, size_t n), (fd, data, n))
ON_FD(ssize_t, pwrite, (int fd, const void *data, size_t n, off_t at), (fd, data, n, at))
ON_FD(ssize_t, pwrite64, (int fd, const void *data, size_t n, off64_t at), (fd, data, n, at))
ON_FD(ssize_t, writev, (int fd, const struct iovec *data, int n), (fd, data, n))
ON_FD(int, ftruncate, (int fd, off_t n), (fd, n))
ON_FD(int, ftruncate64, (int fd, off64_t n), (fd, n))
ON_FD(int, fsync, (int fd), (fd))
ON_FD(int, fdatasync, (int fd), (fd))
ON_PATH(int, mkdir, path, (const char *path, mode_t mode), (path, mode))
ON_PATH(int, rename, to, (const char *from, const char *to), (from, to))
ON_PATH(int, link, to, (const char *from, const char *to), (from, to))
ON_PATH(int, symlink, to, (const char *from, const char *to), (from, to))
"""
SECONDS = 300  # that one run may take before it counts as hung


def load(folder: Path) -> ctypes.CDLL:
    """The library, in a process that starts with it."""
    path = folder / "failing_writes.so"
    if os.environ.get("LD_PRELOAD") != str(path):
        folder.mkdir(parents=True, exist_ok=True)
        command = ["cc", "-shared", "-fPIC", "-O1", "-w", "-x", "c", "-", "-o", path, "-ldl"]
        subprocess.run(command, input=LIBRARY, text=True, check=True)
        environment = os.environ | {"LD_PRELOAD": str(path)}
        os.execve(sys.executable, [sys.executable, "-m", "tests.soak.failing_writes", *sys.argv[1:]], environment)
    library = ctypes.CDLL(str(path))
    library.what.restype = ctypes.c_char_p
    library.counted.restype = ctypes.c_long
    return library


class Trial:
    """Trains one small run in folders of its own; the n-th of its writes fails."""

    def __init__(self, folder: Path, library: ctypes.CDLL):
        from tests.training.runs import make

        small = ("model.layers=1", "model.width=32", "model.mlp_dim=64", "parallel=collective", "mesh=1x2", "steps=5")
        often = ("checkpoint.every=2", "eval.every=3", "profile.start=2", "profile.steps=1")
        self.library, self.made = library, make(folder / "made", *small, *often)

    def train(self, directory: Path, nth: int) -> str:
        """How the run in `directory` ended."""
        from rich.console import Console

        from mstrain.training.session import train
        from mstrain.training.stopped import Stopped

        with open(directory / "output.txt", "a") as output:
            config = dataclasses.replace(self.made.config, run_dir=str(directory / "run"))
            run = dataclasses.replace(self.made, console=Console(file=output), config=config)
            run.__dict__["compiled_step"] = self.made.compiled_step
            self.library.watch(str(directory / "run").encode(), nth)
            try:
                return f"code {train(run)}"
            except Stopped as stopped:
                return f"code {stopped.code}: {stopped.reason}"
            except ValueError as error:
                return f"code 2: {error}"
            finally:
                self.library.ignore()

    def failed(self, directory: Path) -> str:
        """The write that failed."""
        return self.library.what().decode().replace(str(directory / "run"), "")


def judge(directory: Path) -> list[float]:
    """The losses of a finished run with a whole checkpoint."""
    from mstrain.checkpoints import manifest
    from mstrain.checkpoints.checkpoints import Checkpoints
    from tests.training.runs import losses

    checkpoints = Checkpoints(directory / "run" / "checkpoints", 3)
    assert checkpoints.latest == 5 and not manifest.problems(checkpoints.directory / "5"), directory
    checkpoints.close()
    return losses(directory / "run")


def empty(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--stride", type=int, default=1)
    options = parser.parse_args()
    folder = options.folder.absolute()
    library = load(folder)
    import tests.conftest  # noqa: F401  (emulates the devices)

    trial, reference = Trial(folder, library), empty(folder / "reference")
    sys.stdout, out = io.StringIO(), sys.stdout
    assert trial.train(reference, 0) == "code 0"
    expected, points, ends = judge(reference), library.counted(), collections.Counter()
    print(f"{points} operations write in an undisturbed run", file=out, flush=True)
    for nth in range(options.first, points + 1, options.stride):
        directory = empty(folder / "failing")
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        end = trial.train(directory, nth)
        ends[end.partition(":")[0]] += 1
        print(f"{nth}: {trial.failed(directory)}: {end[:150]}", file=out, flush=True)
        if end != "code 0":
            assert trial.train(directory, 0) == "code 0", directory
        assert judge(directory) == expected, directory
        faulthandler.cancel_dump_traceback_later()
    print(f"{sum(ends.values())} of {points} points: {dict(ends)}; every run finished, at once or when started again,"
          " with the losses of the undisturbed one", file=out)  # fmt: skip


if __name__ == "__main__":
    main()
