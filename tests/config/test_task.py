"""Flags and YAML to a task."""

import dataclasses
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from accbench import config, resolving
from accbench.comparing import plan
from accbench.config import plugins
from accbench.errors import RequestError
from accbench.recording import run_folder


def test_hyphens_and_underscores_are_the_same():
    a = config.parse(["--batch-size", "4", "--nproc-per-node=2", "--ddp.no-channels-last"])
    b = config.parse(["--batch_size", "4", "--nproc_per_node=2", "--ddp.no_channels_last"])
    assert a == b
    assert (a.batch_size, a.nproc_per_node) == (4, 2)
    assert not a.options["ddp"].channels_last


def test_compiler_opt_is_engine_xla():
    assert config.parse(["--compiler-opt"]) == config.parse(["--engine", "xla"])
    assert config.parse(["--compiler_opt"]).engine == "xla"
    assert config.parse([]).engine == "ddp"


def test_flags_win_over_yaml(tmp_path):
    file = tmp_path / "task.yaml"
    file.write_text("lr: 0.5\nbatch_size: 4\nddp: {channels_last: false}\nmax_steps: null\n")
    task = config.parse(["--lr", "0.25", "--config", str(file)])
    assert (task.lr, task.batch_size, task.max_steps) == (0.25, 4, None)
    assert not task.options["ddp"].channels_last


def test_written_task_reads_back_the_same(tmp_path):
    flags = ["--engine=inductor", "--data=synthetic", "--synthetic.num_classes=7", "--lr=0.125"]
    asked = resolving.resolve(config.parse([*flags, f"--output_dir={tmp_path / 'run'}"]))
    file = tmp_path / "run" / "config.json"
    with run_folder.claim_output_dir(asked) as task:
        again = config.parse(["--config", str(file)])
    assert config.as_mapping(again) == config.as_mapping(task)
    assert json.loads(file.read_text())["synthetic"]["num_classes"] == 7


