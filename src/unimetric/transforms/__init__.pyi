# Names of `unimetric.transforms`, written by `make docs`.
from unimetric.images.recipe import Recipe as Recipe
from unimetric.transforms.adv import adv as adv
from unimetric.transforms.base import base as base
from unimetric.transforms.big import big as big
from unimetric.transforms.crt import crt as crt
from unimetric.transforms.glyphs import glyphs as glyphs
from unimetric.transforms.puma import puma as puma
from unimetric.transforms.red import red as red
