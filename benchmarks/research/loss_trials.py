"""How often right engines are told to part from the baseline's losses, and wrong ones found.

    python benchmarks/research/loss_trials.py

Simulated rounds of eight windows, judged by `accbench.report.losses`. A window's loss is a curve
that falls, plus what the seed does to the whole run, plus what it does to the window (as large as
the former, or three times as large), in spreads of the seeds at a window. A right engine's
run differs from the baseline's by a part of what another seed's does, its distance: 0.03 measured
(docs/compare.md), 0.5, or 1, where they are as strange to each other as two seeds. Faults are
added where the baseline's loss falls by eight spreads.
"""

import itertools

import numpy as np

from accbench.report import losses

TRIALS = 5_000
WINDOWS = 8
FALLS = (0.0, 2.0, 4.0, 8.0)  # of the baseline's loss over the run, in spreads
# Name -> what it adds to a curve that falls by `fall`.
FAULTS = {
    "does not learn": lambda fall: fall * (1 - _curve()),
    "half as far": lambda fall: fall * (1 - _curve()) / 2,
    "0.5 spreads off": lambda fall: 0.5 * (1 - _curve()),
    "1 spread off": lambda fall: 1.0 * (1 - _curve()),
}


def _curve() -> np.ndarray:
    return np.exp(-np.arange(WINDOWS) / 2)


def _seed_noise(rounds: int, of_run: float, random: np.random.Generator) -> np.ndarray:
    """(TRIALS, rounds, WINDOWS) with a spread of 1 at a window."""
    run = of_run * random.normal(size=(TRIALS, rounds, 1))
    return (run + random.normal(size=(TRIALS, rounds, WINDOWS))) / np.hypot(of_run, 1)


def told(rounds: int, of_run: float, fall: float, distance: float, fault: str | None) -> float:
    """Part of the trials in which the losses part."""
    random = np.random.default_rng(1)
    baseline = fall * _curve() + _seed_noise(rounds, of_run, random)
    strange = _seed_noise(rounds, of_run, random) - _seed_noise(rounds, of_run, random)
    row = baseline + distance * strange
    if fault is not None:
        row = row + FAULTS[fault](fall)
    found = [losses.losses_diverge(a, b) for a, b in zip(row, baseline, strict=True)]
    return float(np.mean(found))


def main() -> None:
    """Print a line for each number of rounds and distance."""
    print("| rounds | distance | right, worst of all | " + " | ".join(FAULTS) + " |")
    print("| ---: | ---: | ---: |" + " ---: |" * len(FAULTS))
    for rounds, distance in itertools.product((2, 3, 5, 10), (0.03, 0.5, 1.0)):
        wrong = max(
            told(rounds, of_run, fall, distance, None) for of_run in (1 / 3, 1.0) for fall in FALLS
        )
        found = [told(rounds, 1 / 3, FALLS[-1], distance, fault) for fault in FAULTS]
        cells = [f"{wrong:.2%}", *(f"{share:.0%}" for share in found)]
        print(f"| {rounds} | {distance} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
