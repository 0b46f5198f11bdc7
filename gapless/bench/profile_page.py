"""A profile as one HTML page that needs nothing else: figures as tables, and a timeline."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from gapless.observe.trace import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gapless.observe.trace import Trace

    Table = Sequence[Sequence[str]]

# rows of the timeline by kind of span, from the outside in
_ROWS = {
    Kind.ITERATION: "iteration",
    Kind.PHASE: "phase",
    Kind.PART: "part",
    Kind.UPLOAD: "call",
    Kind.DOWNLOAD: "call",
    Kind.READ: "call",
    Kind.SEAM: "call",
    Kind.GRAPH: "call",
    Kind.STAGE: "stage",
}


def page(trace: Trace, title: str, lines: Sequence[str], tables: Mapping[str, Table]) -> str:
    """Fill the page.

    Args: lines: said above the tables. tables: by their caption, the first row a head.
    """
    template = (files("gapless.bench") / "profile.html").read_text(encoding="utf-8")
    # in a script element only its end and a comment's start would be read as markup
    data = json.dumps(timeline(trace), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": escape(title),
        "lines": "\n".join(f"<p>{escape(line)}</p>" for line in lines),
        "tables": "\n".join(_table(caption, rows) for caption, rows in tables.items()),
        "data": data,
    }
    for name, text in parts.items():
        template = template.replace(f"<!--{name}-->", text)
    return template


def timeline(trace: Trace) -> dict[str, Any]:
    """Return rows of bars: for each its start and length in microseconds, kind and name.

    Kinds and names are indices into lists.
    """
    zero = trace.spans[0].start
    rows: dict[str, list[list[float]]] = {name: [] for name in dict.fromkeys(_ROWS.values())}
    rows["blocking"] = []
    kinds: dict[str, int] = {}
    names: dict[str, int] = {}

    def add(row: str, start: float, end: float, kind: str, name: str) -> None:
        rows.setdefault(row, []).append([
            round(1e6 * (start - zero), 2), round(1e6 * (end - start), 2),
            kinds.setdefault(kind, len(kinds)), names.setdefault(name, len(names)),
        ])  # fmt: skip

    for span in trace.spans:
        add(_ROWS[span.kind], span.start, span.end, span.kind.value, span.name)
    for call in trace.calls:
        add("blocking", call.time, call.time, "blocking", f"{call.name} at {call.site or '?'}")
    for work in trace.work:
        row = f"stream {work.lane}" if trace.sees_kernels else "device"
        add(row, work.start, work.end, "device", work.name)
    return {
        "rows": [{"name": name, "bars": bars} for name, bars in rows.items() if bars],
        "kinds": list(kinds),
        "names": list(names),
    }


def _table(caption: str, rows: Table) -> str:
    head, *body = rows
    columns = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = [
        '<div class="card table">',
        "<table>",
        f"<caption>{escape(caption)}</caption>",
        f"<thead><tr>{columns}</tr></thead>",
        "<tbody>",
    ]
    for first, *others in body:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    return "\n".join([*lines, "</tbody>", "</table>", "</div>"])
