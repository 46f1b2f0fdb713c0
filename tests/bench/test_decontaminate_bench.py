"""What the benchmark of decontamination measures is what it says."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from tests.bench import decontaminate


def test_every_part_reads_all_documents(tmp_path, monkeypatch, capsys):
    """And items that were taken from documents are found in these."""
    texts = [" ".join(f"word{number}x{n}" for n in range(80)) for number in range(20)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    command = ["bench", "--corpus", str(tmp_path / "*.parquet"), "--items", "6"]
    monkeypatch.setattr("sys.argv", command)
    decontaminate.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rates = {line["part"]: line for line in lines if "cpu_seconds" in line}
    assert {name: rate["documents"] for name, rate in rates.items()} == {
        **{"table": 6, "search": 20, "document": 20, "span": 20, "score": 20}
    }
    (found,) = (line["documents_with_hits"] for line in lines if "documents_with_hits" in line)
    assert 1 <= found <= 3
    assert found == next(
        line["dropped"] for line in lines if line.get("part") == "document" and "dropped" in line
    )
