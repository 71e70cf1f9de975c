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
from ..testing.families import FAMILIES
from .cases import CASES
from .suite import ROW_KEYS, SCHEMA, Row

COLUMNS = {
    "head": ("B", "provider", "us", "p20-p80", "GB/s", "% of read", "x matmul", "extra memory", "speed-up"),
    **dict.fromkeys(("filters", "qrita"), ("B", "provider", "us", "p20-p80", "GB/s", "x amax", "extra memory", "speed-up")),
    "e2e": ("B", "provider", "us", "p20-p80", "x decoder", "extra memory", "speed-up"),
    "vllm": ("B", "provider", "us", "p20-p80", "x decoder", "host us", "taken", "speed-up"),
    "tp": ("B", "provider", "us", "p20-p80", "x matmul", "bytes a row", "extra memory", "speed-up"),
}
"""Of a suite's tables, by its stem. An unknown suite gets the head's."""

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


def stem(record: dict[str, Any]) -> str:
    """The suite's name without the number of ranks behind it."""
    name = str(record.get("suite", ""))
    return name.rstrip("0123456789") if name.startswith("tp") else name


def title(record: dict[str, Any]) -> str:
    """What ran where, in one line."""
    names = (
        ("driver", "driver "),
        ("torch", "torch "),
        ("triton", "triton "),
        ("vllm", "vLLM "),
        ("commit", "commit "),
        ("date", ""),
    )
    parts = [record.get("gpu", "unknown GPU"), *(f"{prefix}{record[key]}" for key, prefix in names if key in record)]
    return ", ".join(parts)


def subject(row: Row) -> str:
    """What a row is about: the models whose head it is and its shape, or the family of logits and V."""
    case, vocab, depth = row["case"], row["V"], row["D"]
    if depth == 0:
        about = f" ({FAMILIES[case].about})" if case in FAMILIES else ""
        return f"{case}{about}, {vocab:,} logits"
    return f"{next((c.models for c in CASES if c.name == case), case)}, {vocab:,} x {depth:,}"


def groups(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, str], list[Row]]]:
    """The rows of each case and mode, in the order of their first row."""
    keys = list(dict.fromkeys((row["case"], row["mode"]) for row in rows))
    for key in keys:
        yield key, [row for row in rows if (row["case"], row["mode"]) == key]


def tables(record: dict[str, Any]) -> Group:
    """A table for each case and mode: time, spread, bandwidth, ratio to the floor, memory, speed-up."""
    columns = COLUMNS.get(stem(record), COLUMNS["head"])
    heading = [title(record)]
    if "read_gbps" in record:
        heading.append(f"reads {record['read_gbps']:,.0f} GB/s and multiplies at {record['matmul_tflops']:,.0f} TFLOP/s")
    if "error" in record:
        heading.append(f"incomplete: {record['error']}")
    return Group(Text("; ".join(heading)), *(_table(rows, columns) for _, rows in groups(record["rows"])))


def _table(rows: list[Row], columns: Sequence[str]) -> Table:
    out = Table(title=f"{subject(rows[0])}, {rows[0]['mode']}", title_justify="left")
    for name in columns:
        out.add_column(name, justify="left" if name == "provider" else "right", no_wrap=True)
    for batch, cell in groupby(rows, key=lambda row: row["B"]):
        for position, row in enumerate(cell):
            texts = _texts(row) | {"B": "" if position else str(batch)}
            out.add_row(*(texts[name] for name in columns), style="bold" if row["provider"].startswith("nologits") else "")
        out.add_section()
    return out


def _texts(row: Row) -> dict[str, str]:
    """Every column of every suite but B."""
    memory = row.get("extra_bytes")
    return {
        "provider": row["provider"],
        "us": f"{row['us']:.1f}" + ("" if row.get("captured", True) else " *"),
        "p20-p80": f"{row['p20_us']:.0f}-{row['p80_us']:.0f}",
        "GB/s": _number(row.get("gbps"), ",.0f"),
        "% of read": _number(row.get("bandwidth_share"), ".1%"),
        "x matmul": _number(row["ratio_to_matmul"], ".3f"),
        "x decoder": _number(row.get("ratio_to_decoder"), ".3f"),
        "x amax": _number(row.get("ratio_to_amax"), ".2f"),
        "bytes a row": _number(row.get("bytes_per_row"), ",d"),
        "host us": _number(row.get("host_us"), ".0f"),
        "taken": _number(row.get("taken_share"), ".0%") + (" !" if row.get("fallbacks") or row.get("errors") else ""),
        "extra memory": "" if memory is None else megabytes(memory),
        "speed-up": _number(row.get("speedup"), ".2f", "x"),
    }


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def write_csv(record: dict[str, Any], path: Path) -> None:
    """Writes the rows as CSV with a header line; null is an empty field."""
    fields = dict.fromkeys([*ROW_KEYS, *(key for row in record["rows"] for key in row)])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(fields))
        writer.writeheader()
        writer.writerows(record["rows"])
