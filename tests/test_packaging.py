"""An installation is complete: from a wheel, editable, or with the checkout on PYTHONPATH.

Nothing is downloaded. The scratch environments find the dependencies in the environment that runs
the tests, through a ``.pth`` line; that adds its folder to the path without running its own ``.pth``
files, so that an editable jitconv there stays out of sight.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from jitconv import resources

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# One worker builds the wheel once.
pytestmark = pytest.mark.xdist_group("packaging")

PROBE = """
import json, pathlib
import jitconv
from jitconv import resources
print(json.dumps({
    "package": str(pathlib.Path(jitconv.__file__).parent),
    "version": jitconv.__version__,
    "templates": str(resources.templates_root()),
    "cache": str(resources.cache_root()),
}))
"""


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_below(folder: Path) -> set[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix() for path in paths if "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository: building in place would leave files in the real one."""
    copy = tmp_path_factory.mktemp("source") / "jitconv"
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, copy)
    for name in ("jitconv", "templates", "cache", "tests", "examples", ".ci"):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def distributions(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, and the wheel built from it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, checkout, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture
def empty_environment(tmp_path: Path) -> Path:
    """The python of a new environment that has jitconv's dependencies and no jitconv."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    return python


def install(python: Path, *arguments: str | Path, cwd: Path) -> None:
    offline = ("install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "--python", python, *offline, *arguments, cwd=cwd)


def probe(python: Path, cwd: Path, env: Mapping[str, str] | None = None) -> dict[str, str]:
    report: dict[str, str] = json.loads(run(python, "-c", PROBE, cwd=cwd, env=env))
    return report


def assert_complete(report: dict[str, str]) -> None:
    assert files_below(Path(report["templates"])) == files_below(ROOT / "templates")
    assert files_below(Path(report["cache"])) == files_below(ROOT / "cache")


def test_wheel_works_with_no_checkout_in_sight(
    wheel: Path, empty_environment: Path, tmp_path: Path
) -> None:
    install(empty_environment, wheel, cwd=tmp_path)
    report = probe(empty_environment, tmp_path)
    package = Path(report["package"])
    assert tmp_path in package.parents
    assert report["templates"] == str(package / "templates")
    assert report["cache"] == str(package / "cache")
    assert report["version"] == wheel.name.split("-")[1]
    assert_complete(report)


def test_wheel_installs_the_command(wheel: Path, empty_environment: Path, tmp_path: Path) -> None:
    install(empty_environment, wheel, cwd=tmp_path)
    expected = f"jitconv {wheel.name.split('-')[1]}\n"
    assert run(empty_environment.parent / "jitconv", "--version", cwd=tmp_path) == expected
    assert run(empty_environment, "-m", "jitconv", "--version", cwd=tmp_path) == expected


def test_editable_install_reads_the_checkout(
    checkout: Path, empty_environment: Path, tmp_path: Path
) -> None:
    install(empty_environment, "--editable", checkout, cwd=tmp_path)
    report = probe(empty_environment, tmp_path)
    assert report["package"] == str(checkout / "jitconv")
    assert report["templates"] == str(checkout / "templates")
    assert report["cache"] == str(checkout / "cache")
    assert_complete(report)


def test_checkout_on_pythonpath_works_uninstalled(
    checkout: Path, empty_environment: Path, tmp_path: Path
) -> None:
    report = probe(empty_environment, tmp_path, env={"PYTHONPATH": str(checkout)})
    assert report["package"] == str(checkout / "jitconv")
    assert report["templates"] == str(checkout / "templates")
    assert report["cache"] == str(checkout / "cache")
    assert_complete(report)


def test_wheel_holds_every_module(wheel: Path) -> None:
    """A new subpackage that is not listed in pyproject.toml would be left out silently."""
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    modules = {f"jitconv/{name}" for name in files_below(ROOT / "jitconv") if name.endswith(".py")}
    assert packed == modules


def test_wheel_is_marked_as_typed_and_licensed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "jitconv/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_source_archive_can_be_tested(distributions: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"Makefile", "constraints.txt", "constraints-cu12.txt", ".ci/run"}
    wanted |= {f"tests/{name}" for name in files_below(ROOT / "tests")}
    assert wanted - names == set()


def test_missing_folder_names_both_places_and_the_remedy(tmp_path: Path) -> None:
    package = tmp_path / "jitconv"
    with pytest.raises(FileNotFoundError) as caught:
        resources._locate("templates", package)
    message = str(caught.value)
    assert str(package / "templates") in message
    assert str(tmp_path / "templates") in message
    assert "pip install" in message


def test_folder_of_somebody_else_in_site_packages_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    with pytest.raises(FileNotFoundError):
        resources._locate("templates", tmp_path / "jitconv")


@pytest.mark.parametrize(
    ("extra", "constraints"), [("cu13", "constraints.txt"), ("cu12", "constraints-cu12.txt")]
)
def test_every_direct_dependency_has_a_tested_version_in_its_range(
    extra: str, constraints: str
) -> None:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    lines = (ROOT / constraints).read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for text in project["dependencies"] + extras[extra] + extras["dev"]:
        wanted = Requirement(text)
        versions = [
            next(iter(pin.specifier)).version
            for pin in pins
            if pin.name.lower() == wanted.name.lower()
        ]
        assert versions, f"{wanted.name} is not in {constraints}"
        assert all(version in wanted.specifier for version in versions), text
