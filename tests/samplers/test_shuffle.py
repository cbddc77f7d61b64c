import numpy as np

from unimetric.spec import create


def test_each_row_at_most_once_an_epoch():
    sampler = create("samplers", "shuffle", labels=np.zeros(107, int), batch_size=10, seed=0)
    drawn = np.concatenate(list(sampler))
    assert len(drawn) == 100 == len(set(drawn))


def test_what_one_epoch_leaves_out_others_bring():
    sampler = create("samplers", "shuffle", labels=np.zeros(19, int), batch_size=10, seed=0)
    times = np.zeros(19, int)
    for epoch in range(400):
        sampler.epoch = epoch
        times += np.bincount(sampler.batch(0), minlength=19)
    assert abs(times / 400 - 10 / 19).max() < 0.1


def test_a_small_set_repeats_evenly():
    sampler = create("samplers", "shuffle", labels=np.zeros(4, int), batch_size=10, seed=0)
    assert sorted(np.bincount(sampler.batch(0))) == [2, 2, 3, 3]
