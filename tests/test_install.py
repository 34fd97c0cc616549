"""Declared packages, the script that prepares a TPU worker, and README's commands as CI runs them.

Nothing is installed and no network is used: the scripts meet stand-ins for Python, pip and JAX in a folder of
their own.
"""

import ast
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mstrain
from mstrain import start as begin

ROOT = Path(__file__).resolve().parent.parent
PREPARE, CI = ROOT / "prepare_tpu_vm.sh", ROOT / ".ci" / "run"
RUN, DEV, LOCK = "requirements.txt", "requirements-dev.txt", "requirements.lock"


def requirements(name: str) -> list[Requirement]:
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


def imported(*paths: str) -> dict[str, Path]:
    """{distribution: a file that imports it} of what files matching `paths` import from elsewhere."""
    files = [file for path in paths for file in sorted(ROOT.glob(path))]
    ours = {"mstrain", "research", "tests", *(script.stem for script in ROOT.glob("*.py"))}
    distributions, found = importlib.metadata.packages_distributions(), {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in (name.split(".")[0] for name in names):
                if name not in sys.stdlib_module_names and name not in ours:
                    for distribution in distributions.get(name, [name]):
                        found[distribution.lower()] = file
    return found


@pytest.mark.parametrize("paths, files", [
    (("mstrain/**/*.py", "research/**/*.py", "*.py"), [RUN]),
    (("tests/**/*.py",), [RUN, DEV]),
], ids=["run", "tests"])  # fmt: skip
def test_every_import_is_a_declared_requirement(paths, files):
    declared = {requirement.name.lower() for name in files for requirement in requirements(name)}
    brought_by = {
        "omegaconf": "hydra-core", "huggingface_hub": "datasets", "scipy": "jax", "pyyaml": "hydra-core",
        "packaging": "pytest", "etils": "orbax-checkpoint", "ml_dtypes": "jax", "grimp": "import-linter",
    }  # fmt: skip
    found = imported(*paths)
    optional = {"sentencepiece", "torch", "transformers"}  # a message names them where they are missing
    assert not {n: file for n, file in found.items() if n not in optional and brought_by.get(n, n) not in declared}


@pytest.mark.parametrize("name", [RUN, DEV])
def test_every_requirement_states_both_ends_of_its_range(name):
    for requirement in requirements(name):
        operators = sorted(specifier.operator for specifier in requirement.specifier)
        assert operators in (["<=", ">="], ["=="]), f"{requirement} does not say which versions were tried"


def locked() -> list[tuple[Requirement, str]]:
    """(requirement, hashes) of every entry of requirements.lock."""
    text = (ROOT / LOCK).read_text()
    entries = re.findall(r"^([^\s#][^\\\n]*) \\\n((?: +--hash=.*\n)+)", text, re.MULTILINE)
    assert len(entries) == text.count("==") - text.count("== '"), "an entry has no hashes"
    return [(Requirement(entry), hashes) for entry, hashes in entries]


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("platform, machine", [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")])
def test_the_lock_has_one_version_of_every_requirement_within_its_range(python, platform, machine):
    environment = {
        "python_version": python, "python_full_version": f"{python}.7", "sys_platform": platform,
        "platform_machine": machine, "platform_python_implementation": "CPython", "implementation_name": "cpython",
    }  # fmt: skip
    versions = {}
    for entry, _ in locked():
        if entry.marker is None or entry.marker.evaluate(environment):
            assert canonicalize_name(entry.name) not in versions, f"two versions of {entry.name}"
            versions[canonicalize_name(entry.name)] = str(entry.specifier).removeprefix("==")
    for requirement in requirements(RUN) + requirements(DEV):
        if requirement.name == "torch":  # its builds differ by index, as the lock says
            continue
        version = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is locked to {version}"


def test_the_lock_names_sha256_hashes_and_no_registry():
    for _, hashes in locked():
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word) for word in hashes.split() if word != "\\")
    assert "://" not in (ROOT / LOCK).read_text()


@pytest.mark.parametrize("script", [PREPARE, CI], ids=lambda path: path.name)
def test_scripts_parse_and_are_executable(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)


class Worker:
    """A TPU worker whose `python`, in and out of its virtual environment, logs its calls and runs only -c."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in ("bash", "dirname", "env", "mkdir", "cp", "cat"):
            (self.bin / tool).symlink_to(shutil.which(tool))
        shutil.copy(PREPARE, folder)
        (folder / "log").touch()
        self.environment = {"PATH": str(self.bin)}

    def python(self, name="python3.11", version=(3, 11)) -> None:
        script = f"""#!/usr/bin/env bash
            echo "$0 ${{@:1:3}}" >> "{self.folder}/log"
            case "$1 $2" in
                "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
                "-m pip") exit "${{PIP_EXIT:-0}}" ;;
                "-c import sys; sys.exit(sys.version_info"*) {sys.executable} -c "import sys
