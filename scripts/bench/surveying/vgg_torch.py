"""The image task's network in PyTorch, with weights of the Flax one."""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class VGG(nn.Module):
    """Eight convolutions in four groups with a pooling behind each, and two dense layers."""

    def __init__(self, weights: Mapping[str, np.ndarray]):
        super().__init__()
        kernels = [weights[f"convolutions.{i}.kernel"] for i in range(8)]
        self.convolutions = nn.ModuleList(nn.Conv2d(k.shape[2], k.shape[3], 3, padding=1) for k in kernels)
        self.dense = nn.ModuleList([nn.Linear(256, 128), nn.Linear(128, 10)])
        for group in ("convolutions", "dense"):
            for i, layer in enumerate(getattr(self, group)):
                kernel = torch.from_numpy(weights[f"{group}.{i}.kernel"])
                with torch.no_grad():
                    layer.weight.copy_(kernel.permute(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T)
                    layer.bias.copy_(torch.from_numpy(weights[f"{group}.{i}.bias"]))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[batch, 32, 32, 1] -> logits."""
        x = images.permute(0, 3, 1, 2)
        for number, convolution in enumerate(self.convolutions):
            x = F.relu(convolution(x))
            x = F.max_pool2d(x, 2) if number % 2 else x
        x = x.permute(0, 2, 3, 1).flatten(1)  # features in the order of the Flax model
        return self.dense[1](F.relu(self.dense[0](x)))
