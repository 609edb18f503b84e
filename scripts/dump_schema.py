"""Writes the golden dump of today's schema, tests/golden/schema/VERSION.sql; run it just before the schema is changed.

Later versions are tested to upgrade it, so it is made once, by the code of its own version.
"""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

from tuning_db import Hardware, Reference, Sample, Scenario, Trial, open_store
from tuning_db.schema import SCHEMA_VERSION

FOLDER = Path(__file__).parents[1] / "tests" / "golden" / "schema"


def main() -> None:
    target = FOLDER / f"{SCHEMA_VERSION}.sql"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuning.db"
        with open_store(path) as store:
            for number, model in enumerate(({"name": "small", "digest": "abc"}, {"digest": "without a name"})):
                machine = Hardware("gpu", {"product": "NVIDIA A100", "count": 4, "driver": None}, host="feed" * 4)
                key = store.ensure(
                    Scenario(machine, "native", {"version": "1.0"}, model, {"name": "é 😀 '"}, {"metric": "t"})
                )
                for each in range(3):
                    ident = f"0190000{number}{each:04x}"
                    stage, status = ("search" if each == 0 else "confirm"), ("ok" if each < 2 else "crash")
                    trial = Trial(ident, key, stage, {"knob": each}, f"c1:{each}", status, metrics={"t": 1.5})
                    store.add(trial, [Sample(ident, 0, {"turn": 0}, 0.1, (0.2, 0.3), 5, 2)][: each % 2])
            store.put_reference(Reference("r1:x", "quality", {"bits": [4, 8]}, bytes(range(64))))
        with sqlite3.connect(path) as raw:
            pragmas = [f"PRAGMA {name}={raw.execute(f'PRAGMA {name}').fetchone()[0]};"
                       for name in ("application_id", "user_version")]  # fmt: skip
            target.write_text("\n".join([*pragmas, *raw.iterdump()]) + "\n", encoding="utf-8")
        raw.close()
    print(target)


if __name__ == "__main__":
    main()
