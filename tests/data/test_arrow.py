"""Tests of data on disk, which must give the same federation as data in memory."""

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch

import bayesfed as bf
from bayesfed.data.arrow import Column

ROWS = 500


def frame_like(seed=0, clients=7):
    """Return columns of 500 rows, with the clients in random order."""
    rng = np.random.default_rng(seed)
    return {
        "site": [f"c{i}" for i in rng.integers(0, clients, ROWS)],
        "x": rng.normal(size=(ROWS, 3)).astype(np.float32),
        "y": rng.integers(0, 256, ROWS).astype(np.uint8),
        "flag": rng.integers(0, 2, ROWS).astype(bool),
    }


def table(columns, batch=64, variable=False):
    """Return an Arrow table in record batches, with vectors as lists of fixed or variable length."""
    x = columns["x"]
    flat = pa.array(x.ravel())
    lists = (
        pa.ListArray.from_arrays(np.arange(0, x.size + 1, 3, dtype=np.int32), flat)
        if variable
        else pa.FixedSizeListArray.from_arrays(flat, 3)
    )
    arrays = [columns["site"], lists, columns["y"], columns["flag"]]
    whole = pa.table([pa.array(a) if a is not lists else a for a in arrays], names=list(columns))
    return pa.Table.from_batches(whole.to_batches(max_chunksize=batch))


def in_memory(columns):
    names = list(dict.fromkeys(columns["site"]))
    site = np.array(columns["site"])
    return bf.Federation.from_arrays(
        {name: {f: columns[f][site == name] for f in ("x", "y", "flag")} for name in names}
    )


def same(one, other):
    assert one.names == other.names
    assert one.lengths.tolist() == other.lengths.tolist()
    for field in other.fields:
        torch.testing.assert_close(one[field], other[field], rtol=0, atol=0)


@pytest.mark.parametrize("variable", [False, True])
def test_a_table_gives_the_federation_that_its_rows_give_in_memory(variable):
    columns = frame_like()
    found = bf.Federation.from_arrow(table(columns, variable=variable), client="site")
    same(found, in_memory(columns))
    assert all(isinstance(value, Column) for value in found.fields.values())
    assert found.client_dim == "site"
    rows = torch.tensor([[0, 2, -1], [1, 1, 0]])
    expected = in_memory(columns).batch(torch.tensor([4, 1]), rows)
    batch = found.batch(torch.tensor([4, 1]), rows)
    for field in ("x", "y", "flag"):
        torch.testing.assert_close(batch.fields[field], expected.fields[field], rtol=0, atol=0)


def written(path, data, kind):
    with pa.OSFile(str(path), "wb") as sink, getattr(pa.ipc, kind)(sink, data.schema) as writer:
        writer.write_table(data)


@pytest.mark.parametrize("kind", ["new_file", "new_stream"])
def test_files_are_mapped_not_read(tmp_path, kind):
    columns = frame_like()
    before = pa.total_allocated_bytes()
    written(tmp_path / "a.arrow", table(columns).slice(0, 200), kind)
    written(tmp_path / "b.arrow", table(columns).slice(200), kind)
    same(bf.Federation.from_arrow(tmp_path, client="site"), in_memory(columns))
    whole = bf.Federation.from_arrow(tmp_path / "b.arrow", client="site", fields=["x"])
    assert pa.total_allocated_bytes() - before < whole["x"].nbytes
    (tmp_path / "c.arrow").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="c.arrow is not an Arrow file"):
        bf.Federation.from_arrow(tmp_path / "c.arrow", client="site")
    with pytest.raises(FileNotFoundError, match="no Arrow file"):
        bf.Federation.from_arrow(tmp_path / "d.arrow", client="site")


