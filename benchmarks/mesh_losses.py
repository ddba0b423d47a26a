"""Do all ways to share a model train the same? GPT-2 without dropout, four workers, on docs/.

    python benchmarks/mesh_losses.py FOLDER [--steps 100] [--rows ddp,tp2-shard2] [--tiny]

Every row has the same global batch of sixteen sequences. Prints a Markdown table of training
losses, averaged over the workers, of each row's largest difference from ddp's, and of tokens a
second behind the warm-up, the median over steps; the same command goes on where it was stopped.
Returns 1 if a row ends elsewhere than ddp.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from accbench.report import run as runs  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

WORKERS, GLOBAL_BATCH, TOKENS = 4, 16, 64
# Row -> (ranks that share a batch, flags).
ROWS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ddp": (1, ()),
    "zero1": (1, ("--dp_shard=auto", "--zero=1")),
    "shard4": (1, ("--dp_shard=auto",)),
    "tp2-shard2": (2, ("--tp=2", "--dp_shard=auto")),
    "cp2-shard2": (2, ("--cp=2", "--dp_shard=auto")),
    "ring2-shard2": (2, ("--cp=2", "--cp_attention=ring", "--dp_shard=auto")),
    "pp2": (2, ("--pp=2", "--accumulate=4")),
    "jax": (1, ("--engine=jax",)),
    "jax-shard4": (1, ("--engine=jax", "--dp_shard=auto")),
    "jax-tp2": (2, ("--engine=jax", "--tp=2", "--dp_shard=auto")),
    "jax-ring2": (2, ("--engine=jax", "--cp=2", "--cp_attention=ring")),
}
# Rounding that a hundred steps of AdamW carry on; a wrong reduction is off by far more.
MOST_APART = 0.01


def flags_of(row: str, steps: int) -> list[str]:
    """Return the flags of a row's run."""
    num_sharing, flags = ROWS[row]
    return [
        "--model=benchmarks.nets:gpt2_still", "--data=tokens:docs", f"--seq_len={TOKENS}",
        f"--nproc_per_node={WORKERS}", f"--batch_size={GLOBAL_BATCH * num_sharing // WORKERS}",
        "--device=cpu", "--threads=1", "--workers=0", f"--max_steps={steps}", "--epochs=1000",
        "--amp_level=O0", "--lr=1e-3", "--warmup_steps=1", "--log_interval=1", "--eval_interval=0",
        "--save_interval=0", "--tensorboard=off", *flags,
    ]  # fmt: skip


def train(folder: Path, row: str, steps: int) -> runs.RecordedRun:
    """Train a row, unless it is there already."""
    if runs.read_if_there(folder).status != "ok":
        subprocess.run(
            [sys.executable, "launch_single_task.py", *flags_of(row, steps),
             f"--output_dir={folder}"],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    return runs.read(folder)


def tokens_per_s(run: runs.RecordedRun) -> str:
    """Return the median of a run's speeds behind its warm-up."""
    samples_per_s = run.median_samples_per_s
    return "-" if samples_per_s is None else f"{samples_per_s * TOKENS:,.0f}"


def main() -> int:
    """Return 0 if every row's losses stay beside ddp's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", default=",".join(ROWS))
    add_tiny(parser)
    flags = parser.parse_args()
    steps = 2 if flags.tiny else flags.steps
    rows = ["ddp", "tp2-shard2"] if flags.tiny else flags.rows.split(",")
    losses, speeds = {}, {}
    for row in dict.fromkeys(["ddp", *rows]):
        run = train(flags.folder.absolute() / row, row, steps)
        losses[row] = [window.loss for window in run.windows]
        speeds[row] = tokens_per_s(run)
    shown = sorted({1, steps // 4, steps // 2, 3 * steps // 4, steps} - {0})
    heads = [*(f"step {step}" for step in shown), "largest difference", "tokens/s"]
    print(f"| row | {' | '.join(heads)} |")
    print(f"| --- |{' ---: |' * len(heads)}")
    is_same = True
    for row, of_row in losses.items():
        apart = max(abs(a / b - 1) for a, b in zip(of_row, losses["ddp"], strict=True))
        is_same &= apart < MOST_APART
        cells = [f"{of_row[step - 1]:.5f}" for step in shown]
        print(f"| {row} | {' | '.join(cells)} | {apart:.1e} | {speeds[row]} |")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
