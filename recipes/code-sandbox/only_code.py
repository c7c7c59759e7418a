"""Of parquet files in verl's schema the tasks whose `ability` is code, as one file.

    python recipes/code-sandbox/only_code.py FILE... --out recipes/code-sandbox/data/train.parquet

Rows are taken as they are: a data set such as PRIME-RL/Eurus-2-RL-Data has `ground_truth` as JSON with
`inputs` and `outputs`, which the reward `code_stdio` reads.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    tables = [pq.read_table(path) for path in options.files]
    chosen = pa.concat_tables([table.filter(pc.equal(table["ability"], "code")) for table in tables])
    if not len(chosen):
        parser.error("no row of these files has the ability code")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(chosen, options.out)
    print(f"{len(chosen)} of {sum(map(len, tables))} rows: {options.out}")


if __name__ == "__main__":
    main()
