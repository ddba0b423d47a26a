"""ResNets as torchvision builds them (He et al., Deep Residual Learning, 2015; v1.5)."""

from torch import nn

from accbench.models import ImageClassification


class Family:
    """The models resnet10 to resnet152.

    resnet10 has one block per stage; torchvision has no function of that name. It is for
    machines on which resnet18 takes too long to compile.
    """

    names = ("resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")

    @staticmethod
    def spec(name: str) -> ImageClassification:
        """Return the spec of a model in `names`, which builds it with random weights."""

        def build_net(num_classes: int) -> nn.Module:
            from torchvision.models import resnet  # takes seconds; a launcher needs only names

            if name == "resnet10":
                return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=num_classes)
            net: nn.Module = getattr(resnet, name)(num_classes=num_classes)
            return net

        return ImageClassification(name, build_net)