@pytest.mark.parametrize(
    ("values", "message"),
    [({"lr": 0.125, "batch_size": 4, "zero": 2, "ddp": {"channels_last": False}}, None),
     ({"lr": 1, "max_steps": None, "engine": "jax", "jax": {"cache_dir": "/caches"}}, None),
     ({"lr": "1e-3", "batch_size": "4", "ddp": {"channels_last": "off"}}, None),  # as text
     ({"batch_size": "many"}, "batch_size"), ({"batch_size": 0}, "batch_size"),
     ({"batchsize": 4}, "batchsize"), ({"amp_level": "O7"}, "amp_level"),
     ({"ddp": {"layout": 1}}, "layout")],
)  # fmt: skip
def test_values_with_their_types_are_read_as_flags_are(tmp_path, values, message):
    """A run's config.json does not go through the command line's parser, unless it does not fit."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    ways = [
        lambda: config.task_of_values(values),
        lambda: dataclasses.replace(config.parse([f"--config={file}"]), config=None),
    ]
    if message is None:
        asked = config.parse(config.as_flags(values))
        assert [way() for way in ways] == [asked, asked]
        return
    for way in ways:
        with pytest.raises(RequestError, match=message):
            way()


def test_defaults_on_a_cpu():
    task = resolving.resolve(
        config.parse(["--data=synthetic", "--device=cpu", "--nproc_per_node=1000"])
    )
    assert (task.device, task.batch_size, task.amp_dtype) == ("cpu", 8, "bfloat16")
    assert (task.threads, task.workers) == (1, 1)


def test_two_runs_in_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = config.parse(["--data=synthetic"])
    # Stands in for another process that makes the folder right after one has looked.
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with run_folder.claim_output_dir(task) as first, run_folder.claim_output_dir(task) as second:
        assert first.output_dir != second.output_dir


def test_plugin_names_and_their_options_do_not_collide():
    names = [name for kind in plugins.KINDS for name in plugins.classes(kind)]
    assert len(names) == len(set(names))
    assert not {field for field in config.TaskConfig.__dataclass_fields__} & set(names)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("mock", ("mock", None)),
        ("imagefolder:/a/b:c", ("imagefolder", "/a/b:c")),
        ("s3://bucket/prefix", ("s3", "s3://bucket/prefix")),
    ],
)
def test_data_names(data, expected):
    assert config.data_name(data) == expected


ON, OFF = ("on", "yes", "true", "On", '"on"', "'true'"), ("off", "no", "false", "OFF", '"off"')
SWITCHES = [*((text, True) for text in ON), *((text, False) for text in OFF)]


@pytest.mark.parametrize(("text", "on"), SWITCHES)
def test_on_and_off_in_yaml_mean_what_the_option_calls_them(tmp_path, text, on):
    """YAML 1.1 reads on, off, yes and no as booleans, where they are not quoted."""
    file = tmp_path / "task.yaml"
    file.write_text(f"engine: xla\nxla: {{compile_cache: {text}, replay: auto}}\n")
    options = config.parse(["--config", str(file)]).options["xla"]
    assert (options.compile_cache, options.replay) == ("on" if on else "off", "auto")
    file.write_text(f"ddp:\n  channels-last: {text}\n")
    assert config.parse(["--config", str(file)]).options["ddp"].channels_last is on
    file.write_text(f"compiler_opt: {text}\n")
    assert config.parse(["--config", str(file)]).engine == ("xla" if on else "ddp")


@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
@pytest.mark.parametrize(("text", "on"), [(t, on) for t, on in SWITCHES if t.isalpha()])
def test_on_and_off_behind_engines(text, on):
    engines = f"--engines=ddp:channels_last={text},xla:compile-cache={text}"
    rows = plan.parse([engines, "--device=cpu", "--data=synthetic"], "accbench compare").plan.rows
    assert rows[0].task["ddp"]["channels_last"] is on
    assert rows[1].task["xla"]["compile_cache"] == ("on" if on else "off")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("ddp:channels_last=perhaps", "--ddp.channels_last is either on or off, not 'perhaps'"),
        ("ddp:channels_last={", "--ddp.channels_last is either on or off, not '{'"),
        ("xla:compile_cache=perhaps", "perhaps"),
        ("ddp:nhwc=on", "nhwc"),
        ("ddp:channels_last", "'channels_last' is not of the form option=value"),
    ],
)
def test_wrong_settings_behind_engines_are_named_with_their_row(spec, expected):
    with pytest.raises(RequestError, match=r"^--engines ") as raised:
        plan.parse([f"--engines={spec},ddp", "--data=synthetic"], "accbench compare")
    assert str(raised.value).startswith(f"--engines {spec}: ")
    assert expected in str(raised.value)


@pytest.mark.parametrize(("flags", "expected"), [
    (["--max_steps=12"], (12, 4, 1)),
    (["--warmup_steps=200"], (220, 200, 4)),
    (["--max_steps=60", "--log_interval=3"], (60, 5, 3)),
    ([], (55, 5, 5)),
])  # fmt: skip
def test_what_compare_chooses_fits_what_is_given(flags, expected):
    flags = ["--engines=ddp,ddp", "--device=cpu", "--data=synthetic", *flags]
    task = plan.parse(flags, "accbench compare").plan.rows[0].task
    assert (task["max_steps"], task["warmup_steps"], task["log_interval"]) == expected


@pytest.mark.parametrize(("device", "has_xla", "engines", "steps"), [
    ("cpu", True, "ddp inductor xla", 20),
    ("cpu", False, "ddp inductor jax", 20),
    ("cuda", False, "ddp inductor jax", 5),
    ("cuda", True, "ddp inductor jax xla", 5),
])  # fmt: skip
def test_compare_measures_what_is_here(monkeypatch, device, has_xla, engines, steps):
    find = importlib.util.find_spec
    there = {"torch_xla": find("os") if has_xla else None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there.get(name, find("os")))
    for engine in plugins.classes("engines").values():
        monkeypatch.setattr(engine, "unavailable_reason", lambda task: None)
    found = plan.parse([f"--device={device}", "--data=synthetic"], "accbench compare").plan
    assert [row.name for row in found.rows] == engines.split()
    assert found.numerics_steps == steps


def test_tf32_is_refused_where_there_is_none():
    with pytest.raises(RequestError, match="--tf32 on: TF32 is a type of NVIDIA GPUs"):
        resolving.apply_defaults(config.parse(["--tf32=on"]), "cpu")
    assert resolving.apply_defaults(config.parse(["--tf32=on"]), "cuda").tf32 == "on"


def test_compare_refuses_at_once_what_leaves_nothing_to_measure():
    flags = ["--engines=ddp,ddp", "--device=cpu", "--data=synthetic", "--max_steps=12"]
    with pytest.raises(RequestError, match="--max_steps 12 leaves nothing to measure"):
        plan.parse([*flags, "--warmup_steps=12"], "accbench compare")


def test_config_json_may_name_any_folder(tmp_path):
    """JSON spells a character beyond 16 bits as two, which YAML reads as two."""
    wanted = config.parse([f"--output_dir={tmp_path / 'läuft 🚀'}"])
    with run_folder.claim_output_dir(wanted) as task:
        pass
    again = config.parse(["--config", str(task.run_dir / "config.json")])
    assert again.output_dir == task.output_dir


@pytest.mark.parametrize("text", ["1e-4", "'1e-4'", '"0.0001"', "1.0e-4", ".0001"])
def test_numbers_in_yaml_are_read_as_on_the_command_line(tmp_path, text):
    """To YAML 1.1, 1e-4 is a string."""
    file = tmp_path / "task.yaml"
    file.write_text(f"lr: {text}\nbatch_size: '4'\nmax_steps: ~\nthreads:\nworkers: null\n")
    task = config.parse(["--config", str(file)])
    assert (task.lr, task.batch_size) == (1e-4, 4)
    assert (task.max_steps, task.threads, task.workers) == (None, None, None)


@pytest.mark.parametrize("text", [".inf", "+.INF", "inf", '".inf"'])
def test_infinity_in_yaml(tmp_path, text):
    file = tmp_path / "task.yaml"
    file.write_text(f"weight_decay: {text}\n")
    with pytest.raises(RequestError, match="--weight_decay must be at most .*, not inf"):
        config.parse(["--config", str(file)])


def test_text_in_yaml_stays_as_it_was_written(tmp_path):
    file = tmp_path / "task.yaml"
    file.write_text("output_dir: 2024_01_01\nengine: xla\nxla: {cache_dir: no}\n")
    task = config.parse(["--config", str(file)])
    assert (task.output_dir, task.options["xla"].cache_dir) == ("2024_01_01", "no")


def test_what_is_neither_on_nor_off_is_refused_with_the_files_name(tmp_path):
    file = tmp_path / "task.yaml"
    file.write_text("ddp: {channels_last: perhaps}\n")
    with pytest.raises(RequestError) as raised:
        config.parse(["--config", str(file)])
    expected = f"{file}: --ddp.channels_last is either on or off, not 'perhaps'"
    assert str(raised.value) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr: 0.5\nbatch_size: 4\nlr: 0.25\n", "the key 'lr' is there twice; keep one of them"),
        (
            "ddp: {channels_last: on, channels-last: off}\n",
            "the key 'channels-last' is there twice",
        ),
        ('{"ddp": {"channels_last": "on", "channels_last": "off"}}', "the key 'channels_last' is "),
        ("lr: 0.5\nconfig: other.yaml\n", "config names another file, which is not read"),
        ('{"lr": 0.5, "config": "other.json"}', "config names another file, which is not read"),
    ],
)
def test_no_line_of_a_file_is_dropped_silently(tmp_path, text, said):
    file = tmp_path / f"task.{'json' if 'json' in text else 'yaml'}"
    file.write_text(text)
    with pytest.raises(RequestError) as raised:
        config.parse(["--config", str(file)] if file.suffix == ".yaml" else [f"--config={file}"])
    assert str(raised.value).startswith(f"{file}: {said}")


def test_merged_keys_in_yaml_are_not_repeated(tmp_path):
    file = tmp_path / "task.yaml"
    file.write_text("ddp: &of_ddp {channels_last: off}\ninductor: {<<: *of_ddp, channels_last: on}")
    options = config.parse(["--engine=inductor", "--config", str(file)]).options["inductor"]
    assert options.channels_last


# To tyro, None is no text where a flag may be unset.
TEXT = st.text(st.characters(exclude_characters="\0"), min_size=1).filter(lambda x: x != "None")


def values_of(declared: Any) -> st.SearchStrategy[Any]:
    """Any value of an option's type; numbers that no option forbids."""
    if get_origin(declared) is Literal:
        return st.sampled_from(get_args(declared))
    if NoneType in get_args(declared):
        return st.none() | values_of(get_args(declared)[0])
    return {
        bool: st.booleans(),
        int: st.integers(min_value=1, max_value=2**62),
        float: st.floats(min_value=1, max_value=1e5),  # within all limits
        str: TEXT,
    }[declared]


