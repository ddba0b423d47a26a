"""The sections of a preflight's report: sentences, tables and charts."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from accbench.report import preflight_page
from accbench.report.preflight_page import (
    Document,
    Headline,
    PreflightResult,
    Section,
    Table,
    number,
)

GIB = 2**30
PERCENT = 1e-2
_MOST_ROWS = 20
LARGE = "Tensors of a million elements or more, but of no parameter's size"
# Element types that autocast to half precision should have left small.
_WIDE = ("f32", "f64", "s32", "s64", "u32", "u64")
NOT_COUNTED = (
    "At least: cuDNN's workspaces, NCCL's buffers and the CUDA context come on top, and are not "
    "known before the step runs."
)


def build_document(result: PreflightResult) -> Document:
    """Build the whole report of one preflight result."""
    sections = [
        _memory(result),
        _meshes(result),
        bytes_by_kind([("", result)]),
        _bound(result),
        _roofline(result),
        _kinds(result),
        _large_tensors(result),
        _costliest_kernels(result),
        _reduction(result),
        _communication(result),
        _cost(result),
        _notes(result),
    ]
    return Document(
        name=str(result["task"]["model"]),
        headlines=[fit_headline(result), _speed_bound(result)],
        settings=[describe_setting(result)],
        warnings=warning_lines(result),
        sections=[section for section in sections if section is not None],
    )


def describe_setting(result: PreflightResult) -> str:
    """Describe in one line what was compiled, and for which GPUs."""
    task = result["task"]
    num_nodes = result.get("num_nodes", 1)
    parts = [
        str(task["model"]),
        f"{result['num_gpus']} x {result['gpu']['name']}",
        *([f"{num_nodes} nodes"] if num_nodes > 1 else []),
        *(
            f"{axis} {task[axis]}"
            for axis in ("dp_shard", "tp", "cp", "pp")
            if task.get(axis) not in (None, 1)
        ),
        *(["ring attention"] if task.get("cp_attention") == "ring" else []),
        *(["sequence parallel"] if task.get("sequence_parallel") else []),
        f"{task['amp_level']} {preflight_page.dtype(result)}",
        f"batch {task['batch_size']:,} {_of_gpus(task)}",
    ]
    return ", ".join([*parts, *_sample_size(result)])


def _of_gpus(task: Mapping[str, Any]) -> str:
    """Say how many GPUs share a batch."""
    sharing = math.prod(task.get(axis) or 1 for axis in ("tp", "cp", "pp"))
    return "a GPU" if sharing == 1 else f"of {sharing} GPUs"


def _sample_size(result: PreflightResult) -> list[str]:
    """Say how large a sample is: in pixels, or in tokens; nothing where its size is no flag's."""
    unit, number_of = result["model"].get("unit"), result["model"].get("units_per_sample", 1)
    if number_of > 1:
        return [f"{number_of:,} {unit} a sample"]
    size = result["task"].get("image_size")
    return [f"{size} px"] if size and unit in (None, "images") else []


def fit_headline(result: PreflightResult, name: str = "The step") -> Headline:
    """Say whether the step compiles and fits into GPU memory."""
    memory = result["memory"]
    twice = memory["rematerialised"]
    again = f"{_plural(twice, 'instruction')} computed" if twice else "nothing is computed"
    return Headline(
        f"{name} ",
        "compiles and fits" if memory["fits"] else "compiles and does not fit",
        f": at least {number(memory['peak_bytes'] / GIB)} of "
        f"{number(memory['gpu_bytes'] / GIB)} GiB a GPU at its peak; {again} twice to save "
        f"memory.{_excess(result)}",
        good=memory["fits"],
    )


def _excess(result: PreflightResult) -> str:
    """Say by how much the step exceeds the memory, and guess a batch size that fits."""
    memory = result["memory"]
    over = memory["peak_bytes"] - memory["gpu_bytes"]
    if over <= 0:
        return ""
    # What does not grow with the batch: nearly all that the step is given.
    fixed = memory["arguments_bytes"]
    if fixed >= memory["gpu_bytes"]:
        return (
            f" That is {number(over / GIB)} GiB too much; what lies between steps fills it alone."
        )
    batch_share = (memory["gpu_bytes"] - fixed) / (memory["peak_bytes"] - fixed)
    batch = int(result["task"]["batch_size"] * batch_share) // 8 * 8
    guess = f"a batch of about {batch:,}" if batch > 0 else "no batch, by a guess,"
    return (
        f" That is {number(over / GIB)} GiB too much; {guess} would fit, and --find_batch finds "
        "the largest that does."
    )


