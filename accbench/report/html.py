"""A comparison as one HTML page without network: the verdict first, then its evidence.

Everything that comes from outside is escaped.
"""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from accbench.report import analysis, charts, comparison_table, verdict
from accbench.report.analysis import ComparisonResult, RowResult
from accbench.report.comparison import Comparison
from accbench.report.run import RecordedRun

_CSS = Path(__file__).with_name("page.css")


def page(comparisons: Sequence[Comparison]) -> str:
    """Render all comparisons on one page."""
    bodies = "".join(_body(comparison, analysis.judge(comparison)) for comparison in comparisons)
    title = escape(", ".join(comparison.name for comparison in comparisons))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>accbench: {title}</title><style>{_CSS.read_text()}</style></head>"
        f"<body><main>{bodies}</main></body></html>\n"
    )


def _body(comparison: Comparison, result: ComparisonResult) -> str:
    rows = [row for row in result.rows if row.name != result.baseline]
    verdicts = "".join(f'<p class="verdict">{_sentence_html(row, result)}</p>' for row in rows)
    setting = " · ".join(
        f"{key} {value}" for key, value in result.setting.items() if value is not None
    )
    mixed = "".join(f'<p class="mixed">mixed: {escape(line)}</p>' for line in result.mixed)
    cards = [
        _card("Speedup", "Geometric mean of the rounds and its 95 % interval; the dashed line "
              f"is the speed of {result.baseline}.", charts.speedups(result)) if rows else "",
        _card("Where a step's time goes", "Wall milliseconds a step after the warm-up: waiting "
              "for data, the host tracing or running the step, waiting for the device.",
              charts.breakdown(comparison)),
        _card("Throughput over steps", "Each line is one round.",
              charts.throughput(comparison)),
        _card("Compile cost and break-even", "Time since the start of a run over the steps done, "
              "with cold caches.", charts.break_even(comparison, result)) if rows else "",
        _card("Loss", *charts.losses(comparison), wide=bool(rows)),
        *_evaluation(comparison),
        _card("Peak memory", "The allocator's peak; on a CPU the process's. Largest of any worker.",
              charts.memory(result)),
        _card("Input", "What the speed would be if data cost nothing.",
              charts.input_cost(result)),
        _card("All numbers", "", _table(result), wide=True),
        _card("Environment and configuration", "", _environment(comparison), wide=True),
    ]  # fmt: skip
    return (
        f"<h1>accbench · {escape(result.name)}</h1>{verdicts}{mixed}"
        f'<p class="setting">{escape(setting)}</p><div class="cards">{"".join(cards)}</div>'
    )


def _evaluation(comparison: Comparison) -> list[str]:
    if not charts.has_evaluations(comparison):
        return []
    what, chart = charts.accuracy(comparison)
    text = f"{what.split()[0].capitalize()} over the whole validation set, after an epoch."
    return [_card("Evaluation", text, chart)]


def _sentence_html(row: RowResult, result: ComparisonResult) -> str:
    """Return the row's sentence, with the verdict's words coloured."""
    text = escape(analysis.sentence(row, result))
    words = {verdict.NO_DIFFERENCE: "no difference was shown", verdict.NOT_VALID: "no valid result",
             verdict.FAILED: "did not run"}.get(row.verdict, row.verdict)  # fmt: skip
    return text.replace(words, f'<b class="{escape(row.verdict)}">{words}</b>', 1)


def _card(title: str, text: str, body: str, wide: bool = False) -> str:
    paragraph = f"<p>{escape(text)}</p>" if text else ""
    return (
        f'<section class="card{" wide" if wide else ""}"><h2>{escape(title)}</h2>{paragraph}'
        f"{body}</section>"
    )


def _table(result: ComparisonResult) -> str:
    left = comparison_table.LEFT

    def cell(tag: str, title: str, text: str) -> str:
        return f"<{tag}{' class=left' if title in left else ''}>{escape(text)}</{tag}>"

    columns = comparison_table.columns(result)
    head = "".join(cell("th", title, title) for title in columns)
    body = "".join(
        f"<tr>{''.join(cell('td', title, get(row)) for title, get in columns.items())}</tr>"
        for row in result.rows
    )
    notes = "".join(f"<li>{escape(line)}</li>" for line in comparison_table.notes(result)[1:])
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f'</div><ul class="notes">{notes}</ul>'
    )


def _environment(comparison: Comparison) -> str:
    parts = []
    for row in comparison.rows:
        run = next((run for run in row.rounds if run.header), None)
        if run is None or run.header is None:
            continue
        parts.append(
            f"<details><summary>{escape(row.name)}</summary>{_facts_html(run)}"
            f"<pre>{escape(json.dumps(run.header.task, indent=1))}</pre></details>"
        )
    return "".join(parts) or '<p class="none">no run began to train</p>'


def _facts_html(run: RecordedRun) -> str:
    assert run.header is not None
    header = run.header
    facts = {
        "device": f"{header.num_devices} x {header.device_name}",
        "machine": header.hostname,
        "threads a worker": header.num_threads,
        "versions": ", ".join(f"{name} {value}" for name, value in header.versions.items()),
        "accbench's commit": header.commit or "not known",
        "environment": ", ".join(f"{k}={v}" for k, v in header.environment.items()) or "-",
        "gradients reduced": header.collectives,
        "compile cache": header.compile_cache,
        "started": header.started_at,
    }
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items())
    return f"<dl>{items}</dl>"
