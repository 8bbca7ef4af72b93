"""Result folders: whole or absent, and never someone else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas_env.base import PrfaasError
from prfaas_trainings.folders import check_folder, whole_folder

MARKER = "metrics.json"


def fill(out: Path, text: str) -> None:
    with whole_folder(out, MARKER) as folder:
        (folder / MARKER).write_text(text)


def test_absent_and_empty_folders_are_right(tmp_path: Path) -> None:
    check_folder(tmp_path / "new", MARKER, replace=False)
    (tmp_path / "empty").mkdir()
    check_folder(tmp_path / "empty", MARKER, replace=False)


def test_an_earlier_result_needs_leave(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    fill(out, "1")
    with pytest.raises(PrfaasError, match="holds an earlier result; give another folder"):
        check_folder(out, MARKER, replace=False)
    check_folder(out, MARKER, replace=True)
    (out / "left_over.txt").write_text("old")
    fill(out, "2")
    assert (out / MARKER).read_text() == "2"
    assert sorted(p.name for p in out.iterdir()) == [MARKER]
    assert sorted(p.name for p in out.parent.iterdir()) == ["b"]


def test_a_foreign_folder_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for replace in (False, True):
        with pytest.raises(PrfaasError, match=r"is not empty and holds no metrics\.json"):
            check_folder(tmp_path, MARKER, replace=replace)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(PrfaasError, match="is a file"):
        check_folder(tmp_path / "x", MARKER, replace=True)


def test_a_failure_leaves_nothing_new_and_keeps_the_old(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "old")

    def fail() -> None:
        with whole_folder(out, MARKER) as folder:
            (folder / MARKER).write_text("half")
            raise ValueError("plot")

    with pytest.raises(ValueError, match="plot"):
        fail()
    assert (out / MARKER).read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with pytest.raises(PrfaasError, match="not a whole result"), whole_folder(out, MARKER):
        pass
    assert (out / MARKER).read_text() == "old"


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PrfaasError, match="cannot be written"):
        fill(tmp_path / "file" / "out", "x")
