"""timm's own train.py, given samples that lie in memory in place of files.

python with_timm.py TRAIN_PY
"""

import functools
import runpy
import sys

import timm.data
import workload
from torch.nn import Module, parallel


class Images(workload.Samples):
    """The samples; timm sets its transform, which is for files."""

    transform = target_transform = None


class OnCpu(parallel.DistributedDataParallel):
    """DistributedDataParallel that drops the name of a device, which it refuses on a CPU."""

    def __init__(self, module: Module, device_ids: object = None, **settings: object) -> None:
        super().__init__(module, **settings)


def main() -> None:
    case, train_py = workload.begin(), sys.argv[1]
    timm.data.create_dataset = lambda *_, **__: Images(case)
    # Its default asks for worker processes that stay, where there are none.
    timm.data.create_loader = functools.partial(timm.data.create_loader, persistent_workers=False)
    parallel.DistributedDataParallel = OnCpu
    # What the other scripts do: no augmentation, and no evaluation beyond the one of an epoch.
    sys.argv = [
        train_py, "--device=cpu", f"--model={workload.IMAGE_MODELS[case.model][0]}",
        f"--num-classes={workload.NUM_CLASSES}", f"--img-size={case.image_size}",
        f"--batch-size={case.batch_size}", "--epochs=1", "--warmup-epochs=0",
        "--opt=adamw", "--opt-kwargs", "fused=True", f"--lr={workload.LR}",
        f"--weight-decay={workload.WEIGHT_DECAY}", "--no-aug", "--smoothing=0", "--workers=0",
        # A vision transformer has embeddings of the positions in images of one size.
        *([] if case.model == "resnet18" else ["--model-kwargs", f"img_size={case.image_size}"]),
        "--no-prefetcher", f"--output={case.folder}", "--val-split=", "--log-interval=1000000",
        *(["--torchcompile=inductor"] if case.compiled else []),
    ]  # fmt: skip
    runpy.run_path(train_py, run_name="__main__")


if __name__ == "__main__":
    main()
