"""Files and folders of a user beside checkpoints: nothing that this package has not made is ever deleted."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import STATE, checkpoint, names, truncate_state, two_saved
from helpers.properties import examples
from helpers.reference import training
from variable_batch_size.checkpoint.format import MANIFEST

# What a folder holds by path: contents of a file, target of a link, or None for an empty folder.
Tree = dict[str, "bytes | str | None"]

updates = st.sampled_from(["00000000", "00000001", "00000002", "00000003", "00000009", "123456789", "1", "0000000003"])
revisions = st.sampled_from(["", "-1", "-2", "-0", "-01"])
hidden = st.sampled_from([".{}.part", ".{}.old", ".{}", ".{}.bak", ".{}-notes", ".{}.part.txt"])
numbered = st.builds(lambda update, revision: f"update-{update}{revision}", updates, revisions)
visible = st.sampled_from(["{}", "{}.bak", "{}-best", "{}.part", "notes-{}"])
foreign_names = st.one_of(
    st.builds(lambda form, name: form.format(name), hidden, numbered),
    st.builds(lambda form, name: form.format(name), visible, numbered),
    st.sampled_from(["best.pt", STATE, MANIFEST, ".update-", ".update-notes", "update-", ".lock.txt"]),
)
contents = st.sampled_from([b"", b"{}", b"a user's"])


@st.composite
def foreign_folders(draw: st.DrawFn) -> Tree:
    """A folder with something else than the two files of a checkpoint, or with one of them as a link or a folder."""
    tree: Tree = {name: draw(contents) for name in draw(st.sets(st.sampled_from([STATE, MANIFEST])))}
    other: Tree = draw(st.sampled_from([{"notes.txt": b"mine"}, {f"a/{STATE}": b"mine"}, {"b": None}, {".c": b""}]))
    strange: Tree = draw(st.sampled_from([{STATE: "nowhere"}, {STATE: None}, {f"{MANIFEST}/a": b"mine"}]))
    return draw(st.sampled_from([tree | other, {**other, MANIFEST: b"{}"}, strange, {**strange, "notes.txt": b""}]))


foreign = st.dictionaries(foreign_names, st.one_of(contents, st.just("nowhere"), foreign_folders()), max_size=6)


def put(path: Path, what: Any) -> None:
    if isinstance(what, dict):
        path.mkdir(parents=True, exist_ok=True)
        for name, part in what.items():
            put(path / name, part)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if what is None:
        path.mkdir()
    elif isinstance(what, str):
        path.symlink_to(what)
    else:
        path.write_bytes(what)


def tree(path: Path) -> Any:
    """Return what is at a path, recursively."""
    if path.is_symlink():
        return str(path.readlink())
    if path.is_dir():
        return {child.name: tree(child) for child in path.iterdir()}
    return path.read_bytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_saved(tmp_path_factory.mktemp("saved") / "saved")


@pytest.mark.slow("saves for many examples")
@examples(150)
@given(foreign, st.integers(1, 2), st.booleans(), st.booleans())
def test_nothing_foreign_disappears(saved: Path, others: dict[str, Any], keep: int, wait: bool, damage: bool) -> None:
    with TemporaryDirectory() as place:
        folder = Path(place, "saved")
        shutil.copytree(saved, folder)
        if damage:
            truncate_state(folder / "update-00000001")
        others = {name: what for name, what in others.items() if not (folder / name).exists()}
        for name, what in others.items():
            put(folder / name, what)
        before = {name: tree(folder / name) for name in others}
        run = training()
        with warnings.catch_warnings(), checkpoint(folder, run, keep=keep) as saves:
            warnings.simplefilter("ignore", RuntimeWarning)  # foreign entries are reported as damaged checkpoints
            assert saves.restore()
            assert run.optimizer.updates == 2
            for _ in range(3):
                run.run(1)
                saves.save(wait)
        assert {name: tree(folder / name) for name in others} == before
        ours = [name for name in names(folder) if name not in others]
        assert len([name for name in ours if not name.startswith(".")]) <= keep + len(others)
        assert all(name.startswith("update-") for name in ours)
        with checkpoint(folder, training()) as saves:
            assert saves.latest is not None
            assert saves.latest.name.startswith("update-00000005")


def test_a_damaged_manifest_keeps_its_checkpoint(tmp_path: Path) -> None:
    folder = two_saved(tmp_path / "saved")
    (folder / "update-00000001" / MANIFEST).write_text("{}")
    run = training()
    with checkpoint(folder, run, keep=1) as saves:
        saves.restore()
        run.run(1)
        saves.save()
    assert names(folder) == ["update-00000001", "update-00000003"]


def test_a_file_of_another_program_that_is_called_as_the_lock_stays(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("poetry")
    checkpoint(tmp_path, training()).close()
    assert (tmp_path / ".lock").read_text() == "poetry"
