# Names of `unimetric.miners`, written by `make docs`.
from unimetric.miners.all import All as All
from unimetric.miners.distance_weighted import DistanceWeighted as DistanceWeighted
from unimetric.miners.hardest import Hardest as Hardest
from unimetric.miners.multi_similarity import MultiSimilarity as MultiSimilarity
from unimetric.miners.random import Random as Random
from unimetric.miners.rho import Rho as Rho
from unimetric.miners.semihard import Semihard as Semihard
from unimetric.miners.softhard import Softhard as Softhard
