"""The package as users install it: `python -m tests.package` builds, compares, installs, runs.

Wheel and sdist are built twice from the last commit, in different folders, and must have the same
bytes. The wheel, and a wheel made from the sdist, must have the same content. Installed without
extras, perdure's own files must stay below `MOST`, and the examples that need no extra must run.
Prints the figures as JSON; exits with 1 if one of this does not hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.source_tree import ROOT

MOST = 4_200_000
"""Bytes of perdure's own files, nearly all of them Python: docs/decisions/0063-one-wheel.md."""
EXAMPLES = ("eight_lines.py", "persistent_agent.py", "manual_agent.py", "blocking_script.py")
OWN_FILES = """
import importlib.metadata as m, json
files = [file for file in m.files("perdure") if file.suffix != ".pyc"]
print(json.dumps([len(files), sum(file.locate().stat().st_size for file in files)]))
"""


def run(*command: str | Path, **options: Any) -> str:
    """Run a command, and return what it prints."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, **options)
    if done.returncode:
        raise SystemExit(f"{done.args} failed:\n{done.stdout}")
    return done.stdout


def venv(folder: Path, *requirements: str | Path) -> Path:
    """Make an environment, and return its Python."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements)
    return python


def built(python: Path, folder: Path) -> list[Path]:
    """Build the last commit in a folder of its own, and return wheel and sdist."""
    folder.mkdir()
    archive = folder / "source.tar"
    run("git", "archive", "-o", archive, "HEAD", cwd=ROOT)
    with tarfile.open(archive) as source:
        source.extractall(folder / "source", filter="data")
    moment = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    run(
        *(python, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "source"),
        env={**os.environ, "SOURCE_DATE_EPOCH": moment},
    )
    return sorted((folder / "dist").iterdir())


def digests(wheel: Path) -> dict[str, str]:
    """Return what is in a wheel: the digest of each file."""
    with zipfile.ZipFile(wheel) as files:
        return {
            name: hashlib.sha256(files.read(name)).hexdigest() for name in sorted(files.namelist())
        }


def smoke(python: Path, folder: Path) -> list[str]:
    """Run the examples away from the checkout, and return those that fail."""
    failed = []
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = {**bare, "PERDURE_HOME": str(folder / "home")}
    for name in EXAMPLES:
        command = [python, "-W", "error", ROOT / "examples" / name]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            failed.append(f"{name}: {done.stderr[-500:]}")
    return failed


def measure(folder: Path) -> dict[str, Any]:
    """Build, install and run; return the figures."""
    tools = venv(folder / "tools", "build", "hatchling")
    first, second = built(tools, folder / "first"), built(tools, folder / "elsewhere")
    (sdist,) = (path for path in first if path.name.endswith(".tar.gz"))
    (wheel,) = (path for path in first if path.suffix == ".whl")
    from_sdist = folder / "from_sdist"
    pip = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", from_sdist)
    run(tools, *pip, sdist)
    bare = venv(folder / "bare", wheel)
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    count, size = json.loads(run(bare, "-c", OWN_FILES, env=outside, cwd=folder))
    run(bare, "-c", "from perdure import *", env=outside, cwd=folder)
    return {
        "reproducible": [p.read_bytes() for p in first] == [p.read_bytes() for p in second],
        "wheel_of_sdist_is_the_same": digests(wheel) == digests(next(from_sdist.iterdir())),
        "wheel_bytes": wheel.stat().st_size,
        "sdist_bytes": sdist.stat().st_size,
        "installed_files": count,
        "installed_bytes": size,
        "examples_failed": smoke(bare, folder),
    }


def main() -> int:
    """Print the figures, and return 1 if one of them does not hold."""
    with TemporaryDirectory() as folder:
        figures = measure(Path(folder))
    print(json.dumps(figures, indent=2))
    fine = figures["reproducible"] and figures["wheel_of_sdist_is_the_same"]
    return 0 if fine and figures["installed_bytes"] < MOST and not figures["examples_failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
