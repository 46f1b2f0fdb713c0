"""Each set of pinned packages is one that pyproject.toml allows, with one Haliax."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
REQUIRED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def holds(requirement: Requirement, python: str) -> bool:
    """Whether a requirement is one of that Python on Linux."""
    here = {"python_version": python, "python_full_version": f"{python}.1"}
    linux = {"sys_platform": "linux", "platform_machine": "x86_64"}
    return requirement.marker is None or requirement.marker.evaluate(here | linux)


def pins(name: str, python: str) -> dict[str, str]:
    """Versions by package."""
    lines = map(Requirement, (ROOT / name).read_text().splitlines())
    return {
        line.name: str(line.specifier).removeprefix("==") for line in lines if holds(line, python)
    }


@pytest.mark.parametrize(
    ("name", "python", "haliax"),
    [
        ("constraints-oldest.txt", "3.11", "haliax"),
        ("constraints-oldest.txt", "3.12", "marin-haliax"),
        ("constraints-oldest.txt", "3.13", "marin-haliax"),
        ("constraints-newest.txt", "3.12", "marin-haliax"),
        ("constraints-newest.txt", "3.13", "marin-haliax"),
        ("constraints-newest.txt", "3.14", "marin-haliax"),
    ],
)
def test_what_is_required_is_pinned_to_a_version_that_is_allowed(name, python, haliax):
    """And of the two distributions that hold the module `haliax`, one."""
    pinned = pins(name, python)
    for requirement in map(Requirement, REQUIRED):
        if holds(requirement, python):
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), requirement
    assert pinned.keys() & {"haliax", "marin-haliax"} == {haliax}


def test_the_sets_differ_in_what_follows_from_jax_alone():
    """Everything else has the same version, so a difference between runs is JAX's or Haliax's."""
    older, newest = (pins(f"constraints-{name}.txt", "3.12") for name in ("oldest", "newest"))
    different = {name for name in older | newest if older.get(name) != newest.get(name)}
    assert different == {"jax", "jaxlib", "libtpu", "flax"}
