"""scripts/tiers: which tests are quick, and how the others are written down."""

import sqlite3
from pathlib import Path
from runpy import run_path

ROOT = Path(__file__).resolve().parents[2]


def test_the_most_lines_a_second_are_quick(tmp_path, capsys):
    tiers = run_path(str(ROOT / "scripts" / "tiers"))
    seconds = {"a/test_b::c": 0.1, "a/test_b::wide[x-1]": 300, "a/test_b::wide[y]": 500, "a/test_d/TestE::f": 300}
    rows = [f"{value}\ta\t{test}" for test, value in seconds.items()]
    (tmp_path / "durations.tsv").write_text("\n".join(["seconds\tfolder\ttest", *rows]))
    with sqlite3.connect(tmp_path / "coverage") as database:
        database.execute("create table context (id integer, context text)")
        database.execute("create table line_bits (file_id integer, context_id integer, numbits blob)")
        runs = {"b.py::c|run": 1, "b.py::wide[x-1]|setup": 7, "b.py::wide[y] (call)": 7, "d.py::TestE::f|run": 8}
        for number, (context, bits) in enumerate(runs.items()):
            database.execute("insert into context values (?, ?)", (number, f"tests/a/test_{context}"))
            database.execute("insert into line_bits values (1, ?, ?)", (number, bytes([bits])))
    database.close()
    assert tiers["main"]([str(tmp_path / "durations.tsv"), str(tmp_path / "coverage")]) == 0
    said = capsys.readouterr()
    assert said.out.split() == ["tests/a/test_b.py::wide[y]", "tests/a/test_d.py"]
    assert "2 of 4 tests, 300 s, 3 of 4 lines" in said.err


def test_every_kept_test_is_there():
    kept = run_path(str(ROOT / "scripts" / "tiers"))["KEPT"]
    files = "\n".join(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("**/test_*.py"))
    assert [name for name in kept if name.partition("::")[0].replace("\\", "") not in files] == []
