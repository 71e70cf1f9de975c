"""A record as a table, as CSV, and read back from its JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..cli.console import UserError, megabytes
from .cases import CASES
from .providers import OURS
from .suite import EXTRA_KEYS, ROW_KEYS, SCHEMA

Row = dict[str, Any]

COLUMNS = ("B", "provider", "us", "p20-p80", "GB/s", "% of read", "x matmul", "extra memory", "speed-up")
_PLOTTED = ("case", "V", "D", "B", "provider", "mode", "us", "p20_us", "p80_us", "ratio_to_matmul")
"""Of a row's keys, what reading a file insists on: results of explorations lack some of the others."""


def load(path: Path) -> dict[str, Any]:
    """Reads a record.

    Raises:
        UserError: the file is none.
    """
    try:
        record = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"RECORD must be a JSON file of nologits bench, got {str(path)!r} ({error})") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA or not isinstance(record.get("rows"), list):
        raise UserError(f"RECORD must be a JSON object of schema {SCHEMA}, got {str(path)!r}")
    if not record["rows"] or any(key not in row for row in record["rows"] for key in _PLOTTED):
        raise UserError(f"RECORD must have rows with {', '.join(_PLOTTED)}, got {str(path)!r}")
    return record


def title(record: dict[str, Any]) -> str:
    """What ran where, in one line."""
    names = (("driver", "driver "), ("torch", "torch "), ("triton", "triton "), ("commit", "commit "), ("date", ""))
    parts = [record.get("gpu", "unknown GPU"), *(f"{prefix}{record[key]}" for key, prefix in names if key in record)]
    return ", ".join(parts)


def models(case: str) -> str:
    """The models whose head a case is; its own name if it is none of ours."""
    return next((c.models for c in CASES if c.name == case), case)


def groups(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, str], list[Row]]]:
    """The rows of each case and mode, in the order of their first row."""
    keys = list(dict.fromkeys((row["case"], row["mode"]) for row in rows))
    for key in keys:
        yield key, [row for row in rows if (row["case"], row["mode"]) == key]


def tables(record: dict[str, Any]) -> Group:
    """A table for each case and mode: time, spread, bandwidth, ratio to the matmul, memory, speed-up."""
    heading = [title(record)]
    if "read_gbps" in record:
        heading.append(f"reads {record['read_gbps']:,.0f} GB/s and multiplies at {record['matmul_tflops']:,.0f} TFLOP/s")
    return Group(Text("; ".join(heading)), *(_table(rows) for _, rows in groups(record["rows"])))


def _table(rows: list[Row]) -> Table:
    first = rows[0]
    out = Table(title=f"{models(first['case'])}, {first['V']:,} x {first['D']:,}, {first['mode']}", title_justify="left")
    for name in COLUMNS:
        out.add_column(name, justify="left" if name == "provider" else "right", no_wrap=True)
    for batch, cell in groupby(rows, key=lambda row: row["B"]):
        for position, row in enumerate(cell):
            out.add_row("" if position else str(batch), *_cells(row), style="bold" if row["provider"] in OURS else "")
        out.add_section()
    return out


def _cells(row: Row) -> tuple[str, ...]:
    speedup, ratio, share = row.get("speedup"), row["ratio_to_matmul"], row.get("bandwidth_share")
    memory = row.get("extra_bytes")
    return (
        row["provider"],
        f"{row['us']:.1f}" + ("" if row.get("captured", True) else " *"),
        f"{row['p20_us']:.0f}-{row['p80_us']:.0f}",
        f"{row['gbps']:,.0f}" if "gbps" in row else "",
        "" if share is None else f"{share:.1%}",
        "" if ratio is None else f"{ratio:.3f}",
        "" if memory is None else megabytes(memory),
        "" if speedup is None else f"{speedup:.2f}x",
    )


def write_csv(record: dict[str, Any], path: Path) -> None:
    """Writes the rows as CSV with a header line; null is an empty field."""
    known = (*ROW_KEYS, *EXTRA_KEYS)
    others = {key: None for row in record["rows"] for key in row if key not in known}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*known, *others))
        writer.writeheader()
        writer.writerows(record["rows"])
