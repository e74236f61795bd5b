"""The shifted clock: what its classes are to code that looks at types."""

import importlib.util
import sys
from datetime import date, datetime

from agentenv.testing.shifted_clock import shifted_clock
from agentenv.tools.arguments import forms_of, read_arguments

ROWS = """
import datetime as dt
from datetime import date, datetime
from pydantic import BaseModel

class Row(BaseModel):
    at: datetime
    day: date | None = None
    seen: dt.datetime | None = None
"""


def test_hints_of_tools_and_tables_by_type_know_dates_while_the_clock_is_shifted(tmp_path):
    (tmp_path / "tools.py").write_text(
        "import datetime\n\ndef book(day: datetime.date, at: datetime.datetime | None = None):\n    return day, at\n"
    )
    spec = importlib.util.spec_from_file_location("tools_with_dates", tmp_path / "tools.py")
    tools = importlib.util.module_from_spec(spec)
    with shifted_clock():
        spec.loader.exec_module(tools)
        assert forms_of(tools.book)["day"].schema == {"type": "string", "format": "date"}
        assert read_arguments(tools.book, {"day": "2026-01-02"}) == {"day": date(2026, 1, 2)}
        assert {date: "day"}[tools.datetime.date] == "day"


def test_models_of_pydantic_keep_dates_while_the_clock_is_shifted(tmp_path):
    (tmp_path / "rows.py").write_text(ROWS)
    spec = importlib.util.spec_from_file_location("rows_of_dates", tmp_path / "rows.py")
    rows = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with shifted_clock():
        spec.loader.exec_module(rows)
        row = rows.Row(at="2026-01-02T03:04:05", day="2026-01-02", seen=rows.datetime.now())
        ahead_s = (row.seen - datetime.now()).total_seconds()
    del sys.modules[spec.name]
    assert (row.at, row.day, type(row.seen)) == (datetime(2026, 1, 2, 3, 4, 5), date(2026, 1, 2), datetime)
    assert ahead_s > 86_400
    assert rows.Row.model_validate_json(row.model_dump_json()) == row
    assert rows.Row.model_json_schema()["properties"]["at"]["format"] == "date-time"
