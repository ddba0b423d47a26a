"""`--fail_if` and the exit status, of made-up records."""

import re
import shlex
import shutil

import jsonschema
import pytest
import yaml

from accbench import cli
from accbench.comparing import plan
from accbench.recording import records
from accbench.report import comparison
from tests.conftest import ROOT
from tests.report import fakes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """ddp, inductor at 1.25 and xla at 0.5 of its speed; all judged."""
    return fakes.write(tmp_path_factory.mktemp("conditions") / "fake")


def report(folder, fail_if: str, capsys) -> tuple[int, list[str]]:
    status = cli.main(["report", str(folder), f"--fail_if={fail_if}"])
    return status, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("fail_if", "holding"),
    [
        ("xla slower", ["xla slower"]),
        ("xla slower,  inductor   faster,", None),
        ("xla slower, inductor slower,inductor faster", ["xla slower", "inductor faster"]),
        ("xla not faster, inductor not faster", ["xla not faster"]),
        ("xla slower than 0.9, xla slower than .4", ["xla slower than 0.9"]),
        # Its interval is about 1.24 to 1.26: that it is beyond a number within is not shown.
        ("inductor faster than 1.25, inductor slower than 1.25x", []),
        ("inductor faster than 1.2", ["inductor faster than 1.2"]),
        ("xla differs, ddp differs, xla not checked, xla not valid, ddp failed", []),
    ],
)
def test_conditions_that_hold(folder, fail_if, holding, capsys):
    status, lines = report(folder, fail_if, capsys)
    if holding is None:
        assert status == 2
        return
    assert [re.search("--fail_if '(.*?)' holds", line)[1] for line in lines] == holding
    assert status == (3 if holding else 0)


def test_the_line_has_the_numbers(folder, capsys):
    _, (line,) = report(folder, "xla slower", capsys)
    assert re.fullmatch(
        r"accbench report: --fail_if 'xla slower' holds: 0\.50\dx the speed of ddp, "
        r"95 % interval 0\.5\d+ to 0\.5\d+",
        line,
    )


@pytest.mark.parametrize(
    ("fail_if", "told"),
    [
        ("jax slower", "'jax slower' begins with none of the rows: ddp, inductor, xla"),
        (
            "xla slowest",
            "after xla comes one of: slower, faster, not faster, differs, not checked, ",
        ),
        ("xla slower than ddp", "after xla comes one of: "),
        ("xla", "after xla comes one of: "),
        ("", "begins with none of the rows"),
        ("ddp slower", "ddp is the baseline, which has no speedup"),
    ],
)
def test_wrong_conditions_get_a_line(folder, fail_if, told, capsys):
    status, (line,) = report(folder, fail_if, capsys)
    assert status == 2
    assert told in line


def test_rows_that_are_not_judged(tmp_path, capsys):
    """They neither are slower nor pass; a condition that holds comes first."""
    folder = fakes.write(tmp_path)
    at = comparison.round_folder(folder, 3, fakes.plan().rows[2])
    fakes.write_run(at, [records.EndRecord("oom", "no memory\nat all")])
    assert report(folder, "xla slower, xla slower than 0.9, xla not faster", capsys) == (1, [])
    status, (line,) = report(folder, "inductor slower, xla not valid", capsys)
    assert status == 3
    assert "xla is not valid (round 3 of xla failed (oom): no memory at all" in line
    wrong = fakes.numerics("inductor", 0.5)
    fakes.write_run(folder / "numerics" / "inductor", wrong)
    status, (line,) = report(folder, "inductor faster,inductor differs", capsys)
    assert status == 3
    assert "inductor's training differs (" in line


def test_training_that_was_not_checked_does_not_pass_unseen(tmp_path, capsys):
    folder = fakes.write(tmp_path)
    shutil.rmtree(folder / "numerics")
    assert report(folder, "xla differs", capsys) == (0, [])
    status, (line,) = report(folder, "xla differs, xla not checked", capsys)
    assert status == 3
    assert "'xla not checked' holds: xla's training was not checked (" in line


def test_runs_are_no_comparisons(folder, capsys):
    status, (line,) = report(folder / "rounds" / "01" / "ddp", "ddp failed", capsys)
    assert status == 2
    assert "--fail_if is for comparisons" in line


def test_a_damaged_comparison_hides_no_good_one(folder, tmp_path, capsys):
    damaged = fakes.write(tmp_path / "damaged")
    (damaged / comparison.PLAN_FILE).write_text("{")
    assert cli.main(["report", str(folder), str(damaged), "--fail_if=xla slower"]) == 2
    out, err = capsys.readouterr()
    assert "inductor is faster" in out
    (line,) = err.splitlines()
    assert str(damaged) in line


# The part of a workflow's form that the example uses.
WORKFLOW = {
    "required": ["name", "on", "jobs"],
    "properties": {
        "on": {"type": "array"},
        "jobs": {
            "additionalProperties": {
                "required": ["runs-on", "steps"],
                "properties": {"steps": {"items": {"anyOf": [{"required": ["run"]},
                                                             {"required": ["uses"]}]}}},
            }
        },
    },
}  # fmt: skip


def test_the_workflow_of_the_page_asks_what_compare_takes():
    page = (ROOT / "docs" / "compare.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    workflow = yaml.safe_load(text)
    workflow["on"] = workflow.pop(True)  # YAML 1.1 reads `on` so
    jsonschema.validate(workflow, WORKFLOW)
    steps = workflow["jobs"]["compare"]["steps"]
    (command,) = [step["run"] for step in steps if "accbench compare" in step.get("run", "")]
    words = shlex.split(command.split(">")[0].replace("my_nets:net", "tests.nets:tiny"))
    assert words[:2] == ["accbench", "compare"]
    request = plan.parse([*words[2:], "--device=cpu"], "accbench compare")
    assert request.format == "json"
    conditions = ["jax differs", "jax not checked", "jax slower than 0.9"]
    assert list(map(str, request.conditions)) == conditions
