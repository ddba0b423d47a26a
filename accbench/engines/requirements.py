"""What a launcher asks of an engine, before any backend is imported."""

import abc
from pathlib import Path

from accbench import models
from accbench.config import TaskConfig
from accbench.distributed import mesh
from accbench.distributed.mesh import MeshShape
from accbench.errors import RequestError


class EngineRequirements(abc.ABC):
    """What an engine needs of a machine and of a task, and where its workers start."""

    @classmethod
    @abc.abstractmethod
    def find_device(cls, requested: str) -> str:
        """Return `--device` as cpu, cuda or tpu; auto is the accelerator that this machine has."""

    @classmethod
    @abc.abstractmethod
    def unavailable_reason(cls, task: TaskConfig) -> str | None:
        """Return why this task cannot run here and what to do, or None if it can."""

    @classmethod
    def with_current_flags(cls, task: TaskConfig) -> TaskConfig:
        """Return the task with this engine's older spellings of flags replaced by today's."""
        return task

    @classmethod
    def mesh_of(cls, task: TaskConfig, world_size: int) -> MeshShape:
        """Return how a number of workers are laid out.

        Raises:
            RequestError: the task's flags do not fit that number, or this engine.
        """
        shape = mesh.of_task(task, world_size)
        problem = cls.mesh_problem(task, shape) if mesh.is_sharded(task) else None
        if problem is None and task.sequence_parallel:
            length = getattr(models.of_task(task), "sequence_length", None)
            problem = mesh.sequence_problem(task, length)
        if problem is None and models.shards_classes(task):
            problem = cls.class_shards_problem(task)
        if problem is not None:
            raise RequestError(problem)
        return shape

    @classmethod
    def mesh_problem(cls, task: TaskConfig, shape: MeshShape) -> str | None:
        """Return why this engine cannot shard as asked and what to do, or None if it can."""
        if task.offload != "none":
            return cls.no_offloading(task)
        sizes = {"pp": task.pp, "tp": task.tp, "cp": task.cp}
        asked = next(
            (f"--{name} {size}" for name, size in sizes.items() if size > 1),
            f"--dp_shard {task.dp_shard}",
        )
        others = (
            "ddp or inductor" if task.pp > 1 or task.script is not None else "ddp, inductor or jax"
        )
        return (
            f"{asked}: engine {task.engine} keeps the whole model on each worker; use --engine "
            f"{others}"
        )

    @classmethod
    def class_shards_problem(cls, task: TaskConfig) -> str | None:
        """Return why this engine cannot shard a head's classes and what to do, or None."""
        return (
            f"--arcface.sample_rate: engine {task.engine} keeps all classes on each worker; use "
            "--engine ddp or inductor, or leave it out"
        )

    @classmethod
    def no_offloading(cls, task: TaskConfig) -> str:
        """Return the refusal of an engine that keeps its state on the device."""
        return (
            f"--offload {task.offload}: engine {task.engine} keeps all of its state on the device; "
            "use --engine ddp or inductor"
        )

    @classmethod
    def other_python(cls) -> Path | None:
        """Return the Python of another environment that has this engine's packages.

        None if this environment has them, or no other is known.
        """
        return None

    @classmethod
    def worker_env(cls, task: TaskConfig, local_rank: int) -> dict[str, str]:
        """Return environment variables that a worker's process starts with.

        Those of the user's own environment win, but for `variables_replaced_by_flags`.
        """
        return {}

    @classmethod
    def variables_replaced_by_flags(cls, task: TaskConfig) -> frozenset[str]:
        """Return the names of variables in `worker_env` that say what a given flag says."""
        return frozenset()
