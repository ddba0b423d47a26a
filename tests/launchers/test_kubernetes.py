"""The manifest in docs/ is one that the Kubeflow Trainer takes."""

import yaml

from accbench import config
from tests.conftest import ROOT


def test_the_manifest_is_of_the_trainers_schema():
    from kubeflow_trainer_api import models  # a second of imports

    manifest = yaml.safe_load((ROOT / "docs" / "trainjob.yaml").read_text())
    # What its models do not know they leave out.
    assert models.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict() == manifest


def test_its_flags_are_ours():
    trainer = yaml.safe_load((ROOT / "docs" / "trainjob.yaml").read_text())["spec"]["trainer"]
    told = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1"}
    flags = trainer["args"]
    for name, value in told.items():
        flags = [flag.replace(f"$({name})", value) for flag in flags]
    task = config.parse(flags)
    assert (task.nnodes, task.node_rank, task.rdzv_endpoint) == ("2", 1, "a:1")
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == str(task.nproc_per_node)
