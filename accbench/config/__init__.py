"""A task's flags, the values that they take, and the plug-ins that they name."""

from accbench.config.field import expand_home, flag
from accbench.config.parsing import (
    as_flags,
    parse,
    parse_flags,
    read_flags,
    task_of,
    task_of_values,
)
from accbench.config.task import (
    CONFIG_FILE,
    RECORDS_FILE,
    SCRIPTS_OWN,
    TaskConfig,
    amp_level,
    as_mapping,
    data_name,
    devices_per_worker,
    makes_batches_between_steps,
)

__all__ = [
    "CONFIG_FILE",
    "RECORDS_FILE",
    "SCRIPTS_OWN",
    "TaskConfig",
    "amp_level",
    "as_flags",
    "as_mapping",
    "data_name",
    "devices_per_worker",
    "expand_home",
    "flag",
    "makes_batches_between_steps",
    "parse",
    "parse_flags",
    "read_flags",
    "task_of",
    "task_of_values",
]
