"""The wheel holds the whole package and works on its own, and the pins agree with the ranges."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDERS = {"bayesfed": "bayesfed", "models": "bayesfed/models", "guides": "bayesfed/guides"}
PACKAGES = ["bayesfed"] + [
    f"bayesfed.{part}"
    for part in (
        *("algorithms", "cli", "data", "deploy", "elbo", "engine", "formulas", "guides", "models"),
        *("output", "tracing"),
    )
]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.args} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build/ left in the tree would add files that are gone."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source),
        cwd=out,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    expected = {"bayesfed/__init__.pyi", "bayesfed/py.typed"}
    expected |= {"bayesfed/deploy/flower_app/pyproject.toml"}
    expected |= {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "bayesfed/cli/starter").iterdir()
    }
    assert "bayesfed/cli/starter/model.py.txt" in expected
    for folder, installed in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            expected.add(f"{installed}/{path.relative_to(ROOT / folder).as_posix()}")
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {f"{package.replace('.', '/')}/__init__.py" for package in PACKAGES} <= files
    assert files == expected


def test_wheel_says_what_it_is(wheel: Path, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"datasets", "partitioners", "docs", "test", "dev"} <= extras
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert "bayesfed = bayesfed.cli.app:main" in archive.read(name).decode()


def test_installed_wheel_works_without_the_tree(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
        *("--disable-pip-version-check", "--target", target, wheel),
        cwd=elsewhere,
    )
    # PYTHONPATH precedes an editable installation of the tree, and the printed files prove it.
    files = run(
        sys.executable,
        "-c",
        "import importlib, sys\n"
        "for name in sys.argv[1:]: print(importlib.import_module(name).__file__)",
        *PACKAGES,
        "bayesfed.cli.app",
        cwd=elsewhere,
        PYTHONPATH=str(target),
    ).splitlines()
    assert len(files) == len(PACKAGES) + 1
    assert all(Path(file).resolve().is_relative_to(target.resolve()) for file in files), files
    script = target / "bin" / "bayesfed"
    if os.name == "posix":
        assert "run" in run(script, "--help", cwd=elsewhere, PYTHONPATH=str(target))


def test_every_direct_dependency_is_pinned_within_its_range(metadata: Message) -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            assert [clause.operator for clause in pin.specifier] == ["=="], line
            pins[canonicalize_name(pin.name)] = pin
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    assert required
    for requirement in required:
        if requirement.name == "bayesfed":  # one extra that includes another
            continue
        assert canonicalize_name(requirement.name) in pins, f"{requirement.name} has no pin"
        (clause,) = pins[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(clause.version), f"{requirement} excludes {clause}"


def test_oldest_versions_are_the_lower_bounds(metadata: Message) -> None:
    lines = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        canonicalize_name(pin.name): str(pin.specifier)[2:]
        for pin in map(Requirement, filter(None, (line.partition("#")[0] for line in lines)))
    }
    bounds = {}
    for required in map(Requirement, metadata.get_all("Requires-Dist", [])):
        if required.marker is None or str(required.marker) == 'extra == "datasets"':
            for clause in required.specifier:
                if clause.operator == ">=":
                    bounds[canonicalize_name(required.name)] = clause.version
    assert len(bounds) > 10 and pins == bounds


def test_version_is_the_installed_one(metadata: Message) -> None:
    assert metadata["Version"] == importlib.metadata.version("bayesfed")
