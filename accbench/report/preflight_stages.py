"""The report of a pipeline's stages (`--pp`), counted for GPUs that are not here."""

from accbench.report.preflight_page import (
    Document,
    Headline,
    PreflightResult,
    Section,
    Table,
    number,
)
from accbench.report.preflight_sections import GIB, NOT_COUNTED, describe_setting


def build_document(result: PreflightResult) -> Document:
    """Build the report of one result."""
    return Document(
        name=str(result["task"]["model"]),
        headlines=[_fit(result), _speed_bound(result)],
        settings=[describe_setting(result)],
        warnings=[],
        sections=[_memory(result), _time(result), _links(result), _notes(result)],
    )


def _fit(result: PreflightResult) -> Headline:
    memory = result["memory"]
    return Headline(
        "Each GPU's stages ",
        "fit" if memory["fits"] else "do not fit",
        f": at least {number(memory['peak_bytes'] / GIB)} of "
        f"{number(memory['gpu_bytes'] / GIB)} GiB on the GPU that needs the most.",
        good=memory["fits"],
    )


def _speed_bound(result: PreflightResult) -> Headline:
    return Headline(
        f"A step takes at least {number(1e3 * result['bound_s'])} ms: at most "
        f"{number(result['samples_per_s_at_most'])} samples/s on {result['num_gpus']} GPUs. This "
        "is a bound and not a prediction."
    )


def _memory(result: PreflightResult) -> Section:
    rows = [
        (_stages(rank), number(rank["parameter_bytes"] / GIB), number(rank["gradient_bytes"] / GIB),
         number(rank["optimizer_bytes"] / GIB), number(rank["saved_bytes"] / GIB),
         f"{rank['in_flight']:,}", number(rank["peak_bytes"] / GIB),
         "yes" if rank["fits"] else "no")
        for rank in result["ranks"]
    ]  # fmt: skip
    lines = [
        "GiB of each GPU of a pipeline, in order. Saved: what a micro-batch keeps from its forward "
        "to its backward pass, of which as many are in flight at a time.",
        NOT_COUNTED,
    ]
    titles = ("stages", "parameters", "gradients", "optimizer", "saved", "in flight", "peak",
              "fits")  # fmt: skip
    return Section("Memory", lines, Table(titles, rows, left=("stages",)), wide=True)


def _time(result: PreflightResult) -> Section:
    rows = [
        (_stages(rank), number(1e3 * rank["microbatch_s"]), number(1e3 * rank["update_s"]))
        for rank in result["ranks"]
    ]
    lines = [
        f"{result['num_microbatches']:,} micro-batches by {result['schedule']}: a GPU waits "
        f"{number(100 * result['bubble'])} % of the step at its beginning and end, if all stages "
        "take as long.",
        "Links are taken to hide.",
    ]
    titles = ("stages", "ms a micro-batch", "ms of the optimizer")
    return Section("Time, at least", lines, Table(titles, rows, left=("stages",)))


def _links(result: PreflightResult) -> Section:
    names = ("passed_in_node", "passed_network", "reduced_in_node", "reduced_network")
    rows = [
        (_stages(rank), *(number(rank[f"{name}_bytes"] / 1e9) for name in names))
        for rank in result["ranks"]
    ]
    lines = [
        "GB that each GPU sends in a step, within its node and over the network. Passed: "
        "activations and their gradients, to other stages. Reduced: parameters' gradients, to "
        "GPUs with the same stages, by NCCL's rings.",
    ]
    titles = ("stages", "passed in node", "over network", "reduced in node",
              "reduced over network")  # fmt: skip
    return Section("Between GPUs", lines, Table(titles, rows, left=("stages",)), wide=True)


def _stages(rank: PreflightResult) -> str:
    return " and ".join(str(stage + 1) for stage in rank["stages"])


def _notes(result: PreflightResult) -> Section:
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    lines = [
        "Nothing was compiled: each stage of engine ddp ran on tensors without memory.",
        "Every operation reads its arguments from memory and writes its results there, once, at "
        "the GPU's peak rates.",
        versions,
    ]
    return Section("Notes", lines)
