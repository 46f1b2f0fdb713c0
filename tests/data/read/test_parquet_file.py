"""A source on the hub, by the real client: what is listed, what is fetched, what is refused."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.read import parquet_file
from data.read.work_units import list_files, list_units, row_groups
from pipeline.errors import InputError, StorageError
from tests.faults.fake_hub import COMMIT, FakeHub, Faults
from tests.faults.hub import content, everything, quick_retries, read_all, table

FILES = {f"sample/10BT/{index}.parquet": content(index) for index in range(3)}
FOOTER = 64 << 10  # what Arrow reads of the end of a file


@pytest.fixture
def hub():
    """Three files, and footers not yet known to this process."""
    parquet_file._footer.cache_clear()
    with FakeHub(FILES) as server, quick_retries():
        yield server


def pattern(hub):
    return f"{hub.source}/sample/10BT/*.parquet"


def column_ranges(data, groups, columns):
    """Begin and end of the chunks of some columns by the footer, as pyarrow sees it here."""
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    found = []
    for group in groups:
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            if column.path_in_schema in columns:
                begin = column.dictionary_page_offset or column.data_page_offset
                found.append((begin, begin + column.total_compressed_size))
    return found


@pytest.mark.parametrize("redirect", [False, True])
def test_the_whole_source_reads_as_it_was_written(redirect):
    """Rows, order and all columns, also where the bytes come from another address."""
    with FakeHub(FILES, redirect=redirect) as hub:
        assert read_all(list_units(pattern(hub), target_bytes=1)).equals(everything())


def test_ids_and_counts_fetch_no_text(hub):
    """No byte of a text chunk is sent for the survey: only footers, ids and counts."""
    units = list_units(pattern(hub), target_bytes=1)
    assert {r[1] - r[0] for name in FILES for r in hub.ranges_of(name)} <= {FOOTER}
    hub.log.clear()
    read_all(units, ("id", "token_count"))
    for name, data in FILES.items():
        sent = hub.ranges_of(name)
        wanted = column_ranges(data, range(3), ("id", "token_count"))
        assert sorted(sent) == sorted(wanted)
        for begin, end in column_ranges(data, range(3), ("text",)):
            assert all(stop <= begin or start >= end for start, stop in sent)


def test_one_row_group_fetches_itself(hub):
    """Reading one of nine row groups sends its chunks; the footer is known from the listing."""
    units = list_units(pattern(hub), target_bytes=1)
    hub.log.clear()
    read_all(units[4:5])
    name = "sample/10BT/1.parquet"
    chunks = column_ranges(FILES[name], [1], ("id", "text", "token_count", "score"))
    sent = hub.ranges_of(name)
    assert sum(stop - start for start, stop in sent) == sum(end - begin for begin, end in chunks)
    assert len(hub.log) == len(sent)


def test_a_worker_lists_nothing(hub):
    """Where the footer is not known it is fetched, and nothing else is asked of the hub."""
    units = list_units(pattern(hub))
    parquet_file._footer.cache_clear()
    hub.log.clear()
    read_all(units[:1])
    assert {request.path.rpartition("/")[2] for request in hub.log} == {"0.parquet"}


def test_a_commit_is_read_and_no_branch(hub):
    """The revision of the address is in every request."""
    read_all(list_units(pattern(hub)))
    assert hub.log
    assert all(COMMIT in request.path for request in hub.log)


def test_a_file_that_was_pushed_again_is_refused(hub):
    """Between the survey and the reading, also on a branch that the client has listed before."""
    branch = pattern(hub).replace(COMMIT, "main")
    units = list_units(branch)
    hub.files["sample/10BT/1.parquet"] = content(7)
    parquet_file._footer.cache_clear()
    with pytest.raises(InputError, match=r"10BT/1\.parquet: the source changed.*pin a revision"):
        read_all(units)
    again = list_units(branch)
    assert read_all(again[1:2]).equals(table(7))


def test_files_are_listed_without_opening_one(hub):
    """Names and sizes, whatever is in the files."""
    hub.files["sample/10BT/9.parquet"] = b"no parquet"
    listed = list_files(pattern(hub))
    assert [(url.partition(f"{COMMIT}/")[2], size) for url, size in listed] == [
        (name, len(data)) for name, data in sorted(hub.files.items())
    ]
    assert not any("/resolve/" in request.path for request in hub.log)


def test_row_groups_are_told_by_the_footer_alone(hub):
    """Rows, text and bytes to fetch, as pyarrow reads them from the bytes."""
    (url, _), *_ = list_files(pattern(hub))
    hub.log.clear()
    data = FILES["sample/10BT/0.parquet"]
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    expected = [
        (
            metadata.row_group(group).num_rows,
            metadata.row_group(group).column(1).total_uncompressed_size,
            sum(end - begin for begin, end in column_ranges(data, [group], table(0).schema.names)),
        )
        for group in range(3)
    ]
    assert row_groups(url) == expected
    assert len([r for r in hub.log if r.start is not None]) == 1


def test_a_failing_store_is_not_taken_for_a_bad_file(hub):
    """What runs out of tries while Arrow reads keeps its type and its words."""
    units = list_units(pattern(hub))
    hub.faults = Faults(1.0, ("503",))
    parquet_file._footer.cache_clear()
    with quick_retries(patience=5.0), pytest.raises(StorageError, match=r"bytes \d+-\d+: failed"):
        read_all(units)
    with quick_retries(patience=5.0), pytest.raises(StorageError, match="HTTP 503"):
        list_units(pattern(hub))
