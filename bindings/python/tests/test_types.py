"""The stub file: right use passes mypy, wrong use does not (usage.py), and it says what the module has."""

import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).parent.parent


def run(*arguments: str) -> None:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_is_content_with_the_tests_and_with_usage() -> None:
    # Kept in the environment that it is about: a first run reads all of numpy.
    run("mypy", "--strict", "--cache-dir", str(pathlib.Path(sys.prefix) / "mypy-cache"))


def test_the_stubs_match_the_module() -> None:
    run("mypy.stubtest", "armature_kv")
