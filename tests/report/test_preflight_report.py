"""What is said of a compiled step: made-up results, of which what is planted must be named."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from accbench.report import preflight_report
from tests.report.test_escaping import HOSTILE, OF_MARKDOWN, SHOWN, Page, markdown

SCHEMA = json.loads(Path(preflight_report.__file__).with_name("preflight.schema.json").read_text())
GB, MS = 10**9, 1e-3
# A GPU of 1 TB/s and 100 TFLOP/s; a step of a convolution bound by its products and a fusion
# bound by its bytes.
RESULT: dict[str, Any] = {
    "kind": "preflight",
    "schema_version": 1,
    "engine": "xla",
    "num_gpus": 1,
    "gpu": {"name": "a GPU", "memory_bytes": 16 * 2**30, "memory_gb_per_s": 1000,
            "dense_tflops": {"float16": 100.0, "float32": 10.0}},
    "task": {"model": "net", "batch_size": 64, "amp_level": "O1", "amp_dtype": "float16"},
    "versions": {"torch": "2.8.0"},
    "model": {"num_parameters": 1000, "gradient_bytes": 4000},
    "memory": {"arguments_bytes": 2**30, "results_bytes": 2**30, "aliased_bytes": 2**30,
               "temporaries_bytes": 3 * 2**30, "peak_bytes": 4 * 2**30,
               "gpu_bytes": 16 * 2**30, "fits": True, "rematerialised": 0},
    "step": {"launches": 1000, "bytes": 5 * GB, "flops": 6 * 10**11, "bound_s": 10 * MS,
             "small_launches": 1, "launch_s": 2 * MS, "samples": 64,
             "samples_per_s_at_most": 6400.0},
    "kinds": [
        {"kind": "convolution", "launches": 1, "bytes": 1 * GB, "flops": 6 * 10**11,
         "bound_s": 6 * MS},
        {"kind": "loop fusion", "launches": 2, "bytes": 4 * GB, "flops": 0, "bound_s": 4 * MS},
    ],
    "thunks": {"kConvolution": 1, "kKernel": 999},
    "host_transfers": [],
    "layouts": {"b01f_o01i->b01f": 1},
    "large_tensors": [{"element_type": "f16", "count": 7, "bytes": 2 * GB,
                       "largest": "f16[64,1000,1000]", "source": "net.conv1"}],
    "dearest": [{"name": "conv.1", "kind": "convolution", "bytes": 1 * GB, "flops": 6 * 10**11,
                 "bound_s": 6 * MS, "results": ["f16[64,1000,1000]", "u8[8]", "u8[9]"],
                 "source": "net.conv1/aten__convolution"}],
    "kernels": [["convolution", 1 * GB, 6 * 10**11, 6 * MS], ["loop fusion", 10, 0, 0.0],
                ["loop fusion", 4 * GB, 0, 4 * MS]],
    "reduction": None,
    "eager": None,
    "cost": {"trace_s": 0.25, "compile_s": 20.0, "compiler_peak_bytes": 2**30},
    "notes": [],
}  # fmt: skip
EAGER = {
    "launches": 2000, "bytes": 9 * GB, "flops": 6 * 10**11, "bound_s": 15 * MS,
    "samples_per_s_at_most": 64 / 0.015, "note": "counted by hand",
}  # fmt: skip
REDUCTION = {
    "all_reduces": [
        {"name": "early", "kind": "all-reduce", "bytes": 300, "before_last_product": True,
         "products_beside": 5, "beside_s": 1 * MS},
        {"name": "late", "kind": "all-to-all", "bytes": 100, "before_last_product": False,
         "products_beside": 0, "beside_s": 0.0},
    ],
    "bytes": 400,
    "started_before_last_product": 0.75,
}  # fmt: skip
FORMATS = ("table", "md", "html")


def made(**changes: Any) -> dict[str, Any]:
    """A result with other values; those of a part that is a dict are added to it."""
    result = copy.deepcopy(RESULT)
    for key, value in changes.items():
        both_dicts = isinstance(result.get(key), dict) and isinstance(value, dict)
        result[key] = {**result[key], **value} if both_dicts else value
    return result


def said(result: dict[str, Any], format: str = "table") -> str:
    return text_of(preflight_report.render(result, format), format)


def said_of_both(a: dict[str, Any], b: dict[str, Any], format: str = "table") -> str:
    return text_of(preflight_report.render_pair(a, b, format), format)


def text_of(rendered: str, format: str) -> str:
    """Without markup, wrapping and rules."""
    if format == "html":
        body = rendered[rendered.index("<body>") :]
        return Page(body.replace("</td>", " </td>")).text
    if format == "md":
        return markdown(rendered).text
    return " ".join(rendered.split())


def row_of(text: str, title: str) -> list[str]:
    """Cells of a Markdown table's row."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize("format", FORMATS)
