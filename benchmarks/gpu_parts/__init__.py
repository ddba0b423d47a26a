"""The parts of `benchmarks/gpu_day.py`: its items, what each measures, and the page of results."""
