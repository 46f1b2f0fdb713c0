"""The chat templates that come with the project, and the one in a file of a model."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.errors import InputError

NAMED = ("alpaca", "chatml", "llama3", "zephyr")
"""Templates of ours; the files are in `templates/`."""
_FOLDER = Path(__file__).with_name("templates")


def named_template(name: str) -> str:
    """The text of one of `NAMED`."""
    return (_FOLDER / f"{name}.jinja").read_text()


def template_of(content: bytes, where: str) -> str:
    """The template in the file `where`: a Jinja file, or a tokenizer_config.json that has one."""
    try:
        text = content.decode("utf-8")
        if not where.endswith(".json"):
            return text
        found = json.loads(text).get("chat_template")
        if isinstance(found, list):  # several by name, in older files
            found = {each["name"]: each["template"] for each in found}.get("default")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{where}: expected a chat template or a tokenizer_config.json, found {error}; give "
            f"another file, or one of {', '.join(NAMED)}"
        ) from error
    if not isinstance(found, str):
        raise InputError(
            f"{where}: expected the key 'chat_template', found none; give the model's "
            f"chat_template.jinja, or one of {', '.join(NAMED)}"
        )
    return found
