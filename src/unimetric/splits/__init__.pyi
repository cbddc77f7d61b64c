# Names of `unimetric.splits`, written by `make docs`.
from unimetric.splits.few_shot import few_shot as few_shot
from unimetric.splits.ood import ood as ood
from unimetric.splits.published import published as published
from unimetric.splits.standard import standard as standard
