# Names of `unimetric.stores`, written by `make docs`.
from unimetric.stores.flat import Flat as Flat
from unimetric.stores.lance import Lance as Lance
from unimetric.stores.pgvector import Pgvector as Pgvector