def _speed_bound(result: PreflightResult) -> Headline:
    step, gpus = result["step"], result["num_gpus"]
    speed = step["samples_per_s_at_most"]
    if speed is None:
        return Headline("There is no bound on its speed.")
    of_all = f", {number(gpus * speed)} on {gpus} GPUs" if gpus > 1 else ""
    return Headline(
        f"It takes at least {number(1e3 * step['bound_s'])} ms: at most {number(speed)} samples/s "
        f"a GPU{of_all}{_with_links(result)}. This is a bound and not a prediction."
    )


def _with_links(result: PreflightResult) -> str:
    """Say what the bound is where communication adds to it."""
    communication = result.get("communication")
    if not communication or communication["bound_s"] < 1.01 * result["step"]["bound_s"]:
        return ""
    return f"; at least {number(1e3 * communication['bound_s'])} ms with what links add"


def warning_lines(result: PreflightResult) -> list[str]:
    """Return the warnings that a reader must not overlook, one a line."""
    lines = []
    transfers = result["host_transfers"]
    if transfers:
        more = f" and {len(transfers) - 5:,} more" if len(transfers) > 5 else ""
        lines.append(
            f"{_plural(len(transfers), 'transfer')} to or from the host within the step, where the "
            f"GPU may wait: {', '.join(transfers[:5])}{more}"
        )
    if result["num_gpus"] > 1 and not result["reduction"]:
        lines.append(f"the step has no all-reduce, and is for {result['num_gpus']} GPUs")
    for row in result["large_tensors"]:
        if result["task"]["amp_level"] == "O1" and row["element_type"] in _WIDE:
            source = f" of {row['source']}" if row["source"] else ""
            lines.append(
                f"{row['element_type']} under O1: {_plural(row['count'], 'tensor')} of a million "
                f"elements or more, {number(row['bytes'] / 1e9)} GB in all; the largest is "
                f"{row['largest']}{source}"
            )
    return lines


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _memory(result: PreflightResult) -> Section:
    parts = {name: size / GIB for name, size in preflight_page.memory_parts(result).items()}
    words = ", ".join(f"{name} {number(size)} GiB" for name, size in parts.items())
    lines = [f"{words[0].upper()}{words[1:]}.", NOT_COUNTED]
    search, table = result.get("batch_search"), None
    if search:
        best = "none" if search["largest"] is None else f"{search['largest']:,}"
        lines.append(f"The largest batch that fits, of those tried: {best}.")
        lines += [search["limit"]] if search["limit"] else []
        rows = [
            (
                f"{batch:,}",
                number(None if size is None else size / GIB),
                "yes" if does_fit else "no",
            )
            for batch, size, does_fit in search["tried"]
        ]
        table = Table(("batch a GPU", "GiB at least", "fits"), rows)
    return Section("Memory", lines, table, chart=preflight_page.memory_bar(result))


def _meshes(result: PreflightResult) -> Section | None:
    search = result.get("mesh_search")
    if not search:
        return None
    meshes, samples = search["meshes"], result["step"]["samples"] * result["num_gpus"]
    tp, cp = result["task"].get("tp") or 1, result["task"].get("cp") or 1
    samples //= tp * cp
    rows = [
        (row["dp_shard"] or "-", str(row["tp"]), _sequences(row), f"{row['batch_size']:,}",
         number(row["state_bytes"] / GIB), number(row["temporaries_bytes"] / GIB),
         number(row["peak_bytes"] / GIB), "yes" if row["fits"] else "no",
         number(1e3 * row["bound_s"]), number(samples / row["bound_s"]),
         "yes" if row["how"] == "compiled" else "no")
        for row in meshes
    ]  # fmt: skip
    lines = [
        f"All take {samples:,} samples a step. The batch is that of the GPUs that share one.",
        "What is not compiled is estimated by arithmetic from what is; memory in GiB a GPU.",
    ]
    fitting = [row for row in meshes if row["fits"]]
    if not fitting:
        nearest = min(meshes, key=lambda row: row["peak_bytes"])
        lines.append(
            f"None fits. The nearest is {nearest['name']}, which needs "
            f"{number(nearest['peak_bytes'] / GIB)} of "
            f"{number(result['memory']['gpu_bytes'] / GIB)} GiB; take more GPUs or fewer samples."
        )
    lines += [f"Not compiled: {why}" for why in search["failed"]]
    lines += [f"Left out: {why}" for why in search["refused"]]
    titles = ("dp_shard", "tp", "cp", "batch", "state", "temporaries", "peak", "fits",
              "ms at least", "samples/s", "compiled")  # fmt: skip
    table = Table(titles, rows, left=("dp_shard",))
    return Section("Meshes, the fastest that fits first", lines, table, wide=True)


