# Names of `unimetric.heads`, written by `make docs`.
from unimetric.heads.crt import CRT as CRT
from unimetric.heads.diva import Diva as Diva
from unimetric.heads.identity import Identity as Identity
from unimetric.heads.linear import Linear as Linear
from unimetric.heads.mlp import Mlp as Mlp
