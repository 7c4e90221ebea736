"""Set up the project in ``.venv`` beside this file and run one of its tasks there.

    python3 bootstrap.py compare [arguments]   the main job, `escnn-attention compare`
    python3 bootstrap.py test [arguments]      the tests; the arguments go to pytest (-n 0 runs them in one process)
    python3 bootstrap.py lint                  ruff: rules and format
    python3 bootstrap.py types                 mypy
    python3 bootstrap.py docs                  the site, into docs/_build/html
    python3 bootstrap.py setup                 everything the other tasks need, and no task

Python 3.10 to 3.12 with venv and pip is all it needs: no Fortran compiler, no GPU. The first call installs what its
task needs; later calls install again only after a change of the project's requirements.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from contextlib import contextmanager
from pathlib import Path

# Before any line that an older Python cannot run.
if not (3, 10) <= sys.version_info[:2] <= (3, 12):
    came = ".".join(map(str, sys.version_info[:3]))
    sys.exit(f"bootstrap: Python 3.10, 3.11 or 3.12 is needed, but {sys.executable} is Python {came}")

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
STAMP = VENV / "bootstrap.json"  # what the folder holds; also the sign that this script made it
INPUTS = [ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / "bootstrap.py"]

ALL = {"train", "plot", "test", "docs", "dev"}
EXTRAS = {"compare": {"train"}, "test": {"train", "test"}, "lint": ALL, "types": ALL, "docs": ALL, "setup": ALL}


def say(text: str) -> None:
    """Report progress, apart from the output of the task."""
    print(f"bootstrap: {text}", file=sys.stderr, flush=True)


@contextmanager
def locked():
    """Let one set-up run at a time. The system frees the lock when its holders end, in whatever way they do."""
    with open(ROOT / ".venv.lock", "a") as file:
        if os.name == "nt":
            import msvcrt

            while True:
                try:
                    msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
                    break
                except OSError:  # not had within ten seconds
                    say("waiting for another set-up to end")
        else:
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("waiting for another set-up to end")
                fcntl.flock(file, fcntl.LOCK_EX)
            os.set_inheritable(file.fileno(), True)  # a pip that outlives a killed bootstrap keeps the lock
        yield


def read_stamp() -> dict:
    """What the last set-up left, empty if it left nothing readable."""
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def make_venv() -> None:
    """Make a new, empty environment, in place of an old one made here."""
    if VENV.exists() and any(VENV.iterdir()) and not STAMP.exists():
        sys.exit(f"bootstrap: {VENV} is there, but was not made by bootstrap.py: please delete it or move it away")
    say(f"making {VENV}")
    VENV.mkdir(exist_ok=True)
    STAMP.write_text("{}")
    for entry in VENV.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != STAMP:
            entry.unlink()
    try:
        venv.create(VENV, symlinks=os.name != "nt", with_pip=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"bootstrap: {error}\nThis Python lacks venv or pip (on Debian and Ubuntu: install python3-venv)")


def pip_install(what: str, *arguments: str) -> None:
    """Install by pip: with its progress on a terminal, else only with its warnings and errors."""
    say(f"installing {what}")
    command = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "-c", "constraints.txt", *arguments]
    if not sys.stdout.isatty():
        command.append("--quiet")
    subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, close_fds=False, check=True)


def set_up(extras: set[str]) -> None:
    """Bring ``.venv`` to hold the project with ``extras`` and escnn; do nothing where it does already."""
    identity = {"python": "{}.{}".format(*sys.version_info), "path": str(VENV)}
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in INPUTS)).hexdigest()
    stamp = read_stamp()
    if not PYTHON.exists() or {key: stamp.get(key) for key in identity} != identity:
        make_venv()
        stamp = {}
    extras = extras.union(stamp.get("extras", []))
    wanted = {**identity, "inputs": digest, "extras": sorted(extras)}
    if stamp == wanted:
        return
    # A set-up that is killed leaves this empty stamp, and the next one starts afresh.
    STAMP.write_text("{}")
    try:
        names = ",".join(sorted(extras))
        pip_install(f"the project with [{names}]; of what is new, PyTorch is the largest", "-e", f".[{names}]")
        # Not as a requirement: pip would build escnn's py3nj, which it can do without, from Fortran source.
        pip_install("escnn", "--no-deps", "escnn")
    except subprocess.CalledProcessError as error:
        if error.returncode > 0:  # pip gave up in good order: what was there before still holds
            STAMP.write_text(json.dumps(stamp))
        sys.exit(
            f"bootstrap: pip failed with status {error.returncode}; its own words are above. Packages come from the "
            "package index that pip is configured for, so this needs a network. To try again, give the same command."
        )
    STAMP.write_text(json.dumps(wanted))
    say("set-up done")


def commands(task: str, arguments: list[str]) -> list[list]:
    """The command lines of a task."""
    if task == "compare":
        return [[BIN / "escnn-attention", "compare", *arguments]]
    if task == "test":
        return [[PYTHON, "-m", "pytest", "-n", workers(), *arguments]]
    return {
        "lint": [[PYTHON, "-m", "ruff", "check"], [PYTHON, "-m", "ruff", "format", "--check"]],
        "types": [[PYTHON, "-m", "mypy"]],
        "docs": [[PYTHON, "-m", "sphinx", "-q", "-W", "-b", "html", "docs", "docs/_build/html"]],
        "setup": [],
    }[task]


def workers() -> str:
    """As many test processes as there are processors, up to the number that still pays for its start."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return str(min(available, 8))


def run(command: list, task: str) -> int:
    """Run one command line of a task and return its exit status, as a shell would."""
    environment = dict(os.environ)
    if task == "test":
        environment.setdefault("OMP_NUM_THREADS", "1")  # the test processes share the processors already
    # Paths given to compare are the caller's; the other tasks are about the project.
    process = subprocess.Popen(command, cwd=None if task == "compare" else ROOT, env=environment)
    while True:
        try:
            status = process.wait()
            return status if status >= 0 else 128 - status
        except KeyboardInterrupt:
            pass  # the command has got it too, and ends in its own way


def main() -> int:
    """Read the command line, set up, run the task."""
    task, *arguments = sys.argv[1:] or ["help"]
    if task not in EXTRAS:
        print(__doc__)
        return 0 if task in ("help", "-h", "--help") else 2
    if arguments and task not in ("compare", "test"):
        sys.exit(f"bootstrap: {task} takes no arguments, but was given: {' '.join(arguments)}")
    try:
        with locked():
            set_up(EXTRAS[task])
    except KeyboardInterrupt:
        say("interrupted; the next call sets up afresh")
        return 130
    return max([run(command, task) for command in commands(task, arguments)], default=0)


if __name__ == "__main__":
    sys.exit(main())