def _sequences(mesh: Mapping[str, Any]) -> str:
    """Say how many GPUs share a sequence, and that they do by a ring where they do."""
    return f"{mesh['cp']} ring" if mesh.get("cp_attention") == "ring" else str(mesh["cp"])


def _bound(result: PreflightResult) -> Section:
    step, eager, gpu = result["step"], result["eager"], result["gpu"]
    bound_ms, bytes_ms = 1e3 * step["bound_s"], 1e3 * preflight_page.memory_bound_s(result)
    lines = [
        f"Each kernel moves its bytes at {gpu['memory_gb_per_s']:,g} GB/s or multiplies at "
        f"{preflight_page.peak_tflops(result)[1]:,g} TFLOP/s, whichever takes longer, one after "
        "the other, and nothing else takes time. A run takes longer, but for what it finds in the "
        "L2 cache; how much longer, only a run says.",
        f"Bytes bound {number(bytes_ms)} of the {number(bound_ms)} ms, products the rest.",
        f"{_launch_us(result):g} µs a launch is a guess; CUDA graphs can make it less.",
    ]
    if result["num_gpus"] > 1:
        lines.append("Communication between GPUs is taken to be wholly hidden.")
    lines.append(
        "eager PyTorch: the same bound of the same step. The ratio is one of bounds and not a "
        "speedup."
        if eager
        else "There is no such bound for eager PyTorch here."
    )
    xla_figures, eager_figures = (
        _step_figures(result, step),
        _step_figures(result, eager) if eager else {},
    )
    rows = [
        (
            title,
            number(value),
            number(eager_figures.get(title)),
            number(_ratio(eager_figures.get(title), value)),
        )
        for title, value in xla_figures.items()
    ]
    titles = ("", "XLA", "eager PyTorch", "eager / XLA")
    shown = len(titles) if eager else 2
    table = Table(titles[:shown], [row[:shown] for row in rows], left=("",))
    return Section("Bound", lines, table)


def _ratio(part: float | None, total: float | None, times: float = 1.0) -> float | None:
    return times * part / total if part is not None and total else None


def _launch_us(result: PreflightResult) -> float:
    step = result["step"]
    return round(1e6 * step["launch_s"] / step["launches"], 3) if step["launches"] else 0.0


def bound_with_launches_s(result: PreflightResult, step: PreflightResult) -> float:
    """Return the step's bound in seconds plus a guess at the time of its kernel launches."""
    seconds: float = step["bound_s"] + 1e-6 * _launch_us(result) * step["launches"]
    return seconds


def _step_figures(result: PreflightResult, step: PreflightResult) -> dict[str, float | None]:
    """Return the figures of a step, of XLA's or of eager PyTorch's: title -> value."""
    gpus, speed = result["num_gpus"], step["samples_per_s_at_most"]
    slower_s = bound_with_launches_s(result, step)
    with_launches = f"with {_launch_us(result):g} µs a launch"
    of_all = None if speed is None else gpus * speed
    return {
        "ms a step, at least": 1e3 * step["bound_s"],
        "samples/s a GPU, at most": speed,
        **({f"samples/s on {gpus} GPUs, at most": of_all} if gpus > 1 else {}),
        f"ms a step, {with_launches}": 1e3 * slower_s,
        f"samples/s a GPU, {with_launches}": _ratio(result["step"]["samples"], slower_s),
        "launches": step["launches"],
        "GB": step["bytes"] / 1e9,
        "TFLOP": step["flops"] / 1e12,
    }


