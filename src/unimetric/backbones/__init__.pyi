# Names of `unimetric.backbones`, written by `make docs`.
from unimetric.backbones._convnets import IMAGENET_MEAN as IMAGENET_MEAN
from unimetric.backbones._convnets import IMAGENET_STD as IMAGENET_STD
from unimetric.backbones._convnets import freeze_batchnorm as freeze_batchnorm
from unimetric.backbones._convnets import rest_batchnorm as rest_batchnorm
from unimetric.backbones._convnets import tokens_of as tokens_of
from unimetric.backbones._weights import fill as fill
from unimetric.backbones._weights import read_weights as read_weights
from unimetric.backbones.bn_inception import BnInception as BnInception
from unimetric.backbones.efficientnet_lite import EfficientnetLite as EfficientnetLite
from unimetric.backbones.googlenet import GoogLeNet as GoogLeNet
from unimetric.backbones.mit import Mit as Mit
from unimetric.backbones.small import Small as Small
from unimetric.backbones.timm import Timm as Timm
