"""The page, as a tree: names are text, everything is in the file, links lead somewhere."""

import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from bayesfed.report.checklist import checklist
from bayesfed.report.facts import Comparison, Effect, Sent
from bayesfed.report.page import render
from bayesfed.report.verdict import assess
from tests.report.facts_of_a_study import study, variable

HOSTILE = '<script>alert("1")</script>" onload="x & y</style>'


class Page(HTMLParser):
    """The elements of a page, as a browser would read them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.ids, self.links = [], [], set(), []
        self.attributes = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name == "id":
                assert value not in self.ids
                self.ids.add(value)
            if name in ("href", "src"):
                self.links.append(value)

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def test_that_names_are_text_wherever_they_are_shown():
    """A client, a variable, an institution, a program, a level, a hash and a run with markup for names."""
    one = study(
        clients=[HOSTILE, "b"],
        name=HOSTILE,
        model=HOSTILE,
        program=HOSTILE,
        algorithm=HOSTILE,
        settings=HOSTILE,
        caveat=HOSTILE,
        label=HOSTILE,
        effects=[Effect(HOSTILE, HOSTILE, pd.DataFrame({HOSTILE: [HOSTILE], "mean": [1.0]}))],
        deployed=True,
        sent={HOSTILE: [Sent(HOSTILE, 1, 2, 3, {HOSTILE: [2]})]},
        hashes={HOSTILE: HOSTILE},
        software={HOSTILE: HOSTILE},
        privacy={HOSTILE: HOSTILE},
        epsilon=1.0,
    )
    compared = Comparison(
        pd.DataFrame({n: [1.0] for n in ("elpd", "se", "diff", "dse", "weight")}, index=[HOSTILE]),
        HOSTILE,
    )
    for text in (
        render([one], title=HOSTILE),
        render([one, one], comparison=compared),
    ):
        page = Page(text)
        assert "script" not in page.tags and "onload" not in page.attributes
        assert page.tags.count("style") == 1
        assert HOSTILE.split("</style>")[0] in page.text
        assert len(re.findall("(?i)<script", text)) == 0


@pytest.mark.parametrize("count", [2, 3000])
def test_that_a_page_needs_nothing_but_itself(count):
    text = render([study(clients=[f"c{i}" for i in range(count)])])
    page = Page(text)
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= page.ids
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in text
    assert len(text) < 200_000


def test_that_few_clients_have_a_row_each_and_of_many_the_extreme_ones():
    few, many = (
        Page(render([study(clients=[f"client {i:04}" for i in range(count)])]))
        for count in (40, 3000)
    )
    named = set(re.findall(r"client \d{4}", few.text))
    assert len(named) == 40
    named = set(re.findall(r"client \d{4}", many.text))
    assert {"client 0000", "client 2999"} <= named and len(named) <= 32
    assert "polygon" in many.tags


def test_that_several_runs_have_links_of_their_own():
    text = render([study(name="one"), study(name="two")], comparison=Comparison(None, "why not"))
    page = Page(text)
    assert {"run1-globals", "run2-globals", "comparison"} <= page.ids
    assert {link[1:] for link in page.links} <= page.ids
    assert "why not" in page.text


def test_that_the_checklist_claims_what_the_file_has_and_no_more():
    bare = study(program="", khat=None, checks=[], software={}, sensitivity=None, prior=None)
    full = study()
    found = {item.what: item.evidence for item in checklist(bare, None)}
    assert found["Posterior predictive check"] is None
    assert found["Accuracy of an approximation"] is None
    assert found["Sensitivity to the priors"] is None
    assert found["Software"] is None
    assert found["Convergence"] == "convergence"
    assert sum(item.evidence is None for item in checklist(full, None)) < len(
        [name for name, evidence in found.items() if evidence is None]
    )
    page = Page(render([bare]))
    assert "checks" not in page.ids
    assert page.text.count("not done") == sum(evidence is None for evidence in found.values())


@pytest.mark.parametrize(
    ("change", "good", "said"),
    [
        ({}, True, "within its limit of 0.70"),
        ({"caveat": "not converged"}, False, "not converged."),
        ({"khat": 0.9}, False, "Compare with another guide"),
        ({"khat": None}, None, "There is no Pareto k̂"),
        ({"khat": None, "rhat": 1.01, "ess": 1200.0}, True, "1,200"),
        ({"converged": False}, False, "had not converged"),
        ({"effective": 100.0}, True, "100 count"),
    ],
)
def test_the_verdict_in_words(change, good, said):
    found = assess(study(**change))
    assert found.good is good
    assert said in " ".join(found.reasons)


def test_that_numbers_that_are_not_finite_are_left_out():
    nan = np.full(3, np.nan)
    clients = variable("b", ["a", "b", "c"], mean=nan)
    text = render([study(locals=[clients], elbo=nan)])
    assert "None of the values is finite" in text and "nan%" not in text