def bytes_by_kind(results: Sequence[tuple[str, PreflightResult]]) -> Section:
    """Chart the bytes that each kind of kernel moves, for one result or for several."""
    line = "What a step must move, by what moves it."
    return Section(
        "Bytes by kind", [line], chart=preflight_page.bytes_by_kind(results), page_only=True
    )


def _roofline(result: PreflightResult) -> Section:
    without = [row for row in result["kernels"] if not row[2]]
    lost_ms = 1e3 * sum(row[3] for row in without)
    line = (
        "A dot is a kernel with products, as fast as it can be at best; its area is its part of "
        f"the bound. {len(without):,} kernels without products, with {number(lost_ms)} of "
        f"{number(1e3 * result['step']['bound_s'])} ms, are not in the plot."
    )
    return Section("Roofline", [line], chart=preflight_page.roofline(result), page_only=True)


def _kinds(result: PreflightResult) -> Section:
    step, bound_s = result["step"], result["step"]["bound_s"]
    rows = [
        (row["kind"], f"{row['launches']:,}", number(row["bytes"] / 1e9),
         number(row["flops"] / 1e12), number(1e3 * row["bound_s"]),
         _percent(row["bound_s"], bound_s))
        for row in result["kinds"]
    ]  # fmt: skip
    lines = [
        f"{result['step']['small_launches']:,} of {len(result['kernels']):,} kernels move less "
        "than 1 MB.",
    ]
    if result["thunks"]:
        lines.append(
            f"XLA starts {step['launches']:,} thunks: {_join_counts(result['thunks'])}. The table "
            "counts the operations of its program."
        )
    if result["layouts"]:
        named = {f"{key}{_channel_order(key)}": count for key, count in result["layouts"].items()}
        lines.append(f"Layouts of convolutions: {_join_counts(named)}.")
    unbound = [row["kind"] for row in result["kinds"] if row["bytes"] and not row["bound_s"]]
    if unbound:
        lines.append(f"No bound of {', '.join(unbound)} here: links come under Between GPUs.")
    table = Table(
        ("kind", "launches", "GB", "TFLOP", "ms at least", "% of the bound"), rows, left=("kind",)
    )
    return Section("What runs, by kind", lines, table, wide=True)


def _join_counts(counts: dict[str, int]) -> str:
    most_first = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {name}" for name, count in most_first)


def _channel_order(layout: str) -> str:
    """Return the memory order of a convolution's input, in words.

    XLA's dimension labels, such as b01f_o01i->b01f, give it: b is the batch, f the channels.
    """
    of_input = layout.split("_")[0]
    if of_input.startswith("bf"):
        return " (channels first)"
    return " (channels last)" if of_input.endswith("f") else ""


def _percent(part: float, total: float) -> str:
    return number(_ratio(part, total, 100))


def _large_tensors(result: PreflightResult) -> Section:
    rows = [
        (row["element_type"], f"{row['count']:,}", number(row["bytes"] / 1e9), row["largest"],
         row["source"] or "-")
        for row in result["large_tensors"]
    ]  # fmt: skip
    if not rows:
        return Section(LARGE, ["None."], wide=True)
    table = Table(
        ("type", "tensors", "GB", "largest", "source of the largest"), rows,
        left=("type", "largest", "source of the largest"),
    )  # fmt: skip
    return Section(LARGE, ["Written over the whole step, not there at one time."], table, wide=True)


def _costliest_kernels(result: PreflightResult) -> Section:
    bound_s = result["step"]["bound_s"]
    rows = []
    for row in result["dearest"][:_MOST_ROWS]:
        shapes = row["results"]
        more = f" +{len(shapes) - 2}" if len(shapes) > 2 else ""
        rows.append(
            (number(1e3 * row["bound_s"]), _percent(row["bound_s"], bound_s),
             number(row["bytes"] / 1e9), number(row["flops"] / 1e9), row["kind"], row["name"],
             ", ".join(shapes[:2]) + more, row["source"] or "-")
        )  # fmt: skip
    titles = ("ms", "%", "GB", "GFLOP", "kind", "kernel", "results", "source")
    table = Table(titles, rows, left=titles[4:], not_in_terminal=("%", "kernel"))
    return Section("The dearest kernels", ["ms: at least. %: part of the bound."], table, wide=True)