def test_a_hugging_face_dataset_with_a_selection(tmp_path):
    columns = frame_like()
    data = datasets.Dataset.from_dict(
        {name: list(value) for name, value in columns.items()},
        features=datasets.Features(
            site=datasets.Value("string"),
            x=datasets.List(datasets.Value("float32")),
            y=datasets.Value("uint8"),
            flag=datasets.Value("bool"),
        ),
    )
    same(bf.Federation.from_arrow(data, client="site"), in_memory(columns))
    some = np.random.default_rng(1).permutation(ROWS)[:300]
    chosen = {
        name: [value[i] for i in some] if name == "site" else value[some]
        for name, value in columns.items()
    }
    same(bf.Federation.from_arrow(data.select(some), client="site"), in_memory(chosen))
    data.save_to_disk(tmp_path / "saved")
    same(bf.Federation.from_arrow(tmp_path / "saved", client="site"), in_memory(columns))
    images = datasets.Dataset.from_dict(
        {"who": [0, 0, 1], "image": np.arange(12).reshape(3, 2, 2)},
        features=datasets.Features(
            who=datasets.Value("int64"), image=datasets.Array2D((2, 2), "uint8")
        ),
    )
    federation = bf.Federation.from_arrow(images, client="who")
    assert federation.names == ("0", "1")
    assert federation["image"][2].tolist() == [[8, 9], [10, 11]]


def test_missing_numbers_fail_or_are_dropped():
    data = pa.table({"who": ["a", "a", "b", "b"], "y": [1.0, None, float("nan"), 4.0]})
    with pytest.raises(ValueError, match="client 'a', row 1 of the table: field 'y' is missing"):
        bf.Federation.from_arrow(data, client="who")
    with pytest.warns(UserWarning, match="leaves out 2 of 4 rows, of 2 clients"):
        kept = bf.Federation.from_arrow(data, client="who", missing="drop")
    assert kept["y"].tolist() == [1.0, 4.0]
    whole = pa.table({"who": ["a", "b"], "y": pa.array([1, None])})
    with (
        pytest.warns(UserWarning, match="leaves out 1 of 2 rows"),
        pytest.raises(ValueError, match="client 'b' is empty"),
    ):
        bf.Federation.from_arrow(whole, client="who", missing="drop")


def test_what_cannot_be_a_federation_is_named():
    data = table(frame_like())
    with pytest.raises(KeyError, match="no column 'hospital'"):
        bf.Federation.from_arrow(data, client="hospital")
    with pytest.raises(TypeError, match="field 'site' has type string"):
        bf.Federation.from_arrow(data, client="y", fields=["site"])
    with pytest.raises(TypeError, match="rows of 1 to 2 entries"):
        bf.Federation.from_arrow(pa.table({"w": [0, 0], "x": [[1.0], [1.0, 2.0]]}), client="w")
    with pytest.raises(ValueError, match="row 1 has no client"):
        bf.Federation.from_arrow(pa.table({"w": ["a", None], "x": [1.0, 2.0]}), client="w")
    with pytest.raises(TypeError, match="not a list"):
        bf.Federation.from_arrow([1, 2], client="w")


def test_what_a_federation_does_works_on_disk():
    columns = frame_like()
    disk, memory = bf.Federation.from_arrow(table(columns), client="site"), in_memory(columns)
    same(disk.select(["c3", "c1"]), memory.select(["c3", "c1"]))
    for one, other in zip(
        disk.split(test=0.2, seed=0), memory.split(test=0.2, seed=0), strict=True
    ):
        same(one, other)
    same(disk.pool(), memory.pool())
    assert isinstance(disk.select(["c3"]).fields["x"], Column)
    assert disk.to(dtype=torch.float64)["x"].dtype == torch.float64
    assert disk.event_shape("x") == (3,)
    assert disk.numbers_per_row == memory.numbers_per_row == 5


def test_a_fit_is_the_same_from_disk(tmp_path):
    columns = frame_like()
    columns["y"] = columns["flag"].astype(np.uint8)
    model = bf.models.Network(bf.models.mlp(3, 2), spread="client", scale=0.3)
    settings = {"rounds": 3, "clients_per_round": 6, "batch_size": 16, "progress": False}
    how = bf.PFedVEM(head_steps=3, draws=2)
    memory = bf.fit(model, in_memory(columns), how, **settings)
    disk = bf.fit(
        model,
        bf.Federation.from_arrow(table(columns), client="site"),
        how,
        execution=bf.Execution(states=tmp_path / "states"),
        **settings,
    )
    assert disk.history["elbo"].tolist() == memory.history["elbo"].tolist()
    for name, value in memory.local_params.items():
        torch.testing.assert_close(disk.local_params[name], value, rtol=0, atol=0)
    idata = disk.to_arviz(20)
    assert idata.constant_data["x"].shape == (ROWS, 3)
