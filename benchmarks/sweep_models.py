"""The models of benchmarks/model_sweep.py, each with the flags of its run. Add a line to add one.

Images are as small as a model takes, for what is asked is whether it trains, and the same.
"""

import json
import random
from collections.abc import Iterator

# Of models that are not named here: the smallest that works, see `sizes`.
PIXELS = (64, 128, 224, 256, 299, 384)

TORCHVISION = {
    "alexnet": 64, "vgg11": 64, "vgg11_bn": 64, "resnet18": 64, "resnet50": 64,
    "resnext50_32x4d": 64, "wide_resnet50_2": 64, "densenet121": 64, "googlenet": 64,
    "inception_v3": 299, "mobilenet_v2": 64, "mobilenet_v3_small": 64, "mnasnet0_5": 64,
    "shufflenet_v2_x0_5": 64, "squeezenet1_1": 64, "efficientnet_b0": 64, "efficientnet_v2_s": 64,
    "regnet_x_400mf": 64, "regnet_y_400mf": 64, "convnext_tiny": 64, "vit_b_32": 64, "swin_t": 64,
    "swin_v2_t": 64, "maxvit_t": 224,
}  # fmt: skip
SEGMENTATION = {
    "fcn_resnet50": 64, "deeplabv3_resnet50": 64, "deeplabv3_mobilenet_v3_large": 64,
    "lraspp_mobilenet_v3_large": 64,
}  # fmt: skip
DETECTION = {
    "fasterrcnn_mobilenet_v3_large_fpn": 64, "fasterrcnn_resnet50_fpn": 64,
    "retinanet_resnet50_fpn": 64, "fcos_resnet50_fpn": 64, "ssdlite320_mobilenet_v3_large": 320,
    "maskrcnn_resnet50_fpn": 64, "keypointrcnn_resnet50_fpn": 64,
}  # fmt: skip
TIMM = {
    "resnet18": 64, "resnet50d": 64, "seresnet50": 64, "resnest14d": 64, "res2net50_26w_4s": 64,
    "regnety_002": 64, "repvgg_a0": 64, "efficientnet_lite0": 64, "mobilenetv3_small_050": 64,
    "mobilenetv4_conv_small": 64, "ghostnet_050": 64, "mixnet_s": 64, "hardcorenas_a": 64,
    "lcnet_050": 64, "tinynet_e": 64, "dla46_c": 64, "cspresnet50": 64, "darknet53": 64,
    "ese_vovnet19b_dw": 64, "hrnet_w18_small": 64, "nf_regnet_b0": 64, "eca_nfnet_l0": 64,
    "dm_nfnet_f0": 64, "convnext_atto": 64, "convnextv2_atto": 64, "convmixer_768_32": 64,
    "edgenext_xx_small": 64, "fastvit_t8": 64, "mobileone_s0": 64, "repvit_m0_9": 64,
    "vit_tiny_patch16_224": 64, "deit_tiny_patch16_224": 64, "deit_tiny_distilled_patch16_224": 64,
    "beit_base_patch16_224": 64, "eva02_tiny_patch14_224": 56, "swin_tiny_patch4_window7_224": 64,
    "swinv2_cr_tiny_ns_224": 64, "mixer_s32_224": 64, "resmlp_12_224": 64, "gmlp_ti16_224": 64,
    "cait_xxs24_224": 64, "xcit_nano_12_p16_224": 64, "pit_ti_224": 64, "coat_tiny": 64,
    "levit_128s": 64, "mobilevit_xxs": 64, "mobilevitv2_050": 64, "efficientformer_l1": 224,
    "poolformer_s12": 64, "pvt_v2_b0": 64, "twins_svt_small": 64,
    "visformer_tiny": 64, "volo_d1_224": 64, "tnt_s_patch16_224": 64, "crossvit_tiny_240": 240,
    "convit_tiny": 64, "coatnet_nano_rw_224": 64, "maxvit_nano_rw_256": 64, "nest_tiny": 64,
    "focalnet_tiny_srf": 64, "davit_tiny": 64, "inception_next_tiny": 64, "mambaout_femto": 64,
    "starnet_s1": 64, "efficientvit_b0": 64, "efficientvit_m0": 224, "tiny_vit_5m_224": 64,
    "rdnet_tiny": 64, "hgnetv2_b0": 64, "hiera_tiny_224": 64, "sequencer2d_s": 64,
    "inception_v4": 128, "xception41": 64, "skresnet18": 64, "selecsls42b": 64, "gernet_s": 64,
}  # fmt: skip
# name -> further flags.
LANGUAGE: dict[str, tuple[str, ...]] = {
    **{name: ("--seq_len=32",) for name in ("bert_tiny", "gpt2_tiny", "llama_tiny", "lstm")},
    "convlstm_tiny": ("--image_size=16",),
}

KINDS = ("torchvision", "segmentation", "detection", "timm", "language")


def of_kinds(kinds: list[str]) -> dict[str, tuple[str, ...]]:
    """Model -> flags."""
    of_images = {
        "torchvision": ("torchvision", TORCHVISION), "segmentation": ("torchvision", SEGMENTATION),
        "detection": ("torchvision", DETECTION), "timm": ("timm", TIMM),
    }  # fmt: skip
    found: dict[str, tuple[str, ...]] = {}
    for kind in kinds:
        if kind == "language":
            found |= LANGUAGE
            continue
        family, sizes = of_images[kind]
        found |= {f"{family}:{name}": pixels(size) for name, size in sizes.items()}
    return found


def pixels(size: int) -> tuple[str, ...]:
    return (f"--image_size={size}", "--synthetic.num_classes=10")


def drawn(
    num_models: int, seed: int, most_parameters: float
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Other models of timm and torchvision, drawn at random, of at most so many parameters."""
    from accbench.models.tasks import registered

    named = of_kinds(["torchvision", "timm"])
    others = [f"timm:{name}" for name in registered.names("timm", "models")]
    others += [f"torchvision:{name}" for name in registered.names("torchvision", "models")]
    others = [name for name in others if name not in named]
    random.Random(seed).shuffle(others)
    for name in others:
        if num_models == 0:
            return
        num_parameters, size = smallest(name)
        if num_parameters <= most_parameters:
            num_models -= 1
            yield name, pixels(size)


def smallest(name: str) -> tuple[int, int]:
    """How many parameters a model has, and the first of `PIXELS` that it takes, if any, else 224.

    Nothing is computed: torch's meta device has shapes alone.
    """
    import torch
    import torch._dynamo  # which cannot be imported where meta is the default device

    from accbench import models

    num_parameters = 0
    for size in PIXELS:
        try:
            with torch.device("meta"):
                model = models.resolve(name, size).build(10)
                num_parameters = sum(parameter.numel() for parameter in model.parameters())
                model(torch.zeros(2, 3, size, size, dtype=torch.uint8))
        except Exception:  # whatever a model makes of a size that is not its own
            continue
        return num_parameters, size
    return num_parameters, 224


if __name__ == "__main__":
    print(json.dumps(of_kinds(list(KINDS)), indent=1))
