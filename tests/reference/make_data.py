"""Writes the data files of tests/reference/data: the same records in Parquet, as an Arrow stream and as an Arrow file.

Made with Python 3.11 and pyarrow 26.0.1.
"""

import pathlib

import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet

RECORDS = {
    "text": pyarrow.array(["one", "zwei, \"drei\"", "語\nline", None]),
    "large": pyarrow.array(["a", "b", "c", "d"], pyarrow.large_string()),
    "label": pyarrow.array(["no", "yes", "no", None]).dictionary_encode(),
    "count": pyarrow.array([1, -2, None, 2**40], pyarrow.int64()),
    "score": pyarrow.array([0.5, -1.25, 3.0, None], pyarrow.float32()),
    "good": pyarrow.array([True, False, None, True]),
    "input_ids": pyarrow.array([[1, 2], [], None, [3]], pyarrow.list_(pyarrow.int32())),
    "messages": pyarrow.array(
        [
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}],
            [],
            None,
            [{"role": "user", "content": None}],
        ]
    ),
    "day": pyarrow.array([0, 1, 2, 3], pyarrow.date32()),
    "image": pyarrow.array([b"\xff", b"", None, b"x"]),
}


def main():
    out = pathlib.Path(__file__).parent / "data"
    out.mkdir(exist_ok=True)
    table = pyarrow.table(RECORDS)
    pyarrow.parquet.write_table(table, out / "records.parquet", compression="zstd", row_group_size=3)
    pyarrow.parquet.write_table(table, out / "snappy.parquet", compression="snappy", version="1.0")
    for codec in ["brotli", "lz4", "gzip"]:
        pyarrow.parquet.write_table(table, out / f"{codec}.parquet", compression=codec)
    with pyarrow.ipc.new_stream(out / "stream.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    with pyarrow.ipc.new_file(out / "file.arrow", table.schema) as writer:
        writer.write_table(table)
    with pyarrow.ipc.new_file(out / "compressed.arrow", table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)


if __name__ == "__main__":
    main()
