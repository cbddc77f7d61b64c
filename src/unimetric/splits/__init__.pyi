# Names of `unimetric.splits`, written by `make docs`.
from unimetric.splits.by_group import by_group as by_group
from unimetric.splits.by_similarity import by_similarity as by_similarity
from unimetric.splits.by_time import by_time as by_time
from unimetric.splits.few_shot import few_shot as few_shot
from unimetric.splits.ood import ood as ood
from unimetric.splits.open_set import open_set as open_set
from unimetric.splits.published import published as published
from unimetric.splits.standard import standard as standard
