# Names of `unimetric.samplers`, written by `make docs`.
from unimetric.samplers._batches import occurrence as occurrence
from unimetric.samplers._batches import rank_slice as rank_slice
from unimetric.samplers._batches import share as share
from unimetric.samplers.by_source import BySource as BySource
from unimetric.samplers.class_random import ClassRandom as ClassRandom
from unimetric.samplers.distance_matching import DistanceMatching as DistanceMatching
from unimetric.samplers.frechet_matching import FrechetMatching as FrechetMatching
from unimetric.samplers.greedy_coreset import GreedyCoreset as GreedyCoreset
from unimetric.samplers.samples_per_class import SamplesPerClass as SamplesPerClass
from unimetric.samplers.shuffle import Shuffle as Shuffle
