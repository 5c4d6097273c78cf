"""Whatever comes over the wire or stands in a file: a clear error, and nothing left half-written.

FUZZ=10000 python -m pytest tests/deploy/test_fuzz.py       # as many cases of each kind; by default 100
"""

import json
import os
import string

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from bayesfed import datasets
from bayesfed.cli.experiment import read_experiment, read_node_file
from bayesfed.deploy import messages
from bayesfed.deploy.messages import (
    Ask,
    Average,
    Begin,
    End,
    Evaluate,
    Finish,
    Hello,
    LeaveOut,
    MessageError,
    MoveChains,
    Refusal,
    RoundId,
    pack,
    unpack,
)
from bayesfed.deploy.node import Node
from bayesfed.settings import SettingsError
from tests.deploy.runs_over_nodes import PLAN, Wire, fitted

CASES = int(os.environ.get("FUZZ", "100"))
many = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
VALID = [
    pack(Hello()),
    pack(Evaluate(run="abc"), theta={"global": torch.zeros(2, 3)}, key={"key": torch.tensor(3)}),
    pack(
        Ask(
            run="abc",
            round=RoundId(number=0, attempt=1),
            accepted=None,
            rate=1.0,
            clip=0.1,
            noisy=False,
        ),
        message={"global": torch.zeros(2, 3)},
        cohort={"clients": torch.arange(2)},
    ),
    pack(End(run="abc", khat=None)),
    pack(Average(run="abc", effect=0)),
    pack(LeaveOut(run="abc"), weights={"weights": torch.ones(2)}),
    pack(MoveChains(run="abc", iteration=0, step=0, size=0.1), chains={"z": torch.ones(2, 2)}),
]
numbers = st.one_of(st.integers(), st.floats(), st.none(), st.booleans(), st.text(max_size=5))
plain = st.recursive(
    numbers, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner)
)


@st.composite
def mangled(draw):
    """A message with some bytes changed, left out or put in."""
    payload = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(payload)))
        what = draw(st.sampled_from(["change", "cut", "put", "drop"]))
        if what == "change" and at < len(payload):
            payload[at] = draw(st.integers(0, 255))
        elif what == "cut":
            payload = payload[:at]
        elif what == "put":
            payload[at:at] = draw(st.binary(max_size=9))
        else:
            del payload[at : at + draw(st.integers(0, 9))]
    return bytes(payload)


@st.composite
def odd(draw):
    """A whole file whose data or tensors are no message's, or those of a message that makes no sense."""
    kinds = ["hello", "begin", "ask", "open", "finish", "evaluate", "end", "reply", "nonsense"]
    kinds.append("move_chains")
    data = {"kind": draw(st.sampled_from(kinds)), "run": draw(st.sampled_from(["abc", "", "../x"]))}
    fields = ["round", "accepted", "rate", "clip", "noisy", "roster", "terms", "clients", "rows"]
    data |= draw(st.dictionaries(st.sampled_from([*fields, "cohort", "done", "khat"]), plain))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool, torch.float64]))
    name = draw(st.sampled_from(["theta/global", "cohort/clients", "message/x", "key/key", "x"]))
    text = draw(st.sampled_from([json.dumps(data, default=str), "", "{", "null", "[1]"]))
    return save({name: torch.zeros(shape, dtype=dtype)}, {messages._METADATA: text})


@many
@given(st.one_of(st.binary(max_size=200), mangled(), odd()))
def test_bytes_are_a_message_or_none(payload):
    try:
        message, parts = unpack(payload)
    except MessageError as error:
        assert str(error) and len(str(error)) < 2000
    else:
        assert message.kind and isinstance(parts, dict)


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """One that has taken part in a run."""
    folder = tmp_path_factory.mktemp("fuzz")
    made = Node("north", datasets.eight_schools(), PLAN, folder / "north")
    fitted(Wire([made]), PLAN, folder)
    return made


def kept(node):
    """All that the node has written but its log."""
    files = sorted(path for path in node.folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(node.folder)): path.read_bytes()
        for path in files
        if path.name != "log.jsonl"
    }


@many
@given(st.one_of(st.binary(max_size=50), mangled(), odd()))
def test_a_node_answers_anything_and_keeps_what_it_has(node, payload):
    before = kept(node)
    reply, _ = unpack(node.handle(payload))
    assert isinstance(reply, Refusal) or reply.kind == "schema"
    assert kept(node) == before


@settings(many, max_examples=max(10, CASES // 10))
@given(
    st.dictionaries(st.sampled_from(["algorithm", "rounds", "seed", "privacy", "secure"]), plain),
    st.sampled_from(["a1", "b2"]),
)
def test_a_run_with_other_terms_is_refused(node, terms, run):
    before = kept(node)
    begin = Begin(run=run, terms=json.loads(json.dumps(terms)), clients=8, rows=8, cohort=8)
    reply, _ = unpack(node.handle(pack(begin)))
    assert isinstance(reply, Refusal)
    assert kept(node) == before


@settings(many, max_examples=max(10, CASES // 10))
@given(st.dictionaries(st.text(max_size=5), st.lists(st.integers(0, 3), max_size=3), max_size=3))
def test_a_state_of_another_form_is_refused(node, shapes):
    before = kept(node)
    state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    begin = Begin(run="c3", terms=PLAN.description, clients=8, rows=8, cohort=8)
    reply, _ = unpack(node.handle(pack(begin, state=state)))
    assert isinstance(reply, Refusal)
    (run,) = [path.name for path in (node.folder / "runs").iterdir()]
    over = Finish(
        run=run, accepted=None, done=1, epsilon=None, moving=None, rising=None, converged=None
    )
    node.handle(pack(over, state=state))
    assert kept(node) == before


toml = st.text(alphabet=string.ascii_letters + string.digits + "[]{}=\"'.,\n #_-", max_size=200)
names = ["name", "experiment", "socket", "folder", "one_client", "data", "model", "deployment"]


@st.composite
def toml_like(draw):
    """Keys that are known, with values that may not be."""
    values = st.sampled_from(
        ['"a"', "1", "true", "[]", "{}", "1.5", '"../x"', "nan", "{ csv = 1 }"]
    )
    lines = [
        f"{draw(st.sampled_from(names))} = {draw(values)}" for _ in range(draw(st.integers(0, 6)))
    ]
    return "\n".join(lines)


@many
@example("deployment = {0 = 0}")
@given(st.one_of(toml, toml_like(), st.binary(max_size=100)))
@pytest.mark.parametrize("read", [read_node_file, read_experiment])
def test_a_file_is_read_or_refused(tmp_path, read, text):
    path = tmp_path / "file.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        read(path)
    except (SettingsError, OSError) as error:
        assert str(error)
    assert [file.name for file in tmp_path.iterdir()] == ["file.toml"]
