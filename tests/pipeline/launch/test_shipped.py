"""What a launch sends: the files that git would, and their commit."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from pipeline.errors import InputError
from pipeline.launch import shipped
from tests.pipeline.launch import pod_toy
from tests.pipeline.launch.imitated import IMITATED, TOOL


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def git(root: Path, *words: str) -> str:
    """Git's answer in a repository, as nobody in particular."""
    named = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *named, *words], cwd=root, capture_output=True, check=True)
    return done.stdout.decode().strip()


DATA = (
    "store/tokens-0123456789abcdef0123/attempts/a/x",
    "store/index/y",
    "env/pyvenv.cfg",
    "env/lib/x.py",
    "launch/old.code.tar.gz",
)


@pytest.fixture
def checkout(tmp_path):
    """A checkout with tracked, new, ignored and deleted files, a store and an environment."""
    root = tmp_path / "project"
    write(root, "Makefile", "steps/mine.py", "gone.py", ".env", "wandb/run.log", "new one.py")
    write(root, ".github/ci.yaml", *DATA)
    (root / "link").symlink_to("steps")
    (root / ".gitignore").write_text(".env\nwandb/\n")
    git(root, "init", "-q")
    git(root, "add", "Makefile", "steps", "gone.py", "link", ".github", ".gitignore")
    git(root, "commit", "-q", "-m", "m")
    (root / "gone.py").unlink()
    return root


SENT = [".github/ci.yaml", ".gitignore", "Makefile", "link", "new one.py", "steps/mine.py"]


def test_what_git_ignores_is_not_sent(checkout):
    """New files are; deleted ones, stores, environments and generated files are not."""
    assert shipped.listed(str(checkout)) == SENT
    assert shipped.listed(str(checkout / "steps")) == ["mine.py"]


def test_a_repository_in_another_one_is_sent_by_its_own_rules(checkout):
    """As for a submodule, or a library that is cloned into the project."""
    inner = checkout / "library"
    write(inner, "code.py", ".env")
    (inner / ".gitignore").write_text(".env\n")
    git(inner, "init", "-q")
    assert shipped.listed(str(checkout)) == sorted([*SENT, "library/.gitignore", "library/code.py"])
    git(inner, "add", "code.py")
    git(inner, "commit", "-q", "-m", "m")
    git(checkout, "add", "library")
    assert "library/code.py" in shipped.listed(str(checkout))
    assert "library/.env" not in shipped.listed(str(checkout))


def test_a_file_that_is_tracked_is_sent_from_anywhere(checkout):
    """Also from what looks like a store: git would send it."""
    git(checkout, "add", "-f", DATA[0])
    assert DATA[0] in shipped.listed(str(checkout))


def test_outside_a_checkout_names_with_a_dot_are_not_sent(tmp_path):
    """Nor stores, environments and generated files."""
    write(tmp_path, "Makefile", "steps/mine.py", ".env", "steps/.cache/x", *DATA)
    (tmp_path / "link").symlink_to("steps")
    assert shipped.listed(str(tmp_path)) == ["Makefile", "link", "steps/mine.py"]


@pytest.mark.parametrize(
    ("variable", "value"), [("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1"), ("PATH", "")]
)
def test_a_checkout_that_git_does_not_list_is_refused(checkout, monkeypatch, variable, value):
    """Of another owner, or without git: never sent as if it were no checkout."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(InputError, match=r"git does not list .*project: "):
        shipped.listed(str(checkout))


def test_too_much_is_refused_with_the_place(checkout, monkeypatch):
    """A folder of data that git does not ignore."""
    monkeypatch.setattr(shipped, "_MOST_BYTES", 1000)
    (checkout / "corpus").mkdir()
    (checkout / "corpus" / "big").write_bytes(b"x" * 2000)
    with pytest.raises(InputError, match="corpus has 0 of it: move it, or add it to"):
        shipped.listed(str(checkout))


def test_the_digest_changes_with_every_file(checkout):
    """With the content, the name and a link's target."""
    root = str(checkout)
    found = {shipped.digest(shipped.listed(root), root)}
    (checkout / "Makefile").write_text("other")
    found.add(shipped.digest(shipped.listed(root), root))
    (checkout / "Makefile").rename(checkout / "makefile")
    found.add(shipped.digest(shipped.listed(root), root))
    (checkout / "link").unlink()
    (checkout / "link").symlink_to("other")
    found.add(shipped.digest(shipped.listed(root), root))
    assert len(found) == 4


@pytest.mark.slow
def test_go_sends_the_code_with_its_commit_and_the_scripts(checkout, tmp_path, monkeypatch, typed):
    """By the command line with imitated tools: what the machines unpack, and the last call."""
    toy = Path(pod_toy.__file__)
    (checkout / "toy.py").write_text(toy.read_text())
    git(checkout, "add", "toy.py")
    git(checkout, "commit", "-q", "-m", "toy")
    (checkout / "toy.py").write_text(toy.read_text() + "# mine\n")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in IMITATED:
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("LAB", str(tmp_path))
    monkeypatch.chdir(checkout)
    words = ["--on", "queued", "--zone", "us-east5-b", "--prefix", "gs://b/x", "--go"]
    status, out, err = typed("launch", "toy.py", *words)
    assert status == 0, out + err
    send, make = (tmp_path / "calls").read_text().splitlines()
    assert send.startswith(
        "gcloud storage cp launch/on-hosts.code.tar.gz gs://b/x/launch/on-hosts/code-"
    )
    assert make.startswith("gcloud compute instances create on-hosts-head ")
    with tarfile.open(checkout / "launch" / "on-hosts.code.tar.gz") as archive:
        names = archive.getnames()
        record = json.load(archive.extractfile("provenance.json"))
    scripts = ["launch/on-hosts.head.sh", "launch/on-hosts.host.sh"]
    assert sorted(names) == sorted([*SENT, "toy.py", *scripts, "provenance.json"])
    assert record["commit"] == git(checkout, "rev-parse", "HEAD")
    assert "+# mine" in record["uncommitted"]