def all_of(options: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(options)

    def values(field: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
        limit = field.metadata.get("maximum")
        found = values_of(hints[field.name])
        return found if limit is None else found.map(lambda v: None if v is None else min(v, limit))

    return st.builds(options, **{f.name: values(f) for f in dataclasses.fields(options)})


USED = ("engines", "launchers", "data")


@st.composite
def tasks(draw) -> config.TaskConfig:
    """A task with every field drawn, and every option of the plug-ins that it uses."""
    chosen = {kind: draw(st.sampled_from(list(plugins.classes(kind)))) for kind in USED}
    hints = get_type_hints(config.TaskConfig)
    fixed = {"engine", "launcher", "data", "compiler_opt", "output_dir", "config", "options"}
    drawn = {name: draw(values_of(hints[name])) for name in sorted({*hints} - fixed)}
    used = {
        name: getattr(plugins.load(kind, name), "Options", None) for kind, name in chosen.items()
    }
    for field in dataclasses.fields(config.TaskConfig):
        limit = field.metadata.get("maximum")
        if limit is not None and drawn.get(field.name) is not None:
            drawn[field.name] = min(drawn[field.name], limit)
    options = {
        name: draw(all_of(its)) for name, its in used.items() if its and dataclasses.fields(its)
    }
    return config.TaskConfig(
        engine=chosen["engines"], launcher=chosen["launchers"],
        data=f"{chosen['data']}:{draw(TEXT)}", options=options, **drawn,
    )  # fmt: skip


@pytest.mark.parametrize("max_examples", [6, pytest.param(20, marks=pytest.mark.soak)])
def test_config_json_of_a_run_reads_back_as_the_same_task(max_examples):
    # A parse takes a tenth of a second, so few examples, and none is looked for that is smaller.
    @settings(max_examples=max_examples, deadline=None, phases=[Phase.generate])
    @given(task=tasks())
    def read_back(task):
        with tempfile.TemporaryDirectory() as folder:
            wanted = dataclasses.replace(task, output_dir=str(Path(folder) / "run"))
            with run_folder.claim_output_dir(wanted) as written:
                pass
            file, expected = written.run_dir / "config.json", config.as_mapping(written)
            assert config.as_mapping(config.parse(["--config", str(file)])) == expected
            # The same in YAML.
            values = json.loads(file.read_text())
            for style in (None, '"'):
                file.write_text(yaml.safe_dump(values, default_style=style))
                assert config.as_mapping(config.parse(["--config", str(file)])) == expected

    read_back()


def test_a_scripts_arguments_may_begin_as_flags_do():
    for said in (["--script_args", "--depth 3"], ["--script_args=--depth 3"]):
        task = config.parse(["--script", "train.py", *said, "--seed", "4"])
        assert (task.script_args, task.seed) == ("--depth 3", 4)


def test_home_is_meant_where_no_shell_has_put_it(tmp_path, monkeypatch):
    """Behind `=` and in a YAML file; a folder named `~` would be made else."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "task.yaml").write_text("output_dir: ~/runs/one\nresume: ~/runs/before\n")
    task = config.parse(
        ["--config=~/task.yaml", "--data=imagefolder:~/images", "--engine=jax",
         "--jax.cache_dir=~/cache"]
    )  # fmt: skip
    assert task.output_dir == str(tmp_path / "runs/one")
    assert task.resume == str(tmp_path / "runs/before")
    assert task.data == f"imagefolder:{tmp_path}/images"
    assert task.options["jax"].cache_dir == str(tmp_path / "cache")
    compared = ["--engines=ddp,ddp", "--data=synthetic", "--output_dir=~/compared"]
    folder = plan.parse(compared, "compare").folder
    assert folder == str(tmp_path / "compared")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # of a user whom the system does not know
    with pytest.raises(RequestError, match="--output_dir ~/runs: HOME is not set"):
        config.parse(["--output_dir=~/runs"])
