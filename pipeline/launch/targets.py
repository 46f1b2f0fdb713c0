"""Recipes by the value of `--on`."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.launch import gcloud, kuberay, sky
from pipeline.launch.job import Job, Recipe
from pipeline.launch.names import TARGETS

_MADE_BY: tuple[Callable[[Job], Recipe], ...] = (
    sky.recipe,
    kuberay.recipe,
    gcloud.group,
    gcloud.queued,
)
RECIPES = dict(zip(TARGETS, _MADE_BY, strict=True))
