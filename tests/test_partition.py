"""Partitions: the promises that hold for any data, and the papers' counts on data sets of the true sizes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import AtollError
from atoll.problems.partition import (
    FEDDRL,
    PARTITIONS,
    ClusteredEqual,
    ClusteredNonEqual,
    Dirichlet,
    Iid,
    Pareto,
    Partition,
    PerFedAvg,
    ShardsEqual,
    ShardsNonEqual,
)
from atoll.report.partition_plot import partition_figure


def data(counts, seed=0):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


MNIST = data([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
MNIST_TEST = data([980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009])
FASHION = data([6000] * 10)
CIFAR100 = data([500] * 100)
TRAIN = {"mnist": MNIST, "fashion-mnist": FASHION, "cifar100": CIFAR100}

# Small members of every family, each of which fits the federations that `federations` draws.
SMALL: list[Partition] = [
    PerFedAvg(a=4, a_test=2),
    Pareto(labels=2),
    Pareto(labels=1, power=0.0),
    ClusteredEqual(),
    ClusteredEqual(delta=0.3, labels=1, samples=3),
    ClusteredNonEqual(),
    ClusteredNonEqual(delta=1.0, labels=3),
    ShardsEqual(),
    ShardsNonEqual(),
    ShardsNonEqual(low=2, high=5),
    Dirichlet(),
    Dirichlet(alpha=0.01),
    Iid(),
]
small = st.sampled_from(SMALL)
seeds = st.integers(0, 2**32)


@st.composite
def federations(draw):
    """Labels, test labels and a number of clients; every label has at least as many samples as there are clients."""
    classes, clients = draw(st.sampled_from([4, 6, 10])), draw(st.integers(1, 12))
    sizes = draw(st.lists(st.integers(100, 200), min_size=classes, max_size=classes))
    sizes_test = draw(st.lists(st.integers(24, 60), min_size=classes, max_size=classes))
    return data(sizes), data(sizes_test), clients


def tally(shards, labels):
    return np.stack([np.bincount(labels[shard], minlength=labels.max() + 1) for shard in shards])


def assert_disjoint_and_filled(shards, samples, clients):
    assert len(shards) == clients
    assert all(shard.dtype == np.int64 and len(shard) > 0 for shard in shards)
    together = np.concatenate(shards)
    assert len(np.unique(together)) == len(together)
    assert together.min() >= 0
    assert together.max() < samples


@given(small, federations(), seeds)
@settings(max_examples=150, deadline=None)
def test_no_sample_twice_and_no_client_empty(partition, federation, seed):
    labels, labels_test, clients = federation
    shards = partition.split(labels, clients, seed)
    assert_disjoint_and_filled(shards, len(labels), clients)
    tests = partition.split_test(labels_test, labels, shards, seed)
    assert_disjoint_and_filled(tests, len(labels_test), clients)
    for shard, test in zip(shards, tests, strict=True):
        assert set(labels_test[test]) <= set(labels[shard])


@given(small, federations(), seeds)
@settings(max_examples=60, deadline=None)
def test_the_seed_decides_and_nothing_else(partition, federation, seed):
    labels, labels_test, clients = federation

    def both(seed):
        shards = partition.split(labels, clients, seed)
        return shards + partition.split_test(labels_test, labels, shards, seed)

    first = both(seed)
    np.random.seed(1)  # noqa: NPY002 (the global state must not matter)
    assert all(map(np.array_equal, first, both(seed)))
    if clients > 1:  # a single client may well have everything
        # Two clients and four labels can be dealt in few ways, so one other seed may agree by chance; not 30.
        assert any(not all(map(np.array_equal, first, both(seed + other))) for other in range(1, 31))


@given(st.sampled_from([Iid(), Dirichlet(), ShardsEqual(), ShardsNonEqual()]), federations(), seeds)
@settings(max_examples=40, deadline=None)
def test_all_samples_are_used(partition, federation, seed):
    labels, labels_test, clients = federation
    shards = partition.split(labels, clients, seed)
    assert sum(map(len, shards)) == len(labels)
    assert sum(map(len, partition.split_test(labels_test, labels, shards, seed))) == len(labels_test)


@given(federations(), seeds, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_pareto_deals_labels_evenly_and_uses_them_up(federation, seed, k):
    labels, _, clients = federation
    counts = tally(Pareto(labels=k).split(labels, clients, seed), labels)
    holders = (counts > 0).sum(axis=0)
    assert np.all((counts > 0).sum(axis=1) == k)
    assert holders.max() - holders.min() <= 1
    assert np.array_equal(counts.sum(axis=0)[holders > 0], np.bincount(labels)[holders > 0])


@given(federations(), seeds, st.floats(0.1, 1.0), st.integers(1, 2))
@settings(max_examples=60, deadline=None)
def test_clusters_share_labels_with_nobody_else(federation, seed, delta, k):
    labels, _, clients = federation
    main = max(1, round(delta * clients))
    for partition in (ClusteredEqual(delta=delta, labels=k), ClusteredNonEqual(delta=delta, labels=k)):
        counts = tally(partition.split(labels, clients, seed), labels)
        holds = counts > 0
        assert np.all(holds.sum(axis=1) == k)
        assert np.all(holds[:main] == holds[0])
        assert not np.any(holds[main:] & holds[0])
        assert all(len(set(row[row > 0])) == 1 for row in counts), "a client has equally many of each of its labels"
        if type(partition) is ClusteredEqual:
            assert len(set(counts.sum(axis=1))) == 1


@given(federations(), seeds, st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_equal_shards_give_equal_sizes_and_few_labels(federation, seed, per_client):
    labels, _, clients = federation
    counts = tally(ShardsEqual(per_client).split(labels, clients, seed), labels)
    sizes = counts.sum(axis=1)
    assert sizes.max() - sizes.min() <= per_client
    # One shard holds consecutive labels, so a cut between labels adds one to one shard.
    assert (counts > 0).sum() <= per_client * clients + counts.shape[1] - 1


@pytest.mark.parametrize("seed", range(3))
def test_per_fedavg_on_mnist(seed):
    partition = PerFedAvg()
    shards = partition.split(MNIST, 50, seed)
    counts = tally(shards, MNIST)
    counts_test = tally(partition.split_test(MNIST_TEST, MNIST, shards, seed), MNIST_TEST)
    assert [len(shard) for shard in shards] == [980] * 25 + [490] * 25
    assert np.all(counts[:25] == [196] * 5 + [0] * 5)
    pairs = [tuple(np.flatnonzero(row)) for row in counts[25:]]
    assert set(pairs) == set(itertools.product(range(5), range(5, 10))), "each pair of classes once"
    assert all(row[low] == 98 and row[high] == 392 for row, (low, high) in zip(counts[25:], pairs, strict=True))
    assert np.array_equal(counts_test * 196, counts * 34)


def test_per_fedavg_names_the_largest_a_that_fits():
    with pytest.raises(AtollError, match=r"label 4, .*the largest a that fits is 212"):
        PerFedAvg(a=214).split(MNIST, 50, 0)
    largest = PerFedAvg(a=212)
    shards = largest.split(MNIST, 50, 0)
    with pytest.raises(AtollError, match="the largest a_test that fits is 34"):
        replace(largest, a_test=36).split_test(MNIST_TEST, MNIST, shards, 0)
    with pytest.raises(AtollError, match="use fewer clients"):
        PerFedAvg().split(data([10] * 10), 50, 0)
    with pytest.raises(AtollError, match="even number"):
        PerFedAvg(a=2).split(data([10] * 9), 2, 0)
    assert [len(shard) for shard in PerFedAvg(a=2).split(data([10] * 4), 3, 0)] == [4, 4, 5], "two of three, rounded up"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "clients", "size"),
    [
        ("mnist", 10, 1960),
        ("mnist", 100, 192),
        ("fashion-mnist", 10, 2000),
        ("fashion-mnist", 100, 200),
        ("cifar100", 10, 1600),
        ("cifar100", 100, 160),
    ],
)
def test_clustered_equal_has_the_authors_sizes(name, clients, size, seed):
    labels = TRAIN[name]
    counts = tally(ClusteredEqual(paper=name).split(labels, clients, seed), labels)
    assert np.all(counts.sum(axis=1) == size)
    holds, main = counts > 0, clients * 6 // 10
    assert np.all(holds.sum(axis=1) == len(np.unique(labels)) // 5)
    assert np.all(holds[:main] == holds[0])
    others = holds[main:].sum(axis=0)
    assert not np.any(others[holds[0]])
    if clients == 10:
        assert np.all(others[~holds[0]] == 1), "6+1+1+1+1 clients with disjoint labels"
    else:
        assert len({tuple(row) for row in holds[main:]}) > 4, "random sets"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "clients", "smallest", "largest"),
    [("mnist", 10, 784, 5880), ("cifar100", 10, 640, 4000), ("mnist", 100, 138, 226)],
)
def test_clustered_nonequal_has_the_authors_range(name, clients, smallest, largest, seed):
    sizes = [len(shard) for shard in ClusteredNonEqual(paper=name).split(TRAIN[name], clients, seed)]
    assert (min(sizes), max(sizes)) == (smallest, largest)
    assert len(set(sizes)) > 5


@pytest.mark.parametrize("name", ["clustered-equal", "clustered-nonequal"])
@pytest.mark.parametrize("delta", [0.2, 0.4, 0.6])
def test_every_feddrl_federation_can_be_split(name, delta):
    for data_set, clients in FEDDRL:
        cluster = PARTITIONS[name]
        assert issubclass(cluster, ClusteredEqual)
        shards = cluster(delta, paper=data_set).split(TRAIN[data_set], clients, 0)
        assert_disjoint_and_filled(shards, len(TRAIN[data_set]), clients)


def test_clustered_equal_without_samples_takes_the_largest_size():
    labels = data([100, 100, 100, 100])
    assert {len(shard) for shard in ClusteredEqual().split(labels, 5, 0)} == {66}  # 3 clients share 100 of each label
    assert {len(shard) for shard in ClusteredEqual(delta=1.0).split(labels, 7, 0)} == {28}


@pytest.mark.parametrize(("clients", "low", "high"), [(10, 3, 6), (100, 100, 400)])
def test_pareto_sizes_on_mnist(clients, low, high):
    """With 100 clients sizes differ by two orders of magnitude; with 10 each label has only two clients."""
    ratios = []
    for seed in range(5):
        sizes = [len(shard) for shard in Pareto().split(MNIST, clients, seed)]
        assert sum(sizes) == len(MNIST)
        ratios.append(max(sizes) / min(sizes))
    assert low < np.median(ratios) < high


def test_pareto_counts_follow_the_power_law():
    counts = tally(Pareto(labels=20, power=1.0).split(CIFAR100, 20, 3), CIFAR100)
    for column in counts.T:  # four clients hold a label, with shares 1, 1/2, 1/3, 1/4 (after one sample for each)
        assert sorted(column[column > 0], reverse=True) == [239, 120, 80, 61]


def test_shards_on_mnist():
    assert {len(shard) for shard in ShardsEqual().split(MNIST, 100, 0)} == {600}
    sizes = np.array([len(shard) for shard in ShardsNonEqual().split(MNIST, 100, 0)])
    assert sizes.sum() == len(MNIST)
    assert set(sizes // 60) == set(range(6, 15))
    few = np.array([len(shard) for shard in ShardsNonEqual(2, 5).split(MNIST, 100, 0)])
    assert set(few // 60) == set(range(2, 6)), "shards are left over, and so nothing need add up"


def test_dirichlet_alpha_sets_the_skew():
    def spread(alpha):
        counts = tally(Dirichlet(alpha).split(FASHION, 20, 0), FASHION)
        return np.std(counts)

    assert spread(100.0) < 60 < spread(0.1)
    assert np.std(tally(Iid().split(FASHION, 20, 0), FASHION)) < 30


def test_test_split_follows_the_training_shares():
    labels, labels_test = np.array([0] * 8 + [1] * 4), np.array([0] * 4 + [1] * 5 + [2] * 3)
    shards = [np.arange(6), np.array([6, 7, 8]), np.array([9, 10, 11])]
    tests = Iid().split_test(labels_test, labels, shards, 0)
    # Label 0 is held 6 : 2, label 1 is held 1 : 3, label 2 by nobody.
    assert tally(tests, labels_test).tolist() == [[3, 0, 0], [1, 1, 0], [0, 4, 0]]


def test_test_split_leaves_nobody_empty():
    labels = np.zeros(100, int)
    shards = [np.arange(97), *np.arange(97, 100)[:, None]]
    assert [len(t) for t in Iid().split_test(np.zeros(5, int), labels, shards, 0)] == [2, 1, 1, 1]
    with pytest.raises(AtollError, match="too few of its labels"):
        Iid().split_test(np.zeros(3, int), labels, shards, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerFedAvg(a=3), "a = 3 must be even"),
        (lambda: PerFedAvg(a_test=0), "a_test = 0"),
        (lambda: Pareto(labels=0), "labels = 0"),
        (lambda: Pareto(power=-1.0), "power = -1.0"),
        (lambda: ClusteredEqual(delta=1.5), "delta = 1.5"),
        (lambda: ClusteredEqual(labels=2, samples=11), "samples = 11 must be a multiple of labels = 2"),
        (lambda: ClusteredNonEqual(low=1.2), "low = 1.2"),
        (lambda: ClusteredEqual(paper="fashion_mnist"), "did you mean 'fashion-mnist'"),
        (lambda: ShardsEqual(0), "per_client = 0"),
        (lambda: ShardsNonEqual(11, 14), "low = 11"),
        (lambda: ShardsNonEqual(6, 5), "high = 5"),
        (lambda: Dirichlet(0.0), "alpha = 0.0"),
        (lambda: Dirichlet(float("nan")), "alpha = nan"),
    ],
)
def test_wrong_parameters_are_named(make, message):
    with pytest.raises(AtollError, match=message):
        make()


@pytest.mark.parametrize(
    ("partition", "counts", "clients", "message"),
    [
        (Iid(), [3, 3], 7, "7 clients cannot share 6 samples"),
        (Iid(), [3, 3], 0, "at least one client"),
        (Pareto(labels=3), [9, 9], 2, "need 3 different labels but the data has 2"),
        (Pareto(labels=1), [30, 2], 8, "label 1 needs 4 samples but has 2"),
        (ClusteredEqual(labels=2), [9, 9, 9], 3, "need 4 different labels but the data has 3"),
        (ClusteredEqual(samples=60), [100] * 4, 10, "label 0 needs 180 samples but has 100"),
        (ClusteredEqual(), [4] * 4, 10, "use fewer"),
        (ClusteredNonEqual(paper="mnist"), [99] * 10, 20, "for 10 and for 100 clients, not for 20; use one of them"),
        (ShardsEqual(3), [5, 5], 4, "12 shards cannot be cut from 10 samples"),
    ],
)
def test_what_does_not_fit_is_explained(partition, counts, clients, message):
    with pytest.raises(AtollError, match=message):
        partition.split(data(counts), clients, 0)


@pytest.mark.parametrize("labels", [np.array([]), np.array([0.5]), np.array([[1, 2]]), np.array([-1, 2])])
def test_labels_must_be_labels(labels):
    with pytest.raises(AtollError, match="non-negative integer"):
        Iid().split(labels, 1, 0)


def test_registry_builds_every_partition_with_its_defaults():
    assert len(PARTITIONS) == 8
    for partition in PARTITIONS.values():
        assert_disjoint_and_filled(partition().split(MNIST.astype(np.uint8), 50, 0), len(MNIST), 50)


@pytest.mark.parametrize("clients", [1, 10, 100])
def test_figure_has_a_bubble_for_each_label_of_each_client(clients):
    shards = Pareto(labels=2).split(MNIST, clients, 0)
    figure = partition_figure(shards, MNIST, 10, "Pareto")
    bubbles = figure.axes[0].collections[0]
    counts = tally(shards, MNIST)
    client, label = np.nonzero(counts)
    assert np.array_equal(bubbles.get_offsets(), np.stack([client, label], axis=1))
    areas, held = bubbles.get_sizes(), counts[client, label]
    large = areas > 1.0
    assert np.allclose(areas[large] / areas.max(), held[large] / held.max())
    names = partition_figure(shards, MNIST, [f"digit {k}" for k in range(10)], "Pareto").axes[0].get_yticklabels()
    assert names[9].get_text() == "digit 9"


def test_mixed_clusters_are_the_same_clients_in_another_order() -> None:
    labels = np.repeat(np.arange(10), 1500)
    plain, mixed = (ClusteredEqual(labels=2, samples=40, mixed=m).split(labels, 100, 3) for m in (False, True))
    sets = [[tuple(np.unique(labels[shard])) for shard in shards] for shards in (plain, mixed)]
    assert sorted(sets[0]) == sorted(sets[1])
    main = sets[0][0]
    assert all(labels == main for labels in sets[0][:60])
    assert not all(labels == main for labels in sets[1][:60])
