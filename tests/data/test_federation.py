import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from sklearn.datasets import load_digits

import bayesfed as bf
from tests.scenarios import ragged

FRAME = pd.DataFrame(
    {
        "county": ["B", "A", "B", "C", "A", "B"],
        "floor": [0, 1, 0, 1, 1, 0],
        "uranium": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
        "log_radon": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    }
)


def small():
    return bf.Federation.from_arrays(
        {
            "north": {"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "y": [1.0, 2.0, 3.0]},
            "south": {"x": [[7.0, 8.0]], "y": [4.0]},
        }
    )


def numbered(*lengths):
    """Return rows 0, 1, 2, ... distributed over clients."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return bf.Federation.from_arrays(
        {
            f"c{i}": {"id": torch.arange(end - n, end)}
            for i, (n, end) in enumerate(zip(lengths, ends, strict=True))
        }
    )


# -- from_frame -----------------------------------------------------------------------------------


def test_clients_of_a_frame_come_in_order_of_first_appearance():
    federation = bf.Federation.from_frame(FRAME, client="county")
    assert federation.names == ("B", "A", "C")
    assert federation.client_dim == "county"
    assert list(federation.fields) == ["floor", "uranium", "log_radon"]
    assert federation["log_radon"].tolist() == [1.0, 3.0, 6.0, 2.0, 5.0, 4.0]
    assert federation["floor"].dtype == torch.float32


def test_a_list_of_fields_keeps_these_only():
    federation = bf.Federation.from_frame(FRAME, client="county", fields=["log_radon"])
    assert list(federation.fields) == ["log_radon"]


def test_a_mapping_renames_and_stacks():
    fields = {"y": "log_radon", "x": ["floor", "uranium"], "one": ["floor"]}
    federation = bf.Federation.from_frame(FRAME, client="county", fields=fields)
    assert list(federation.fields) == ["y", "x", "one"]
    assert federation["y"].tolist() == [1.0, 3.0, 6.0, 2.0, 5.0, 4.0]
    expected = torch.tensor([[0.0, 0.1], [0, 0.3], [0, 0.6], [1, 0.2], [1, 0.5], [1, 0.4]])
    assert torch.equal(federation["x"], expected)
    assert federation["one"].shape == (6, 1)
    assert [federation.event_shape(f) for f in fields] == [(), (2,), (1,)]


def test_clients_that_are_numbers_become_names():
    frame = FRAME.assign(county=[30, 4, 30, 7, 4, 30])
    federation = bf.Federation.from_frame(frame, client="county")
    assert federation.names == ("30", "4", "7")


def test_the_frames_index_does_not_matter():
    shuffled = FRAME.set_index(pd.Index([9, 9, 3, 1, 0, 7]))
    first, second = (bf.Federation.from_frame(f, client="county") for f in (FRAME, shuffled))
    assert torch.equal(first["log_radon"], second["log_radon"])


# -- from_arrays ----------------------------------------------------------------------------------


def test_tensors_keep_their_type_and_numbers_become_default_floats():
    kinds = {
        "double": torch.ones(2, dtype=torch.float64),
        "label": torch.tensor([1, 0]),
        "byte": torch.tensor([1, 255], dtype=torch.uint8),
        "list": [1, 2],
        "array": pd.Series([1.5, 2.5]).to_numpy(),
        "flags": [True, False],
    }
    federation = bf.Federation.from_arrays({"a": kinds})
    types = {name: value.dtype for name, value in federation.fields.items()}
    assert types == {
        "double": torch.float64,
        "label": torch.int64,
        "byte": torch.uint8,
        "list": torch.float32,
        "array": torch.float32,
        "flags": torch.float32,
    }


@pytest.mark.usefixtures("float64")
def test_the_default_floating_type_may_be_double():
    assert bf.Federation.from_arrays({"a": {"y": [1.0]}})["y"].dtype == torch.float64


def test_rows_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"client 'b': field 'x' has rows of shape \(3,\)"):
        bf.Federation.from_arrays({"a": {"x": torch.ones(1, 2)}, "b": {"x": torch.ones(1, 3)}})


# -- from_partitioner -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits():
    datasets = pytest.importorskip("datasets")
    table = load_digits()
    return datasets.Dataset.from_dict(
        {
            "id": list(range(200)),
            "image": table.images[:200].tolist(),
            "label": table.target[:200].tolist(),
            "writer": [f"writer {i % 7}" for i in range(200)],
        }
    )


PARTITIONERS = {
    "IidPartitioner": {"num_partitions": 6},
    "DirichletPartitioner": {"num_partitions": 5, "partition_by": "label", "alpha": 0.5},
    "PathologicalPartitioner": {
        "num_partitions": 10,
        "partition_by": "label",
        "num_classes_per_partition": 3,
        "class_assignment_mode": "first-deterministic",  # so that no class is left out
    },
    "ShardPartitioner": {
        "num_partitions": 5,
        "partition_by": "label",
        "num_shards_per_partition": 2,
        "shard_size": 20,
    },
    "NaturalIdPartitioner": {"partition_by": "writer"},
}


@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # pyarrow, in sort()
@pytest.mark.parametrize("name", PARTITIONERS)
def test_partitioners_conserve_the_rows(digits, name):
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    partitioner = getattr(partitioners, name)(**PARTITIONERS[name])
    fields = ["id", "image", "label"]
    federation = bf.Federation.from_partitioner(digits, partitioner, fields=fields)
    assert sorted(federation["id"].long().tolist()) == list(range(200))
    table = load_digits()
    order = federation["id"].long()
    assert torch.equal(federation["image"], torch.as_tensor(table.images)[order].float())
    assert torch.equal(federation["label"], torch.as_tensor(table.target)[order].float())
    if name == "NaturalIdPartitioner":
        assert sorted(federation.names) == [f"writer {i}" for i in range(7)]
        assert federation.client_dim == "writer"
        owners = [int(federation.names[i].split()[1]) for i in federation.owner.tolist()]
        assert owners == [i % 7 for i in order.tolist()]
    else:
        count = PARTITIONERS[name]["num_partitions"]
        assert federation.names == tuple(map(str, range(count)))
        assert federation.client_dim == "client"
    if name == "PathologicalPartitioner":
        for client in federation.names:
            assert len(federation.select([client])["label"].unique()) <= 3


def test_partitions_without_rows_are_left_out_with_a_warning(digits):
    """Of 20 partitions of ten digits, a Dirichlet distribution of 0.01 gives most none."""
    partitioners = pytest.importorskip("flwr_datasets.partitioner")

    def partitioner():
        return partitioners.DirichletPartitioner(20, "label", 0.01, min_partition_size=0, seed=0)

    with pytest.raises(ValueError, match=r"client '\d+' is empty .*a partition with empty='drop'"):
        bf.Federation.from_partitioner(digits, partitioner(), fields=["id"])
    with pytest.warns(
        UserWarning, match="of 20 partitions have no rows and are left out: '"
    ) as seen:
        found = bf.Federation.from_partitioner(digits, partitioner(), fields=["id"], empty="drop")
    sizes = partitioner()
    sizes.dataset = digits
    rows = {str(i): len(sizes.load_partition(i)) for i in range(20)}
    assert found.names == tuple(name for name, count in rows.items() if count)
    assert found.lengths.tolist() == [count for count in rows.values() if count]
    assert str(seen[0].message).startswith(f"{20 - len(found)} of 20")
    assert sorted(found["id"].long().tolist()) == list(range(200))


def test_a_column_that_the_dataset_lacks(digits):
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    with pytest.raises(KeyError, match="no column 'age'; it has id, image, label, writer"):
        bf.Federation.from_partitioner(
            digits, partitioners.IidPartitioner(num_partitions=2), fields=["age"]
        )


# -- properties -----------------------------------------------------------------------------------


def test_lengths_owner_and_repr():
    federation = small()
    assert len(federation) == 2
    assert federation.rows == 4
    assert federation.offsets.tolist() == [0, 3, 4]
    assert federation.lengths.tolist() == [3, 1]
    assert federation.owner.tolist() == [0, 0, 0, 1]
    assert repr(federation) == "Federation: 2 clients, 4 rows (1 to 3 a client), fields x[2], y"
    one = federation.select("south")
    assert repr(one) == "Federation: 1 client, 1 row (1 to 1 a client), fields x[2], y"


def test_padding_is_not_stored():
    federation = numbered(1, 100, 1)
    assert federation["id"].untyped_storage().nbytes() == 102 * 8
    federation.batch()  # a dense view of 300 entries, not kept
    (field,) = federation.fields.values()
    assert field.untyped_storage().nbytes() == 102 * 8
    selected = federation.select(["c0", "c2"])
    assert selected["id"].untyped_storage().nbytes() == 2 * 8


def test_to_changes_floating_fields_only():
    federation = bf.Federation.from_arrays({"a": {"y": [1.5], "k": torch.tensor([3])}})
    double = federation.to(dtype=torch.float64)
    assert (double["y"].dtype, double["k"].dtype) == (torch.float64, torch.int64)
    assert double.dtype == torch.float64
    assert double.batch().scale.dtype == torch.float64
    assert federation["y"].dtype == torch.float32
    assert federation.to("cpu").device == torch.device("cpu")


def test_streams_belong_to_names():
    federation = ragged(4)
    backwards = federation.select(federation.names[::-1])
    assert torch.equal(backwards.stream_ids, federation.stream_ids.flip(0))
    assert len(federation.stream_ids.unique()) == 4


# -- derived federations --------------------------------------------------------------------------


def test_select_keeps_the_order_asked_for():
    chosen = numbered(2, 1, 3).select(["c2", "c0"])
    assert chosen.names == ("c2", "c0")
    assert chosen["id"].tolist() == [3, 4, 5, 0, 1]
    assert chosen.lengths.tolist() == [3, 2]


def test_hold_out():
    others, held = numbered(2, 1, 3).hold_out(["c1"])
    assert (others.names, held.names) == (("c0", "c2"), ("c1",))
    assert (others["id"].tolist(), held["id"].tolist()) == ([0, 1, 3, 4, 5], [2])
    assert numbered(2, 1).hold_out("c0")[1].names == ("c0",)


@pytest.mark.parametrize("test", [0.01, 0.3, 0.99])
def test_split_is_disjoint_exhaustive_and_within_clients(test):
    federation = numbered(2, 10, 3, 7)
    parts = federation.split(test=test, seed=0)
    assert [part.names for part in parts] == [federation.names] * 2
    joined = torch.cat([part["id"] for part in parts])
    assert sorted(joined.tolist()) == list(range(22))
    for part in parts:
        assert (part.lengths >= 1).all()
        assert torch.equal(part.owner, federation.owner[part["id"]])
    expected = (test * federation.lengths).round().long()
    expected = torch.minimum(expected.clamp(min=1), federation.lengths - 1)
    assert torch.equal(parts[1].lengths, expected)


def test_split_is_seeded_and_random():
    federation = numbered(10, 10)
    held = [federation.split(test=0.5, seed=seed)[1]["id"].tolist() for seed in (0, 0, 1)]
    assert held[0] == held[1] != held[2]
    assert held[0][:5] != [row - 10 for row in held[0][5:]]  # clients are not split alike


def test_split_needs_two_rows_and_a_fraction():
    with pytest.raises(ValueError, match="client 'c1' has a single row"):
        numbered(2, 1).split(test=0.5, seed=0)
    with pytest.raises(ValueError, match="test is 1.0"):
        numbered(2, 2).split(test=1.0, seed=0)


# -- batches and plates ---------------------------------------------------------------------------


def test_padding_repeats_the_first_row():
    batch = numbered(3, 1, 2).batch()
    assert batch.fields["id"].tolist() == [[0, 1, 2], [3, 3, 3], [4, 5, 4]]
    assert batch.mask.tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    assert batch.scale.tolist() == [[1.0], [1.0], [1.0]]
    assert batch.index.tolist() == [0, 1, 2]
    assert small().batch().fields["x"].shape == (2, 3, 2)


def test_a_batch_of_some_clients_is_as_wide_as_its_longest():
    batch = numbered(3, 1, 2).batch(torch.tensor([2, 1]))
    assert batch.fields["id"].tolist() == [[4, 5], [3, 3]]
    assert batch.index.tolist() == [2, 1]


def test_minibatch_positions():
    positions = torch.tensor([[0, 2], [1, -1]])
    batch = numbered(3, 1, 5).batch(torch.tensor([0, 2]), positions)
    assert batch.fields["id"].tolist() == [[0, 2], [5, 4]]
    assert batch.mask.tolist() == [[True, True], [True, False]]
    assert batch.scale.tolist() == [[1.5], [5.0]]  # n_i / b_i = 3 / 2 and 5 / 1


@pytest.mark.usefixtures("float64")
def test_a_pooled_run_equals_a_loop_over_clients():
    generator = torch.Generator().manual_seed(0)
    data = {
        f"c{i}": {
            "x": torch.randn(n, generator=generator),
            "y": torch.randn(n, generator=generator),
        }
        for i, n in enumerate([3, 1, 5])
    }
    alpha = torch.randn(3, 1, generator=generator)

    def model(federation):
        slope = pyro.sample("slope", dist.Normal(0.0, 3.0))
        with federation.clients():
            a = pyro.sample("alpha", dist.Normal(0.2, 1.5))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(a + slope * obs["x"], 0.7), obs=obs["y"])

    def total(federation):
        values = {"slope": torch.tensor(0.4), "alpha": alpha}
        trace = poutine.trace(poutine.condition(model, values)).get_trace(federation)
        assert trace.nodes["alpha"]["fn"].batch_shape == (3, 1)
        assert trace.nodes["y"]["fn"].batch_shape == (3, 5)
        return trace.log_prob_sum()

    expected = dist.Normal(0.0, 3.0).log_prob(torch.tensor(0.4))
    for i, rows in enumerate(data.values()):
        expected += dist.Normal(0.2, 1.5).log_prob(alpha[i]).sum()
        expected += dist.Normal(alpha[i] + 0.4 * rows["x"], 0.7).log_prob(rows["y"]).sum()
    torch.testing.assert_close(total(bf.Federation.from_arrays(data)), expected)


def test_unknown_fields_and_absent_ones():
    with small().clients(), small().observations() as obs:
        assert obs.get("z") is None
        with pytest.raises(KeyError, match="unknown field 'z': the federation has x, y"):
            obs["z"]
    assert small().batch().drop("y").fields.get("y") is None


@pytest.mark.parametrize("name", ["1", 1, 1.0])
def test_a_client_is_found_by_its_number(name):
    federation = bf.Federation.from_arrays({"1": {"y": [1.0]}, "2": {"y": [2.0]}})
    assert federation.index([name]).tolist() == [0]
    assert federation.select([name]).names == ("1",)
