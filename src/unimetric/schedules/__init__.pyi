# Names of `unimetric.schedules`, written by `make docs`.
from unimetric.schedules.constant import constant as constant
from unimetric.schedules.cosine import cosine as cosine
from unimetric.schedules.step import step as step
