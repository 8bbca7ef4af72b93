"""What the repository itself promises: small files, no paths of one machine, one version, complete pins."""

from __future__ import annotations

import re
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_BYTES = 5_000_000
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Home folders and the folders that build machines work in, in parts, so that this file holds none of them.
_MACHINE_PATH = re.compile(
    rb"(?<![\w.~-])(?:[A-Za-z]:\\Users\\|/(?:" + b"|".join([b"root", b"work", b"home", b"Users"]) + rb")/)\w"
)


def _tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]


def machine_paths(content: bytes) -> list[str]:
    """`line: text` of every absolute path of one machine in a file's content."""
    return [
        f"{number}: {line.strip().decode(errors='replace')[:120]}"
        for number, line in enumerate(content.splitlines(), start=1)
        if _MACHINE_PATH.search(line)
    ]


def test_no_tracked_file_is_large() -> None:
    large = {
        str(path.relative_to(ROOT)): size
        for path in _tracked()
        if (size := path.stat().st_size) > MAX_FILE_BYTES
    }
    assert not large


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    found = [f"{p.relative_to(ROOT)}:{line}" for p in _tracked() for line in machine_paths(p.read_bytes())]
    assert not found, "\n".join(found)


FOLDERS = ("root", "work", "home", "Users")


@pytest.mark.parametrize("folder", FOLDERS)
def test_machine_paths_are_found(folder: str) -> None:
    assert machine_paths(f"x = 1\nopen('/{folder}/someone/x')".encode()) != []
    assert machine_paths(f"file:///{folder}/someone".encode()) != []


@pytest.mark.parametrize("folder", FOLDERS)
def test_other_paths_are_not_machine_paths(folder: str) -> None:
    for text in (
        f"runs/{folder}/x",
        f"https://example.org/{folder}/x",
        f"./{folder}/x",
        f"~/{folder}/x",
        "/etc/hosts",
        f"a /{folder}/ b",
    ):
        assert machine_paths(text.encode()) == [], text
    assert machine_paths(b"C:" + b"\\Users\\someone") != []


#: Extras that stand in environments of their own, and the frozen lists of these.
APART = {"workers": "tests/real/hybrid-requirements.txt"}


def _pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    pins = {}
    for line in lines:
        if line.startswith("#"):
            continue
        # Nothing but a name and a public version: no address, no path, no build tag such as +cpu.
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][0-9a-z.]*)", line)
        assert match, f"{file}: not a plain pin: {line!r}"
        name = canonicalize_name(match[1])
        assert name not in pins, f"{file}: {name} is pinned twice"
        pins[name] = match[2]
    return pins


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    here = chain(*(extras[extra] for extra in extras if extra not in APART))
    groups = [("constraints.txt", [*project["dependencies"], *here])]
    groups += [
        (file, [*project["dependencies"], *extras["serving"], *extras[extra]])
        for extra, file in APART.items()
    ]
    own = canonicalize_name(project["name"])
    for file, wanted in groups:
        pins = _pins(file)
        for requirement in map(Requirement, wanted):
            name = canonicalize_name(requirement.name)
            if name != own:
                assert name in pins, f"{file}: {name} is not pinned"
                assert requirement.specifier.contains(pins[name]), (
                    f"{requirement} against {name}=={pins[name]} of {file}"
                )
        assert own not in pins


def test_every_room_is_packaged_and_typed() -> None:
    packaged = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    rooms = [
        path.parent
        for path in sorted([*ROOT.glob("prfaas_*/__init__.py"), *ROOT.glob("*/prfaas_*/__init__.py")])
        if path.parent.parent.name != "tests"
    ]
    assert {str(room.relative_to(ROOT)) for room in rooms} <= set(packaged["packages"])
    for room in rooms:
        assert (room / "py.typed").is_file(), room.name
        assert (str(room.parent.relative_to(ROOT)) or ".") in packaged["dev-mode-dirs"], room.name


def test_one_version_everywhere() -> None:
    version = PROJECT["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version
    assert citation["license"] == PROJECT["project"]["license"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(version)}\]", changelog, flags=re.MULTILINE)


def test_commands_in_the_documents_exist() -> None:
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    assert {"install", "demo", "test", "lint"} <= targets
    for path in _tracked():
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            named = re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, flags=re.MULTILINE)
            assert set(named) <= targets, f"{path.relative_to(ROOT)}: make {set(named) - targets}"


def test_ci_script_is_executable() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
