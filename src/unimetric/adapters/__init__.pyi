# Names of `unimetric.adapters`, written by `make docs`.
from unimetric.adapters.adaptformer import adaptformer as adaptformer
from unimetric.adapters.last_layers import last_layers as last_layers
from unimetric.adapters.linear_probe import linear_probe as linear_probe
from unimetric.adapters.lora import lora as lora
from unimetric.adapters.prompt_pool import prompt_pool as prompt_pool
from unimetric.adapters.puma import puma as puma
from unimetric.adapters.stochastic_adapter import stochastic_adapter as stochastic_adapter
from unimetric.adapters.vpt import vpt as vpt
