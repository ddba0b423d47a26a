"""The compiled engine in whole runs: one graph, no recompiles, the record that shows it."""

import pytest

from accbench.recording import records
from tests.conftest import TINY, end_of, of_kind, run

pytestmark = pytest.mark.xla
STEPS = ("--max_steps=8", "--warmup_steps=2", "--log_interval=3")


def test_two_workers_compile_once_and_reduce_on_the_host(images, tmp_path):
    flags = (
        *TINY,
        *STEPS,
        "--compiler-opt",
        "--epochs=2",
        "--max_steps=100",
        f"--data=mock:{images}",
    )
    result = run(*flags, "--nproc_per_node=2", f"--output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    head = of_kind(tmp_path, records.RunRecord)[0]
    assert (head.engine, head.device_type, head.collectives) == ("xla", "cpu", "host")
    assert head.compile_cache.startswith("off: XLA on the CPU")
    assert head.versions["torch_xla"] == "2.8.1"
    end = end_of(tmp_path)
    assert (end.status, end.num_recompiles, end.num_fallbacks) == ("ok", 0, 0)
    # Forward and backward; then, with what gloo averaged, the optimizer.
    assert end.num_graphs == 2
    assert end.num_compiles >= 3  # and one for the evaluation
    assert end.compile_s > 0
    windows = of_kind(tmp_path, records.WindowRecord)
    assert windows[0].num_compiles >= 2
    assert all(window.num_compiles == 0 for window in windows[1:])
    assert [e.num_samples for e in of_kind(tmp_path, records.EvalRecord)] == [12, 12]


@pytest.mark.parametrize("amp", ["O0", "bfloat16", "float16"])
def test_a_worker_alone_runs_one_graph_a_step(tmp_path, amp):
    flags = ["--amp_level=O0"] if amp == "O0" else ["--amp_level=O1", f"--amp_dtype={amp}"]
    result = run(
        *TINY, *STEPS, *flags, "--compiler-opt", "--data=synthetic", f"--output_dir={tmp_path}"
    )
    assert result.returncode == 0, result.stderr
    end = end_of(tmp_path)
    assert (end.num_graphs, end.num_recompiles, end.num_fallbacks) == (1, 0, 0)


def test_operations_that_leave_the_compiler_are_counted(tmp_path):
    flags = (*TINY, *STEPS, "--compiler-opt", "--model=tests.nets:leaves_the_compiler")
    result = run(*flags, "--data=synthetic", f"--output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    end = end_of(tmp_path)
    assert end.num_fallbacks >= 8
    assert end.num_graphs > 1


def test_sparse_gradients_are_refused_with_the_layers_name(tmp_path):
    flags = (*TINY, *STEPS, "--compiler-opt", "--model=tests.nets:sparse", "--data=synthetic")
    result = run(*flags, f"--output_dir={tmp_path}")
    assert result.returncode == 2
    assert "engine xla has no sparse gradients, which net.6.0 has" in result.stderr


def test_overflow_skips_steps_alike_and_is_counted(tmp_path):
    flags = (*TINY, *STEPS, "--amp_level=O1", "--amp_dtype=float16", "--data=synthetic")
    skipped = []
    for engine in ("ddp", "xla"):
        run_dir = tmp_path / engine
        result = run(
            *flags, f"--engine={engine}", "--model=tests.nets:loud", f"--output_dir={run_dir}"
        )
        assert result.returncode == 0, result.stderr
        end = end_of(run_dir)
        assert (end.num_steps, end.num_recompiles) == (8, 0)
        skipped.append(end.skipped_steps)
    assert skipped[0] == skipped[1]
    assert 0 < skipped[0] < 8


def test_a_lean_step_is_one_graph_from_the_first_on_also_when_it_is_resumed(tmp_path):
    """Though what it reads first is put in an order of its own, and copied into."""
    flags = (*TINY, "--compiler-opt", "--xla.lean=on", "--xla.replay=off", "--data=synthetic",
             "--amp_level=O1", "--amp_dtype=float16", "--log_interval=1",
             "--save_steps=3", f"--output_dir={tmp_path}")  # fmt: skip
    for num_steps in (3, 6):
        result = run(*flags, f"--max_steps={num_steps}", "--resume=auto")
        assert result.returncode == 0, result.stderr
    compiles = [window.num_compiles for window in of_kind(tmp_path, records.WindowRecord)]
    assert compiles == [1, 0] * 2  # the first of two steps
