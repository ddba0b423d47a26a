"""ResNets as torchvision builds them (He et al., Deep Residual Learning, 2015; v1.5)."""

from torch import nn

from accbench.models import ImageClassification


class Family:
    """resnet10 to resnet152.

    resnet10 has one block a stage; torchvision has no function of that name. It is for
    machines on which a resnet18 takes too long to compile.
    """

    names = ("resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")

    @staticmethod
    def spec(name: str) -> ImageClassification:
        """One of `names`, with random weights."""

        def build_net(num_classes: int) -> nn.Module:
            from torchvision.models import resnet  # takes seconds, and a launcher needs only names

            if name == "resnet10":
                return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=num_classes)
            net: nn.Module = getattr(resnet, name)(num_classes=num_classes)
            return net

        return ImageClassification(name, build_net)
