"""Set up the project in ``.venv`` beside this file and run one of its tasks there.

    python3 bootstrap.py compare [arguments]   the main job, `escnn-attention compare`
    python3 bootstrap.py test [arguments]      the tests; the arguments go to pytest (-n 0 runs them in one process)
    python3 bootstrap.py test-numpy2 [...]     the tests with NumPy 2 and no lie_learn, in an environment of their own
    python3 bootstrap.py lint                  ruff (rules and format) and import-linter
    python3 bootstrap.py types                 mypy
    python3 bootstrap.py docs                  the site, into docs/_build/html
    python3 bootstrap.py setup                 everything the other tasks need, compiled, and no task

Python 3.10 or later with venv and pip is all it needs: no Fortran compiler, no GPU. The first call installs what its
task needs; later calls install again only after a change of the project's requirements. lie_learn, and with it NumPy 1,
is installed where there are wheels of it.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from contextlib import contextmanager
from pathlib import Path

# Before any line that an older Python cannot run.
if sys.version_info < (3, 10):  # noqa: UP036
    came = ".".join(map(str, sys.version_info[:3]))
    sys.exit(f"bootstrap: Python 3.10 or later is needed, but {sys.executable} is Python {came}")

ROOT = Path(__file__).resolve().parent
ALL = {"train", "plot", "test", "docs", "dev"}
EXTRAS = {"compare": {"train"}, "test": {"train", "test"}, "lint": ALL, "types": ALL, "docs": ALL, "setup": ALL}
EXTRAS["test-numpy2"] = EXTRAS["test"]
ARGUMENTS = {"compare", "test", "test-numpy2"}  # tasks that take some


class Environment:
    """A virtual environment of the project: its folder, and whether it has lie_learn, which needs NumPy 1.

    With a ``base``, all but lie_learn and NumPy is that of another environment: PyTorch is gigabytes.
    """

    def __init__(self, name: str, lie_learn: bool, base: "Environment | None" = None):
        self.folder = ROOT / name
        self.lie_learn = lie_learn
        self.base = base
        self.constraints = ["constraints.txt", f"constraints-numpy{1 if lie_learn else 2}.txt"]
        self.bin = self.folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / ("python.exe" if os.name == "nt" else "python")
        self.stamp = self.folder / "bootstrap.json"  # what the folder holds; also the sign that this script made it

    @classmethod
    def of(cls, task: str):
        """The environment that a task runs in."""
        if task == "test-numpy2":
            return cls(".venv-numpy2", lie_learn=False, base=cls.of("test"))
        wheels = sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info < (3, 13)
        return cls(".venv", lie_learn=wheels)

    def read_stamp(self) -> dict:
        """What the last set-up left, empty if it left nothing readable."""
        try:
            return json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            return {}

    def digest(self) -> str:
        """Of everything that decides what is installed."""
        inputs = [ROOT / name for name in ("pyproject.toml", "bootstrap.py", *self.constraints)]
        return hashlib.sha256(b"\0".join(path.read_bytes() for path in inputs)).hexdigest()

    def make(self) -> None:
        """Make a new environment, empty or with links to what its base has, in place of an old one made here."""
        if self.folder.exists() and any(self.folder.iterdir()) and not self.stamp.exists():
            sys.exit(
                f"bootstrap: {self.folder} is there, but was not made by bootstrap.py: please delete it or move it away"
            )
        say(f"making {self.folder}")
        self.folder.mkdir(exist_ok=True)
        self.stamp.write_text("{}")
        for entry in self.folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != self.stamp:
                entry.unlink()
        try:
            venv.create(self.folder, symlinks=os.name != "nt", with_pip=self.base is None)
        except subprocess.CalledProcessError as error:
            sys.exit(f"bootstrap: {error}\nThis Python lacks venv or pip (on Debian and Ubuntu: install python3-venv)")
        if self.base is not None:  # pip replaces files and never writes to them, so that environments can share some
            theirs, ours = (next(folder.glob("[Ll]ib/**/site-packages")) for folder in (self.base.folder, self.folder))
            without = shutil.ignore_patterns("lie_learn*")
            shutil.copytree(theirs, ours, symlinks=True, ignore=without, copy_function=os.link, dirs_exist_ok=True)

    def pip_install(self, what: str, *arguments: str) -> None:
        """Install by pip: with its progress on a terminal, else only with its warnings and errors."""
        say(f"installing {what}")
        # Most of what is installed is never imported, so that Python's files are compiled where they are first used.
        command = [self.python, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
        for path in self.constraints:
            command += ["-c", path]
        if not sys.stdout.isatty():
            command.append("--quiet")
        subprocess.run([*command, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, close_fds=False, check=True)


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


def set_up(environment: Environment, extras: set[str]) -> None:
    """Bring an environment to hold the project with ``extras`` and escnn; do nothing where it does already."""
    if environment.base is not None:
        set_up(environment.base, extras)
    identity = {"python": "{}.{}".format(*sys.version_info), "path": str(environment.folder)}
    digest = environment.digest()
    stamp = environment.read_stamp()
    new = not environment.python.exists() or {key: stamp.get(key) for key in identity} != identity
    if new:
        stamp = {}
    # As build backends write it: not all versions of pip know that it is the same with an underscore.
    extras = extras.union(stamp.get("extras", []), {"lie-learn"} if environment.lie_learn else ())
    wanted = {**identity, "inputs": digest, "extras": sorted(extras)}
    if stamp == wanted:
        return
    if new or environment.base is not None:
        environment.make()
        stamp = {}
    # A set-up that is killed leaves this empty stamp, and the next one starts afresh.
    environment.stamp.write_text("{}")
    try:
        if environment.base is not None:
            environment.pip_install("NumPy 2", "--no-deps", "numpy")
        else:
            names = ",".join(sorted(extras))
            environment.pip_install(
                f"the project with [{names}]; of what is new, PyTorch is the largest", "-e", f".[{names}]"
            )
            # Not as a requirement: pip would build escnn's py3nj, which it can do without, from Fortran source.
            environment.pip_install("escnn", "--no-deps", "escnn")
    except subprocess.CalledProcessError as error:
        if error.returncode > 0:  # pip gave up in good order: what was there before still holds
            environment.stamp.write_text(json.dumps(stamp))
        sys.exit(
            f"bootstrap: pip failed with status {error.returncode}; its own words are above. Packages come from the "
            "package index that pip is configured for, so this needs a network. To try again, give the same command."
        )
    environment.stamp.write_text(json.dumps(wanted))
    say("set-up done")


def commands(environment: Environment, task: str, arguments: list[str]) -> list[list]:
    """The command lines of a task."""
    python = environment.python
    if task == "compare":
        return [[environment.bin / "escnn-attention", "compare", *arguments]]
    if task in ARGUMENTS:
        # Tests of a file stay together, which share what they import and build, until a process has none left.
        return [[python, "-m", "pytest", "-n", workers(), "--dist", "worksteal", *arguments]]
    return {
        "lint": [
            [python, "-m", "ruff", "check"],
            [python, "-m", "ruff", "format", "--check"],
            [environment.bin / "lint-imports"],
        ],
        "types": [[python, "-m", "mypy"]],
        "docs": [[python, "-m", "sphinx", "-q", "-W", "-b", "html", "docs", "docs/_build/html"]],
        "setup": [[python, "-m", "tests.compile"]],
    }[task]


def workers() -> str:
    """As many test processes as there are processors, up to the number that still pays for its start."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return str(min(available, 8))


def run(command: list, task: str) -> int:
    """Run one command line of a task and return its exit status, as a shell would."""
    variables = dict(os.environ)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile all that it imports
    if task.startswith("test"):
        variables.setdefault("OMP_NUM_THREADS", "1")  # the test processes share the processors already
    # Paths given to compare are the caller's; the other tasks are about the project.
    process = subprocess.Popen(command, cwd=None if task == "compare" else ROOT, env=variables)
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
    if arguments and task not in ARGUMENTS:
        sys.exit(f"bootstrap: {task} takes no arguments, but was given: {' '.join(arguments)}")
    environment = Environment.of(task)
    try:
        with locked():
            set_up(environment, EXTRAS[task])
    except KeyboardInterrupt:
        say("interrupted; the next call sets up afresh")
        return 130
    return max([run(command, task) for command in commands(environment, task, arguments)], default=0)


if __name__ == "__main__":
    sys.exit(main())
