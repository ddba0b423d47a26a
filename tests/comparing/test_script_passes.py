"""The numerics passes of scripts whose loops are right, and of other kinds than most."""

import json

from tests.conftest import python

# What the reason says, for a loop that cannot be compared.
NOT_COMPARABLE = {
    "halves": "another optimizer than accelerate was given",
    "twice": "a second one by the same batch",
    "bare": "gives accelerate no loader",
}


def test_right_loops_train_the_same_or_the_verdict_says_why_they_are_not_checked(tmp_path):
    done = python("-m", "tests.comparing.script_passes", tmp_path, "eval", *NOT_COMPARABLE)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["eval"] == ["trains the same", None]
    for case, told in NOT_COMPARABLE.items():
        verdict, reason = found[case]
        assert verdict == "not checked"
        assert told in reason