def test_a_step_that_fits(format):
    text = said(made(), format)
    assert "compiles and fits: at least 4.00 of 16.0 GiB a GPU" in text
    assert "nothing is computed twice" in text
    assert "CUDA context come on top" in text
    assert "at least 10.0 ms: at most 6,400 samples/s a GPU" in text
    assert "a bound and not a prediction" in text
    assert "WARNING" not in text.upper()


@pytest.mark.parametrize("format", FORMATS)
def test_a_step_that_does_not_fit(format):
    memory = {"peak_bytes": 20 * 2**30, "temporaries_bytes": 19 * 2**30, "fits": False}
    text = said(made(memory={**memory, "rematerialised": 1234}), format)
    assert "compiles and does not fit: at least 20.0 of 16.0 GiB" in text
    assert "1,234 instructions computed twice" in text
    assert "compiles and fits" not in text
    assert "left for all else" not in text
    # 4 GiB over; of 19 GiB that grow with a batch of 64, 15 are there.
    assert "4.00 GiB too much; a batch of about 48 would fit" in text


def test_what_bounds_the_step():
    text = preflight_report.render(made(eager=EAGER), "md")
    assert "Bytes bound 4.00 of the 10.0 ms" in text
    assert row_of(text, "ms a step, at least") == ["10.0", "15.0", "1.50"]
    assert row_of(text, "ms a step, with 2 µs a launch") == ["12.0", "19.0", "1.58"]
    assert row_of(text, "samples/s a GPU, with 2 µs a launch")[0] == "5,333"
    assert "bounds and not a speedup" in text
    assert "eager PyTorch: counted by hand" in text


def test_eager_is_not_known():
    text = preflight_report.render(made(), "md")
    assert row_of(text, "ms a step, at least") == ["10.0"]
    assert "no such bound for eager PyTorch" in text


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_is_known_of_the_speed(format):
    step = {"launches": 0, "bytes": 0, "flops": 0, "bound_s": 0.0, "launch_s": 0.0,
            "samples_per_s_at_most": None}  # fmt: skip
    empty = dict.fromkeys(("kinds", "kernels", "dearest", "large_tensors"), [])
    text = said(made(step=step, thunks={}, layouts={}, cost={}, eager=EAGER, **empty), format)
    assert "no bound on its speed" in text


@pytest.mark.parametrize("format", FORMATS)
def test_transfers_to_the_host_are_a_warning(format):
    text = said(made(host_transfers=[f"outfeed.{n}" for n in range(7)]), format)
    assert "7 transfers to or from the host" in text
    assert text.upper().count("WARNING") == 1
    assert "outfeed.4 and 2 more" in text


WIDE = [
    {"element_type": kind, "count": 3, "bytes": 2 * GB, "largest": f"{kind}[9,9]",
     "source": "net.bn"}
    for kind in ("f32", "s32", "s64", "f16", "pred")
]  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_wide_tensors_under_autocast_are_warnings(format):
    text = said(made(large_tensors=WIDE), format)
    assert text.upper().count("WARNING") == 3
    assert (
        "f32 under O1: 3 tensors of a million elements or more, 2.00 GB in all; the largest is "
        "f32[9,9] of net.bn" in text
    )


