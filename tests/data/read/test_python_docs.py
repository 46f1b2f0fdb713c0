"""The text inside Python becomes documents."""

import pyarrow as pa
import pytest

from data.read import python_docs
from data.read.byte_ranges import file_state
from data.read.work_units import list_units, read_units
from data.source import python_documentation
from pipeline.errors import InputError


def test_documents_have_ids_texts_and_honest_counts():
    """Ids are unique, no text is empty, and token_count is the rounded quarter of the bytes."""
    table = python_docs.documents()
    assert table.schema.names == ["id", "text", "token_count"]
    ids, texts = table["id"].to_pylist(), table["text"].to_pylist()
    assert len(set(ids)) == len(ids) > 300
    assert all(text.strip() for text in texts)
    assert table["token_count"].to_pylist() == [round(len(t.encode()) / 4) for t in texts]
    assert sum(len(text) for text in texts) > 1_000_000


def test_a_docstring_is_kept_where_it_occurs_first(tmp_path):
    """Text that two modules share is in the first of them by path, and nowhere else."""
    shared, own = "shared " * 9, "own text " * 9
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.py").write_text(f'"""{shared}"""\ndef f():\n    """{own}"""\n')
    (tmp_path / "a.py").write_text(f'"""{shared}"""\n')
    (tmp_path / "c.py").write_text(f'"""{shared}"""\n')
    assert list(python_docs.module_documents(tmp_path)) == [
        ("Lib/a.py", shared.strip()),
        ("Lib/b/x.py", own.strip()),
    ]


def test_docstrings_come_in_source_order_and_short_ones_are_dropped():
    """Nested docstrings follow their owners; one of 40 characters is too short, 41 is not."""
    source = '''
"""{m}"""
def f():
    """{f}"""
    class Inner:
        """{i}"""
async def g():
    """{short}"""
class C:
    """{c}

        indented
    """
'''.format(m="m" * 41, f="f" * 41, i="i" * 41, short="s" * 40, c="c" * 41)
    found = list(python_docs.docstrings(source))
    assert [text[0] for text in found] == ["m", "f", "i", "c"]
    assert found[3] == "c" * 41 + "\n\nindented"


def test_clean_topic_removes_markup_and_keeps_prose():
    """Underlines, labels and index entries go; a table of dashes inside a line stays."""
    raw = (
        "\n.. _label:\n.. index:: single: x\n\nTitle\n*****\n\n\n\nProse -- with dashes --- kept.\n"
    )
    assert python_docs.clean_topic(raw) == "Title\n\nProse -- with dashes --- kept."


def test_another_python_version_is_refused():
    """The message says both versions."""
    running = python_documentation().removeprefix("python-docs://")
    with pytest.raises(InputError, match=r"3\.1\.4") as error:
        list_units("python-docs://3.1.4")
    assert running in str(error.value)


def test_the_file_in_the_cache_is_read_like_any_other(tmp_path, monkeypatch):
    """It is written once, in eight row groups, and has one version on every host."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    python_docs.written.cache_clear()
    try:
        (unit,) = list_units(python_documentation())
        columns = ["id", "text", "token_count"]
        found = pa.Table.from_batches(list(read_units([unit], columns)))
        assert found.equals(python_docs.documents())
        assert (len(unit.row_groups), unit.version) == (8, "0")
        (file,) = (tmp_path / "ponente").iterdir()
        python_docs.written.cache_clear()
        assert file_state(python_documentation()) == (file.stat().st_size, "0")
        assert python_docs.written(python_documentation()) == str(file)
    finally:
        python_docs.written.cache_clear()
