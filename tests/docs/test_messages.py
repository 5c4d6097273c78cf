"""Each message that a page quotes is one of the package."""

import ast
import re
from pathlib import Path

import pytest

import bayesfed as bf
from bayesfed.data.plural import plural

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("errors.md", "checking.md")


def value_of(node: ast.expr) -> str:
    """… in the place of a value, with the noun of ``plural(number, noun)``."""
    match node:
        case ast.FormattedValue(value=ast.Call(func=ast.Name(id="plural"), args=[_, *words])):
            one, *several = (word.value for word in words if isinstance(word, ast.Constant))
            return f"… {several[0] if several else plural(2, one)[2:]}"
    return "…"


def texts_of(path: Path) -> list[str]:
    """The strings of a module; a formatted one with … for each value."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else value_of(v) for v in node.values)
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@pytest.fixture(scope="module")
def source() -> str:
    paths = (path for f in ("bayesfed", "models", "guides") for path in (ROOT / f).rglob("*.py"))
    return "\n".join(text for path in paths for text in texts_of(path))


def quoted(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [one.strip() for one in re.findall(r"```text\n(.*?)```", text, re.DOTALL)]


def fragments(message: str) -> list[str]:
    """What stands between the places of names and numbers, sentence by sentence, as a message may be put together."""
    parts = re.split(r"…|(?<=[.:;]) ", message)
    return [part.strip(" ,.:;()") for part in parts if len(part.split()) > 2]


@pytest.mark.parametrize("page", PAGES)
def test_that_quoted_messages_are_in_the_source(page, source):
    messages = quoted(page)
    assert len(messages) > 5
    wrong = [(m, part) for m in messages for part in fragments(m) if part not in source]
    assert not wrong


def test_that_another_text_is_found(source):
    assert any(part not in source for part in fragments("the ELBO rose from … to …: use it"))


NOUNS = "clients rows rounds institutions draws observations replications exchanges files"


def unequal(path: Path) -> list[str]:
    """The texts of a module in which a noun in the plural follows a number that can be 1."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if not isinstance(value, ast.FormattedValue) or not isinstance(text, ast.Constant):
                continue
            code = ast.unparse(value.value)
            noun = re.match(r" (\w+)(?!\w|')", str(text.value))
            named = code.isupper() or "plural(" in code  # a constant
            if noun and noun[1] in NOUNS.split() and not named:
                found.append(f"{path.name}: {{{code}}}{text.value[:30]}")
    return found


ALWAYS_SEVERAL = {
    "answering.py: {len(names)} clients (",  # one has another text
    "answering.py: {_draws(asked['theta'])} draws",
    "answering.py: {effect.num_samples} draws",
    "server_chains.py: {found.ess} effective draws",
    "chains.py: {chains.ess} draws",
    "networks.py: {where} draws its own noise",
}


def test_that_nouns_agree_with_their_numbers():
    paths = [path for f in ("bayesfed", "models", "guides") for path in (ROOT / f).rglob("*.py")]
    wrong = [one for path in paths for one in unequal(path)]
    assert not [one for one in wrong if not one.startswith(tuple(ALWAYS_SEVERAL))]


def test_that_a_noun_that_does_not_agree_is_found(tmp_path):
    module = tmp_path / "one.py"
    module.write_text("f\"{n} clients and {MOST} rows, {plural(n, 'row')}, {n} rows' sums\"")
    assert unequal(module) == ["one.py: {n} clients and "]


def test_that_one_client_is_written_in_the_singular():
    one = bf.Federation.from_arrays({"a": {"y": [1.0]}})
    assert repr(one).startswith("Federation: 1 client, 1 row ")
    schools = bf.datasets.eight_schools()
    run = bf.start(bf.models.eight_schools, schools.select(["A", "B"]), bf.FedAvg(), rounds=1)
    bf.step(run)
    assert "1 round, 2 clients;" in repr(bf.finish(run))
    assert "1 round is too few to tell" in repr(bf.finish(run))