def test_wide_tensors_without_autocast_are_as_asked():
    text = said(made(large_tensors=WIDE, task={"amp_level": "O0", "amp_dtype": None}))
    assert "WARNING" not in text
    assert "O0 float32" in text
    assert "multiplies at 10 TFLOP/s" in text


def test_what_runs():
    text = preflight_report.render(made(), "md")
    assert row_of(text, "convolution") == ["1", "1.00", "0.60", "6.00", "60.0"]
    assert "1 of 3 kernels move less than 1 MB" in text
    assert "999 kKernel, 1 kConvolution" in text
    assert "(channels last)" in text
    assert "f16\\[64,1000,1000\\], u8\\[8\\] +1 | net.conv1/aten" in text


def test_a_sample_is_as_large_as_its_model_has_it():
    task = {"image_size": 224}
    assert "64 a GPU, 224 px" in said(made(task=task))
    tokens = made(task=task, model={"unit": "tokens", "units_per_sample": 2048})
    jsonschema.validate(tokens, SCHEMA)
    assert "64 a GPU, 2,048 tokens a sample" in said(tokens)
    assert "px" not in said(tokens)
    assert "batch 64 of 4 GPUs" in said(made(task={"tp": 2, "cp": 2}))
    assert "px" not in said(made(task=task, model={"unit": "samples", "units_per_sample": 1}))


def test_collectives():
    text = said(made(num_gpus=4, reduction=REDUCTION))
    assert "25,600 on 4 GPUs" in text
    assert "is taken to be wholly hidden" in text
    assert "1 all-reduce of 0.00030 MB, 1 all-to-all of 0.00010 MB" in text
    assert "--cp" not in text
    assert "activations that --tp and --cp" in said(made(reduction=REDUCTION, task={"cp": 2}))
    assert "75.0 % of the bytes start before the last" in text
    assert "Collectives" not in said(made())
    assert "WARNING the step has no all-reduce" in said(made(num_gpus=4))


def test_search_for_the_largest_batch():
    tried = [[256, 8 * 2**30, True], [512, None, False]]
    text = said(made(batch_search={"largest": 256, "tried": tried, "limit": "went to 512"}))
    assert "largest batch that fits, of those tried: 256." in text
    assert "256 8.00 yes 512 - no" in text
    assert "went to 512" in text
    none = {"largest": None, "tried": tried[1:], "limit": None}
    assert "of those tried: none." in said(made(batch_search=none))


def test_a_terminal_of_100_columns():
    long = "backward.net.layer1.0.downsample/aten__native_batch_norm_backward" * 3
    row = {**RESULT["dearest"][0], "source": long, "name": long}
    hostile = made(dearest=[row], notes=["\x1b[2J", "[red]x[/] :smile:"], eager=EAGER)
    text = preflight_report.render(hostile, "table")
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    assert "[red]x[/] :smile:" in text


def hostile() -> dict[str, Any]:
    """Whatever a result holds as text."""
    row = {**RESULT["dearest"][0], "name": HOSTILE, "kind": HOSTILE, "source": HOSTILE,
           "results": [HOSTILE]}  # fmt: skip
    tensors = {**WIDE[0], "largest": HOSTILE, "source": HOSTILE}
    kernels = [[HOSTILE, GB, 10**11, 1 * MS]]
    return made(
        num_gpus=2, gpu={"name": HOSTILE}, task={"model": HOSTILE}, versions={HOSTILE: HOSTILE},
        kinds=[{**RESULT["kinds"][0], "kind": HOSTILE}], thunks={HOSTILE: 1},
        host_transfers=[HOSTILE], layouts={HOSTILE: 1}, dearest=[row], kernels=kernels,
        large_tensors=[tensors, {**tensors, "element_type": HOSTILE}],
        reduction={**REDUCTION, "all_reduces": [{**REDUCTION["all_reduces"][0], "name": HOSTILE}]},
        eager={**EAGER, "note": HOSTILE}, cost={f"{HOSTILE}_s": 1.0}, notes=[HOSTILE],
        batch_search={"largest": None, "tried": [], "limit": HOSTILE},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rendered", "times"),
    [
        (lambda: preflight_report.render(hostile(), "html"), 15),
        (lambda: preflight_report.render_pair(hostile(), made(), "html"), 8),
    ],
)
def test_a_page_obeys_nothing_from_outside(rendered, times):
    page = Page(rendered())
    assert not page.tags & {"script", "img", "a", "code"}
    assert not any(name.startswith("on") or name in ("src", "href") for name in page.attributes)
    assert page.text.count(SHOWN) > times


