"""Tasks of one's own for lm-evaluation-harness: their files are part of the step's identity."""

from __future__ import annotations

import pickle

import pytest

from pipeline import GangProcess, InputError
from steps.downstream import TaskFolder, Work, harness_process, lm_evaluation
from tests.pipeline.identity.identity_fields import base_arguments, build
from tests.training import tiny


@pytest.fixture
def folder(tmp_path):
    """A task and its data."""
    (tmp_path / "data").mkdir()
    (tmp_path / "mine.yaml").write_text("task: mine\n")
    (tmp_path / "data" / "items.jsonl").write_text("{}\n")
    return tmp_path


def key(include_path):
    arguments = {**base_arguments(lm_evaluation), "include_path": include_path}
    return build(lm_evaluation, arguments).key


def test_changed_files_make_another_output(folder):
    """The YAML, the data, a new file, another name; and back again."""
    found = [key(str(folder))]
    (folder / "mine.yaml").write_text("task: mine\nnum_fewshot: 1\n")
    found.append(key(str(folder)))
    (folder / "data" / "items.jsonl").write_text("{} \n")
    found.append(key(str(folder)))
    (folder / "utils.py").write_text("")
    found.append(key(str(folder)))
    (folder / "utils.py").rename(folder / "other.py")
    found.append(key(str(folder)))
    assert len(set(found)) == 5
    (folder / "other.py").unlink()
    assert key(str(folder)) == found[2]


def test_what_reading_the_tasks_leaves_behind_does_not_count(folder):
    """Python's compiled files, and hidden ones."""
    before = key(str(folder))
    for name in ("__pycache__", ".cache", "data/__pycache__"):
        (folder / name).mkdir()
        (folder / name / "utils.pyc").write_bytes(b"x")
    (folder / ".hidden").write_text("x")
    assert key(str(folder)) == before


def test_a_folder_that_is_not_there_is_refused(folder):
    """When the graph is built, and when the path is a file's."""
    for wrong in (folder / "nowhere", folder / "mine.yaml"):
        with pytest.raises(InputError, match="expected a folder of tasks"):
            key(str(wrong))


def test_files_that_change_while_the_run_goes_on_are_refused(folder):
    """What would be asked is not what the key says."""
    asked = {"tasks": ("mine",), "include_path": TaskFolder.of(str(folder))}
    (folder / "mine.yaml").write_text("task: yours\n")
    work = Work("", tiny.MODEL, tiny.TRAIN, "", asked, None)
    with pytest.raises(InputError, match="changed after the run began"):
        harness_process(work, process=GangProcess(), emit=lambda event: None)


def test_a_worker_finds_the_step():
    """It travels by name, like every step."""
    assert pickle.loads(pickle.dumps(lm_evaluation)) is lm_evaluation  # noqa: S301 - what was just made
