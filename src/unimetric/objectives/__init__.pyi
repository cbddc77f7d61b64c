# Names of `unimetric.objectives`, written by `make docs`.
from unimetric.kinds import Output as Output
from unimetric.objectives.anchored import Anchored as Anchored
from unimetric.objectives.cached import Cached as Cached
from unimetric.objectives.cross_batch import CrossBatch as CrossBatch
from unimetric.objectives.crt import CRT as CRT
from unimetric.objectives.diva import Diva as Diva
from unimetric.objectives.matryoshka import Matryoshka as Matryoshka
from unimetric.objectives.mixup import Mixup as Mixup
from unimetric.objectives.plain import Plain as Plain
from unimetric.objectives.s2sd import S2SD as S2SD
from unimetric.objectives.uniform_prior import UniformPrior as UniformPrior
