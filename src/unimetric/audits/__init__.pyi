# Names of `unimetric.audits`, written by `make docs`.
from unimetric.audits.clusters import clusters as clusters
from unimetric.audits.near_duplicates import near_duplicates as near_duplicates
from unimetric.audits.outliers import outliers as outliers
from unimetric.audits.suspicious_labels import suspicious_labels as suspicious_labels
from unimetric.audits.worst_classes import worst_classes as worst_classes
