"""Models of transformers and timm by their own classes, as small as they can be, with a batch each.

    models() -> name -> (model, batch)

A batch is what the model is called with, `model(**batch)` or `model(images)`; dropout is off, for
engines draw other random numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, Any]
SIZE, NUM_CLASSES = 32, 3


def tokens(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(1, 16, (2, 6)), **more}


def bert() -> Made:
    from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    batch = tokens(labels=torch.tensor([0, 1]), attention_mask=torch.ones(2, 6).long())
    return BertForSequenceClassification(config), BatchEncoding(batch)


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    batch = tokens()
    labels = batch["input_ids"].clone()
    labels[0, :2] = -100  # which torch ignores
    return GPT2LMHeadModel(config), {**batch, "labels": labels}


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=16, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), tokens(labels=torch.randint(1, 16, (2, 4)))


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, image_size=16, patch_size=8,
        num_labels=NUM_CLASSES,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 2])}
    return ViTForImageClassification(config), batch


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8,
    )  # fmt: skip
    batch = tokens()
    return LlamaForCausalLM(config), {**batch, "labels": batch["input_ids"].clone()}


def images(net: nn.Module) -> Made:
    return net, torch.randn(4, 3, SIZE, SIZE)


def resnet() -> Made:
    from timm.models.resnet import BasicBlock, ResNet

    return images(
        ResNet(BasicBlock, (1, 1, 1, 1), NUM_CLASSES, channels=(4, 4, 8, 8), stem_width=4)
    )


def vision_transformer() -> Made:
    from timm.models.vision_transformer import VisionTransformer

    return images(
        VisionTransformer(SIZE, 16, num_classes=NUM_CLASSES, embed_dim=16, depth=1, num_heads=2)
    )


def mlp_mixer() -> Made:
    from timm.models.mlp_mixer import MlpMixer

    return images(MlpMixer(NUM_CLASSES, SIZE, patch_size=16, num_blocks=1, embed_dim=16))


def convnext() -> Made:
    from timm.models.convnext import ConvNeXt

    return images(ConvNeXt(num_classes=NUM_CLASSES, depths=(1, 1, 1, 1), dims=(4, 4, 8, 8)))


def swin() -> Made:
    from timm.models.swin_transformer import SwinTransformer

    return images(SwinTransformer(
        SIZE, 4, num_classes=NUM_CLASSES, embed_dim=8, depths=(2,), num_heads=(2,), window_size=4,
        drop_path_rate=0.0,
    ))  # fmt: skip


def densenet() -> Made:
    from timm.models.densenet import DenseNet

    return images(DenseNet(4, (1, 1), NUM_CLASSES))


def convmixer() -> Made:
    from timm.models.convmixer import ConvMixer

    return images(ConvMixer(8, 1, kernel_size=3, patch_size=8, num_classes=NUM_CLASSES))


def beit() -> Made:
    from timm.models.beit import Beit

    return images(Beit(SIZE, 16, num_classes=NUM_CLASSES, embed_dim=16, depth=1, num_heads=2))


def poolformer() -> Made:
    from timm.models.metaformer import MetaFormer, Pooling

    return images(MetaFormer(
        num_classes=NUM_CLASSES, depths=(1,), dims=(8,), token_mixers=Pooling,
    ))  # fmt: skip


def cait() -> Made:
    from timm.models.cait import Cait

    return images(Cait(SIZE, 16, num_classes=NUM_CLASSES, embed_dim=16, depth=1, num_heads=2))


TRANSFORMERS: tuple[Callable[[], Made], ...] = (bert, gpt2, t5, vit, llama)
TIMM: tuple[Callable[[], Made], ...] = (
    resnet, vision_transformer, mlp_mixer, convnext, swin, densenet, convmixer, beit,
    poolformer, cait,
)  # fmt: skip