@pytest.mark.parametrize(
    ("rendered", "times"),
    [
        (lambda: preflight_report.render(hostile(), "md"), 15),
        (lambda: preflight_report.render_pair(hostile(), made(), "md"), 7),
    ],
)
def test_markdown_obeys_nothing_from_outside(rendered, times):
    page = markdown(rendered())
    assert page.tags <= OF_MARKDOWN | {"h3"}
    assert page.text.count(SHOWN) > times


def test_plots_of_a_page():
    page = preflight_report.render(made(), "html")
    assert page.count("<svg") == 3
    assert "convolution: 1,000 MB, 600 GFLOP, at least 6.00 ms" in page
    text = said(made(), "html")
    assert "2 kernels without products, with 4.00 of 10.0 ms, are not in the plot" in text
    assert "1,000 GB/s of memory" in text
    assert "100 TFLOP/s of products in float16" in text


OTHER = made(
    num_gpus=2, reduction=REDUCTION, eager=EAGER, versions={"torch": "2.9.0"},
    step={"bytes": 4 * GB, "bound_s": 8 * MS, "samples_per_s_at_most": 8000.0, "launches": 1500,
          "launch_s": 3 * MS},
    memory={"peak_bytes": 5 * 2**30},
    kinds=[RESULT["kinds"][0], {**RESULT["kinds"][1], "bytes": 3 * GB},
           {**RESULT["kinds"][1], "kind": "copy", "launches": 9}],
    large_tensors=[{**RESULT["large_tensors"][0], "element_type": "f32"}],
)  # fmt: skip


def test_the_change_between_two():
    text = preflight_report.render_pair(made(), OTHER, "md")
    assert row_of(text, "GB") == ["5.00", "4.00", "-20.0 %"]
    assert row_of(text, "launches") == ["1,000", "1,500", "+50.0 %"]
    assert row_of(text, "TFLOP") == ["0.60", "0.60", "0 %"]
    assert row_of(text, "GiB a GPU at its peak, at least") == ["4.00", "5.00", "+25.0 %"]
    assert row_of(text, "ms a step, at least") == ["10.0", "8.00", "-20.0 %"]
    assert row_of(text, "samples/s a GPU, at most") == ["6,400", "8,000", "+25.0 %"]
    assert row_of(text, "samples/s of all GPUs, at most") == ["6,400", "16,000", "+150.0 %"]
    assert row_of(text, "eager PyTorch: ms a step, at least") == ["-", "15.0", "-"]
    assert row_of(text, "collectives without all-gathers") == ["0", "2", "from 0"]
    assert row_of(text, "loop fusion") == ["2", "2", "0 %", "4.00", "3.00", "-25.0 %"]
    assert row_of(text, "copy") == ["0", "9", "from 0", "0", "4.00", "from 0"]
    assert row_of(text, "f16") == ["7", "0", "-100.0 %", "2.00", "0", "-100.0 %"]
    assert row_of(text, "f32")[:2] == ["0", "7"]
    early = {**REDUCTION, "started_before_last_product": 0.25}
    text = preflight_report.render_pair(OTHER, {**OTHER, "reduction": early}, "md")
    title = "% of their bytes started before the last product"
    assert row_of(text, title) == ["75.0", "25.0", "-50.0 points"]


