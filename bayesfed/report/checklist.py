"""A checklist of what reports of Bayesian analyses should have, each item with its evidence in the file, or none.

BARG are the guidelines of Kruschke 2021, *Bayesian Analysis Reporting Guidelines*, Nature Human Behaviour 5, by step
of their table. The items of the draft guidance of the FDA of January 2026, *Use of Bayesian Methodology in Clinical
Trials of Drug and Biological Products*, are those that its review arXiv 2601.14701 names.
"""

from __future__ import annotations

from typing import NamedTuple

from bayesfed.report.facts import Comparison, Study

_ITEMS = """
BARG preamble | Why Bayesian, and the goals of the analysis | | | write them in the paper
BARG 1A | Data variables | data | numbers of clients and rows; explain the variables in the paper |
BARG 1B–D | Likelihood, priors, formal specification | program | the source | the source was not available
BARG 1C | Justification of the priors | | | write it in the paper
BARG 1E | Prior predictive check | prior check | mean and sd of all outcomes | no outcomes drawn from the prior
BARG 2A | Software | software | names and versions | the files have no versions
BARG 2B | Convergence | convergence | of the optimisation or of the chains |
BARG 2C | Resolution of the draws | globals | Monte Carlo standard errors | there are no global variables
BARG 2D | Accuracy of an approximation | accuracy | Pareto k̂ or chains | compare with another guide or method
BARG 3 | Posterior predictive check | checks | by client | the files have no predictions
BARG 3 | Posterior of the variables | globals | density, mean, sd and interval | there are no global variables
BARG 3 | Comparison of models, if there are several | comparison | leave-one-out | bayesfed report RUN RUN
BARG 4 | Decisions, with criteria and limits of practical equivalence | | | write them in the paper
BARG 5 | Sensitivity to the priors | sensitivity | power-scaling | the draws have no log_prior
BARG 6 | Software, program, settings and seed | source | with hashes of program and data | the source was not available
BARG 6 | Scripts and data posted | | | post them, or say who may ask for the data
FDA | Criteria of success | hypotheses | posterior probabilities; state the criteria beforehand | use bf.effects
FDA | Influence of the priors | prior | prior beside posterior | the files have no draws from the prior
FDA | Operating characteristics | | | bf.power simulates trials: how often each claim is shown
FDA | Computation that can be reviewed | source | program, versions, seed, hashes | the source was not available
"""
"""Source, item, fact that is its evidence, what the fact is, and what to do without it."""


class Item(NamedTuple):
    """An item of the checklist.

    Attributes:
        source: the guideline, with its step.
        what: the item.
        evidence: the section that has it; None if it was not done.
        note: what the section shows, or what to do by hand.
    """

    source: str
    what: str
    evidence: str | None
    note: str


def checklist(study: Study, comparison: Comparison | None) -> list[Item]:
    """Return the items for a fit, according to the facts that were collected."""
    places, found = _places(study, comparison), []
    for line in _ITEMS.strip().splitlines():
        source, what, fact, note, instead = (part.strip() for part in line.split("|"))
        evidence = places.get(fact)
        found.append(Item(source, what, evidence, instead if evidence is None else note))
    return found


def _places(study: Study, comparison: Comparison | None) -> dict[str, str]:
    """Return the section of each fact that was collected."""
    compared = comparison is not None and comparison.table is not None
    columns = [str(name) for one in study.effects for name in one.table]
    facts = {
        "data": ("data", True),
        "program": ("program", bool(study.program)),
        "prior": ("priors", any(one.prior is not None for one in study.globals)),
        "prior check": ("priors", bool(study.prior_checks)),
        "sensitivity": ("priors", any(one.sensitivity is not None for one in study.globals)),
        "software": ("reproduce", bool(study.software)),
        "source": ("reproduce", bool(study.program)),
        "convergence": ("convergence", True),
        "accuracy": ("convergence", study.khat is not None or study.rhat is not None),
        "globals": ("globals", bool(study.globals)),
        "checks": ("checks", bool(study.checks)),
        "comparison": ("comparison", compared),
        "hypotheses": ("effects", any(name.startswith("P(") for name in columns)),
    }
    return {name: section for name, (section, there) in facts.items() if there}