def _reduction(result: PreflightResult) -> Section | None:
    reduction = result["reduction"]
    if not reduction:
        return None
    collectives, early = reduction["all_reduces"], 100 * reduction["started_before_last_product"]
    rows = [
        (row["name"], number(row["bytes"] / 1e6), "yes" if row["before_last_product"] else "no",
         f"{row['products_beside']:,}", number(1e3 * row["beside_s"]))
        for row in collectives[:_MOST_ROWS]
    ]  # fmt: skip
    lines = [
        f"{_sums_by_kind(collectives)}. {number(early)} % of the bytes start before the last "
        "convolution or matrix product, with others beside them. The rest cannot hide behind "
        "the backward pass.",
        "Beside: what the program runs between the start and the end of a collective.",
    ]
    task = result["task"]
    if max(task.get("tp") or 1, task.get("cp") or 1) > 1:
        lines.append("They are of gradients, and of activations that --tp and --cp share out.")
    if reduction.get("all_gathers"):
        lines.append(
            f"{_plural(reduction['all_gathers'], 'all-gather')} more, to which a GPU gives "
            f"{number(reduction['gathered_bytes'] / 1e6)} MB."
        )
    if len(collectives) > _MOST_ROWS:
        lines.append(f"The first {_MOST_ROWS} are shown.")
    titles = ("collective", "MB", "before the last product", "products beside", "ms beside")
    return Section("Collectives", lines, Table(titles, rows, left=titles[:1]), wide=True)


def _sums_by_kind(collectives: Sequence[Mapping[str, Any]]) -> str:
    """Return how many collectives there are of each kind, and of how many bytes."""
    by_kind: dict[str, list[int]] = defaultdict(list)
    for row in collectives:
        by_kind[row.get("kind") or "collective"].append(row["bytes"])
    return ", ".join(
        f"{_plural(len(sizes), kind)} of {number(sum(sizes) / 1e6)} MB"
        for kind, sizes in sorted(by_kind.items())
    )


def _communication(result: PreflightResult) -> Section | None:
    found = result.get("communication")
    if not found:
        return None
    rows = [
        (row["kind"], f"{row['collectives']:,}", number(row["bytes"] / 1e9),
         number(row["in_node_bytes"] / 1e9), number(row["network_bytes"] / 1e9))
        for row in found["kinds"]
    ]  # fmt: skip
    network = f", {number(found['network_gb_per_s'])} GB/s to other nodes"
    lines = [
        "Bytes that each GPU sends, if NCCL lays rings: through a node's GPUs, then to the next "
        "node.",
        f"At {number(found['in_node_gb_per_s'])} GB/s within a node"
        f"{network if found['num_nodes'] > 1 else ''}, that takes "
        f"{number(1e3 * found['link_s'])} ms, of which {number(100 * found['overlapped'])} % run "
        "beside kernels in the order of the compiled program.",
        f"The step takes at least {number(1e3 * found['bound_s'])} ms with the rest.",
    ]
    titles = ("collective", "number", "GB", "GB within a node", "GB over the network")
    return Section("Between GPUs", lines, Table(titles, rows, left=titles[:1]))


def _cost(result: PreflightResult) -> Section:
    cost = result["cost"]
    rows = [
        (key.removesuffix("_s"), number(value)) for key, value in cost.items() if key.endswith("_s")
    ]
    peak = cost.get("compiler_peak_bytes")
    lines = [] if peak is None else [f"The compiler used {number(peak / GIB)} GiB here."]
    traced = cost.get("tracer_peak_bytes")
    lines += [] if traced is None else [f"Tracing the step used {number(traced / GIB)} GiB here."]
    return Section("Cost of asking", lines, Table(("", "seconds"), rows, left=("",)))


def _notes(result: PreflightResult) -> Section:
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    eager = result["eager"] or {}
    lines = [
        f"compiled with {versions}",
        *result["notes"],
        *([f"eager PyTorch: {eager['note']}"] if eager.get("note") else []),
    ]
    return Section("Notes", lines)
