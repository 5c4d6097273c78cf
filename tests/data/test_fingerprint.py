"""Tests of the hashes of clients' rows: equal in memory and on disk, different for different numbers."""

from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pytest
import torch

import bayesfed as bf
from bayesfed.data.fingerprint import data_fingerprint, describe_data_change

LENGTHS = (4, 1, 7, 2)


def clients():
    generator = torch.Generator().manual_seed(0)
    return {
        f"client {n}": {"x": torch.randn(n, 3, generator=generator), "y": torch.arange(n) % 2 == 0}
        for n in LENGTHS
    }


def test_a_hash_is_of_a_clients_bytes():
    found = data_fingerprint(bf.Federation.from_arrays(clients()))
    assert found["rows"].tolist() == list(LENGTHS)
    for field in ("x", "y"):
        expected = [
            int.from_bytes(
                blake2b(c[field].numpy().tobytes(), digest_size=8).digest(), "big", signed=True
            )
            for c in clients().values()
        ]
        assert found[f"field {field}"].tolist() == expected


@pytest.mark.parametrize("read", [1, 5, 9, 30])
def test_it_does_not_depend_on_the_pieces_that_are_read(read, monkeypatch):
    federation = bf.Federation.from_arrays(clients())
    whole = data_fingerprint(federation)
    monkeypatch.setattr("bayesfed.data.fingerprint.READ", read)
    assert describe_data_change(whole, data_fingerprint(federation), federation.names) is None


def test_it_does_not_depend_on_where_the_rows_lie():
    rng = np.random.default_rng(0)
    site, x = rng.integers(0, 5, 200), rng.normal(size=(200, 2)).astype(np.float32)
    y = rng.integers(0, 9, 200).astype(np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 2)
    table = pa.table([pa.array([f"s{i}" for i in site]), lists, pa.array(y)], ["site", "x", "y"])
    table = pa.Table.from_batches(table.to_batches(max_chunksize=30))
    disk = bf.Federation.from_arrow(table, client="site")
    memory = bf.Federation.from_arrays(
        {n: {"x": x[site == int(n[1:])], "y": y[site == int(n[1:])]} for n in disk.names}
    )
    assert (
        describe_data_change(data_fingerprint(disk), data_fingerprint(memory), disk.names) is None
    )


def test_what_has_changed_is_named():
    names = tuple(clients())

    def since(change):
        data = clients()
        change(data)
        before, now = (data_fingerprint(bf.Federation.from_arrays(c)) for c in (clients(), data))
        return describe_data_change(before, now, names)

    def number(data):
        data["client 7"]["x"][6, 2] += 1e-6

    def numbers(data):
        for client in data.values():
            client["x"] = client["x"] + 1

    def order(data):
        data["client 2"]["x"] = data["client 2"]["x"].flip(0)

    def row(data):
        data["client 4"] = {name: value[:3] for name, value in data["client 4"].items()}

    def more(data):
        for client in data.values():
            client["z"] = client["y"]

    def fewer(data):
        for client in data.values():
            del client["x"]

    assert since(lambda data: None) is None
    assert since(number) == "field 'x' of client 'client 7' has changed"
    assert since(numbers) == "field 'x' of client 'client 4' (and 3 more) has changed"
    assert since(order) == "field 'x' of client 'client 2' has changed"
    assert since(row) == "client 'client 4' had 4 rows and now has 3"
    assert since(more) == "the clients had no field 'z' before"
    assert since(fewer) == "the clients have no field 'x' any more"