sys.version_info = {version!r}
${{2#import sys; }}" ;;
                *) exec {sys.executable} "$@" ;;
            esac
        """
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def jax(self, platform: str) -> None:
        """Puts a JAX in its place that sees eight chips from the second of four processes."""
        (self.folder / "jax.py").write_text(f"""
import types
__version__ = "0"
distributed = types.SimpleNamespace(initialize=lambda initialization_timeout: None)
devices = lambda: [types.SimpleNamespace(platform={platform!r}, device_kind="{platform} v9")] * 8
process_index, process_count, local_device_count = lambda: 1, lambda: 4, lambda: 2
""")
        self.environment["PYTHONPATH"] = str(self.folder)

    def prepare(self, *arguments, **environment):
        command = ["bash", self.folder / PREPARE.name, *arguments]
        environment = self.environment | environment
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    @property
    def log(self) -> list[str]:
        lines = (self.folder / "log").read_text().splitlines()
        return [line for line in lines if "sys.version_info" not in line]


@pytest.fixture
def worker(tmp_path):
    return Worker(tmp_path)


def test_dry_run_prints_the_steps_and_takes_none(worker):
    worker.python()
    before = set(worker.folder.iterdir())
    done = worker.prepare("--dry-run")
    assert done.returncode == 0
    steps = [line for line in done.stdout.splitlines() if line.startswith("+ ")]
    parts = ("python3.11 -m venv .venv", "requirements-tpu.txt", "JAX_PLATFORMS=tpu")
    assert all(part in step for step, part in zip(steps, parts, strict=True))
    assert worker.log == [] and set(worker.folder.iterdir()) == before


def test_prepares_twice_and_says_what_it_sees(worker):
    worker.python()
    worker.jax("tpu")
    for _ in range(2):
        done = worker.prepare()
        assert done.returncode == 0, done.stderr
        assert "process 1 of 4, devices seen: 8 tpu v9, 2 of them here" in done.stdout
    assert sum("-m pip install" in line for line in worker.log) == 2


def test_without_a_suitable_python_it_names_the_fix(worker):
    worker.python("python3", (3, 10))
    done = worker.prepare()
    assert done.returncode == 1 and done.stdout == ""
    assert "Python 3.11 or 3.12" in done.stderr
    assert "apt-get install -y python3.11 python3.11-venv" in done.stderr
    assert worker.log == []


def test_newer_python_is_found_under_any_of_its_names(worker):
    worker.python("python3", (3, 12))
    assert "+ python3 -m venv .venv" in worker.prepare("--dry-run").stdout


def test_failing_installation_stops_it(worker):
    worker.python()
    done = worker.prepare(PIP_EXIT="1")
    assert done.returncode == 1 and "pip could not install" in done.stderr
    assert "process" not in done.stdout


def test_other_devices_are_no_tpu(worker):
    worker.python()
    worker.jax("cpu")
    done = worker.prepare()
    assert done.returncode == 1 and "ready" not in done.stdout
    assert "JAX sees cpu devices and no TPU" in done.stderr and "--worker=all" in done.stderr


def test_the_installed_jax_reports_why_it_sees_no_tpu(worker):
    """With the real JAX of this environment, on a machine that has no TPU."""
    if Path("/dev/accel0").exists() or Path("/dev/vfio").exists():
        pytest.skip("this machine may have a TPU")
    worker.python()
    done = worker.prepare(TPU_SKIP_MDS_QUERY="1")
    assert done.returncode == 1 and "Unable to initialize backend 'tpu'" in done.stderr


def test_unknown_options_are_refused(worker):
    worker.python()
    done = worker.prepare("--dryrun")
    assert done.returncode == 1 and "--dry-run" in done.stderr and worker.log == []


README = """
## Elsewhere
```bash
exit 9
```
## Train
Some words.
```bash
echo set up &&
    echo run train.py
```
```bash
exit 9
```
## Test
```text
exit 9
```
```bash
echo 1 passed in 2 s
```
"""


def ci(folder: Path, readme: str):
    (folder / ".ci").mkdir()
    shutil.copy(CI, folder / ".ci")
    (folder / ".ci" / "check").write_text("#!/usr/bin/env bash\necho checked\n")
    (folder / ".ci" / "check").chmod(0o755)
    (folder / "README.md").write_text(readme)
    return subprocess.run([folder / ".ci" / "run"], capture_output=True, text=True, timeout=60)


def test_ci_runs_what_the_readme_prints(tmp_path):
    done = ci(tmp_path, README)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert any(line.startswith("run train.py steps=20 ") for line in lines) and "set up" in lines
    assert lines[-1] == "tests: 1 passed in 2 s"


@pytest.mark.parametrize("old, new, message", [
    ("echo 1 passed in 2 s", "echo 1 failed; exit 1", "the tests failed: 1 failed"),
    ("echo set up", "false", "the training run failed"),
    ("## Test", "## Tests", "no ```bash block"),
    ("run train.py", "run", "ends in train.py"),
])  # fmt: skip
def test_ci_fails_with_the_reason(tmp_path, old, new, message):
    done = ci(tmp_path, README.replace(old, new))
    assert done.returncode == 1 and message in done.stderr


def test_the_package_states_its_extras_its_command_and_its_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"tpu", "cuda12", "cuda13", "plan", "docs", "wandb", "dev"} <= set(project["optional-dependencies"])
    module, _, function = project["scripts"]["mstrain"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert re.fullmatch(r"\d+\.\d+\.\d+", mstrain.__version__)
    assert f"## {mstrain.__version__} " in (ROOT / "CHANGELOG.md").read_text()
    assert (ROOT / "mstrain" / "conf" / "config.yaml").is_file(), "conf/ does not reach an installed package"


def test_what_pip_installs_needs_no_checkout(tmp_path):
    """The packages without the folders beside them, in another working folder."""
    for name in ("mstrain", "research"):
        shutil.copytree(ROOT / name, tmp_path / "site" / name, ignore=shutil.ignore_patterns("__pycache__"))
    words = "plan model=gpt3_125m cluster=v5e-4 batch=8 seq=128 max_seconds=10 simulate=false run_dir=found".split()
    ended = subprocess.run(
        [sys.executable, "-m", "mstrain", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "train.py model=gpt3_125m mesh=" in ended.stdout
    assert (tmp_path / "found" / "plan.json").is_file()


@pytest.mark.parametrize("command", ["train.py", "benchmark.py", "plan.py", "-m mstrain train"])
def test_a_python_without_packages_is_told_what_to_type(command, tmp_path):
    """The first command of somebody who has not made the environment, or does not use it."""
    shutil.copytree(ROOT / "mstrain", tmp_path / "mstrain", ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("*.py"):
        shutil.copy(script, tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def message() -> str:
        words = [sys.executable, "-S", *command.split(), "run_dir=a b"]  # -S: without site-packages
        ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2, ended.stderr
        return ended.stderr

    typed = f".venv/bin/python {command} 'run_dir=a b'\n"
    assert "lacks packages: jax, flax" in message()
    assert message().endswith(f"Type python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && {typed}")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    assert message().endswith(f". Type {typed}")


def test_an_old_python_is_told_which_one_it_takes(monkeypatch, capsys):
    monkeypatch.setattr(begin, "OLDEST", (99, 0))
    with pytest.raises(SystemExit) as ended:
        begin.start()
    assert ended.value.code == 2 and "mstrain needs Python 3.11 or 3.12. Type " in capsys.readouterr().err


def test_the_readme_has_both_commands():
    """And each makes the environment it runs in, as a Python may refuse packages outside of one (PEP 668)."""
    readme = (ROOT / "README.md").read_text()
    for heading, file, last in (("Train", RUN, "train.py"), ("Test", DEV, "pytest")):
        block = readme.split(f"## {heading}\n")[1].split("```bash\n")[1].split("```")[0]
        assert "-m venv .venv" in block and file in block and block.rstrip().endswith(last)