@pytest.mark.parametrize("format", FORMATS)
def test_two_are_named_and_told_apart(format):
    text = said_of_both(made(), OTHER, format)
    assert "A: net, 1 x a GPU, O1 float16, batch 64 a GPU" in text
    assert "B: net, 2 x a GPU, O1 float16, batch 64 a GPU" in text
    assert "From A to B: bytes -20.0 %, launches +50.0 %, memory +25.0 %" in text
    assert "bounds and not predictions" in text
    assert "differ in torch: 2.8.0 and 2.9.0" in text
    assert "B: f32 under O1: 7 tensors" in text
    assert "A: f32" not in text
    alike = said_of_both(made(), made(), format)
    assert "differ" not in alike
    assert "From A to B: bytes 0 %" in alike


@pytest.mark.parametrize(
    "result",
    [
        made(),
        OTHER,
        made(batch_search={"largest": None, "tried": [[8, None, False]], "limit": None}),
        made(step={"samples_per_s_at_most": None}, batch_search=None),
    ],
)
def test_json_fits_the_published_schema(result):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    rendered = preflight_report.render(result, "json")
    assert json.loads(rendered) == result
    jsonschema.validate(json.loads(rendered), SCHEMA)
    pair = json.loads(preflight_report.render_pair(made(), result, "json"))
    jsonschema.validate(pair, SCHEMA)


def test_json_of_two():
    pair = json.loads(preflight_report.render_pair(made(), OTHER, "json"))
    change = pair["figures"]["bytes"]
    assert change == {"a": 5 * GB, "b": 4 * GB, "change_percent": pytest.approx(-20)}
    assert pair["kinds"]["copy"]["launches"] == {"a": 0, "b": 9, "change_percent": None}


@pytest.mark.parametrize(
    "broken",
    [made(memory={"fits": "yes"}), made(step={"bound_s": -1.0}), made(unheard_of=1),
     made(kernels=[["copy", 1, 0]]), {"kind": "preflight"}],
)  # fmt: skip
def test_the_schema_refuses_what_is_wrong(broken):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_links_and_meshes_are_told():
    row = {"name": "--tp 2", "dp_shard": None, "tp": 2, "cp": 1, "batch_size": 128,
           "how": "estimated", "state_bytes": 2**30, "temporaries_bytes": 19 * 2**30,
           "peak_bytes": 20 * 2**30, "fits": False, "bound_s": 16 * MS, "compute_s": 10 * MS,
           "link_s": 8 * MS, "overlapped": 0.25, "weight_bytes": 2**30}  # fmt: skip
    communication = {
        "num_nodes": 2, "gpus_per_node": 4, "in_node_gb_per_s": 450.0, "network_gb_per_s": 50.0,
        "kinds": [{"kind": "all-gather", "collectives": 3, "bytes": 5 * GB,
                   "in_node_bytes": 3 * GB, "network_bytes": 2 * GB}],
        "in_node_bytes": 3 * GB, "network_bytes": 2 * GB, "link_s": 8 * MS, "overlapped": 0.25,
        "bound_s": 16 * MS,
    }  # fmt: skip
    search = {"meshes": [row], "failed": [], "refused": ["tp 4, cp 1: why"]}
    result = made(num_gpus=8, num_nodes=2, communication=communication, mesh_search=search)
    jsonschema.validate(result, SCHEMA)
    text = said(result)
    assert "8 x a GPU, 2 nodes" in text
    assert "at least 16.0 ms with what links add" in text
    assert "8.00 ms, of which 25.0 % run beside kernels" in " ".join(text.split())
    assert "None fits. The nearest is --tp 2, which needs 20.0 of 16.0 GiB" in text
    assert "Left out: tp 4, cp 1: why" in text
    fits = made(num_gpus=8, mesh_search={**search, "meshes": [{**row, "fits": True}]})
    assert "None fits" not in said(fits)
    assert "32,000" in said(fits)  # 64 * 8 samples in 16 ms
