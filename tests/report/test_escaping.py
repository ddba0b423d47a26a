"""Names from outside come out of every report as they are, and do nothing there."""

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from accbench import cli
from accbench.recording import records
from accbench.report import comparison, publish
from tests.report import fakes

HOSTILE = (
    "# a|b \\| <img src=x onerror=alert(1)> </td><script>c</script> `d|e` **f** [g](http://h) "
    "_i_ __j__ ~~k~~ $l$ &lt; ![m](n) 'o' \"p\"\n\n- q\n| r | s |\n1. t"
)
SHOWN = " ".join(HOSTILE.split())
OF_MARKDOWN = {"table", "thead", "tbody", "tr", "th", "td", "ul", "li", "p", "strong"}


class Page(HTMLParser):
    """The tags and attributes of a page, its text, and the cells of each row of a table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.rows: list[int] = []
        self._text: list[str] = []
        self.feed(text)
        self.text = " ".join("".join(self._text).split())

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "tr":
            self.rows.append(0)
        elif tag in ("td", "th"):
            self.rows[-1] += 1

    def handle_data(self, data) -> None:
        self._text.append(data)


def markdown(text: str) -> Page:
    """As GitHub would show it, by a real parser."""
    return Page(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text))


def hostile_run(engine: str, number: int) -> list[records.Record]:
    """Whatever a record holds as text."""
    head, *rest = fakes.run(engine, number)
    head = dataclasses.replace(
        head, engine=HOSTILE, model=HOSTILE, device_name=HOSTILE, hostname=HOSTILE,
        compile_cache=HOSTILE, versions={HOSTILE: HOSTILE}, environment={HOSTILE: HOSTILE},
        task={**head.task, HOSTILE: HOSTILE},
    )  # fmt: skip
    return [head, *rest]


@pytest.fixture
def runs(tmp_path) -> list[str]:
    """Two runs, the second of which failed, in folders with hostile names."""
    folders = [tmp_path / f"{HOSTILE} {n}".replace("/", "") for n in (1, 2)]
    fakes.write_run(folders[0], hostile_run("ddp", 1))
    head, *_ = hostile_run("xla", 1)
    head = dataclasses.replace(head, model=f"other {HOSTILE}")
    fakes.write_run(folders[1], [head, records.EndRecord("error", HOSTILE)])
    return [str(folder) for folder in folders]


def hostile_comparison(folder: Path) -> comparison.Comparison:
    rows = tuple(
        dataclasses.replace(row, name=row.name + HOSTILE, reason=HOSTILE)
        for row in fakes.plan().rows
    )
    fakes.write(folder, fakes.plan(rows=rows, baseline="ddp" + HOSTILE))
    for number in range(1, 6):
        for row in rows:
            at = comparison.round_folder(folder, number, row)
            fakes.write_run(at, hostile_run(row.folder, number))
    failed = [fakes.header("xla"), records.EndRecord("error", HOSTILE)]
    fakes.write_run(comparison.round_folder(folder, 5, rows[2]), failed)
    fakes.write_run(comparison.numerics_folder(folder, "xla"), failed)
    return comparison.read(folder, allow_mixed=True)


def test_runs_as_markdown(runs, capsys):
    assert cli.main(["report", *runs, "--format", "md", "--allow_mixed"]) == 0
    page = markdown(capsys.readouterr().out)
    assert page.tags <= OF_MARKDOWN
    assert page.rows == [9, 9, 9]
    assert page.text.count(SHOWN) >= 6
    assert "MIXED model: " in page.text


def test_comparison_as_markdown(tmp_path):
    found = hostile_comparison(tmp_path / "c")
    page = markdown(publish.render([found], "md"))
    assert page.tags <= OF_MARKDOWN
    assert page.rows == [9, 9, 9, 9]
    assert page.text.count(SHOWN) > 10


def test_page(tmp_path):
    found = dataclasses.replace(hostile_comparison(tmp_path / "c"), name=HOSTILE)
    page = Page(publish.render([found], "html"))
    assert not page.tags & {"script", "img", "a", "code"}
    assert not any(name.startswith("on") or name in ("src", "href") for name in page.attributes)
    assert page.text.count(SHOWN) > 10


def test_page_of_runs(runs, capsys):
    assert cli.main(["report", *runs, "--format", "html", "--allow_mixed"]) == 0
    page = Page(capsys.readouterr().out)
    assert not page.tags & {"script", "img", "a", "code"}
    assert page.text.count(SHOWN) > 4


def test_mixed_runs_are_valid_json(runs, capsys):
    assert cli.main(["report", *runs, "--format", "json", "--allow_mixed"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["model"] == HOSTILE
    assert second["error"] == HOSTILE
