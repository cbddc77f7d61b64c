# Names of `unimetric.optimizers`, written by `make docs`.
from unimetric.optimizers.adam import adam as adam
from unimetric.optimizers.adamw import adamw as adamw
from unimetric.optimizers.sgd import sgd as sgd
