"""The sections of a report, each a function of the facts of one fit."""

from __future__ import annotations

import math

from bayesfed.data.plural import plural
from bayesfed.report.checklist import Item
from bayesfed.report.facts import ByClient, Comparison, Effect, Global, Sent, Study
from bayesfed.report.figures import Row, by_client, density, elbo_curve, forest
from bayesfed.report.html import Content, soft, table, tag
from bayesfed.report.numbers import format_row
from bayesfed.report.verdict import Verdict, assess

MEANING = {
    "schema": "names, shapes and types of the fields, names of the clients and their number of rows",
    "digest": "values of the model's densities at fixed places, by which the model is recognised",
    "reply": "sums over the institution's clients of what the algorithm uploads in a round",
    "seal": "the key of the institution's own mask, once the masked uploads of all are there",
    "log_densities": "sums over the clients of log densities at draws of θ",
    "averages": "sums over rows for an effect that was agreed on",
    "left_out": "sums over observations or clients of leave-one-out predictive densities, for the comparison agreed on",
    "done": "that a request was carried out",
    "refusal": "the reason for a refusal",
}
"""The contents of each kind of message."""
INFORMATIVE = 0.05
"""Sensitivity above which power-scaling calls a prior informative (Kallioinen et al. 2024)."""
LONG = 60
"""Lines of a program's source from which it is folded."""


def summary(study: Study) -> Content:
    """Return cards with the main numbers, and the verdict in a sentence."""
    chains = None if study.rhat is None else (f"{study.rhat:.3f}", "largest R-hat")
    cards = [
        (f"{study.clients:,}", "clients"),
        None if study.rows is None else (f"{study.rows:,}", "observations"),
        (f"{study.rounds:,}", f"rounds, {study.seconds:,.1f} s"),
        chains or (_khat(study), "Pareto k̂"),
        None if study.epsilon is None else (f"ε = {study.epsilon:.3g}", "differential privacy"),
    ]
    seen = [one for one in study.checks if one.observed is not None]
    outside = [f"{one.label}: {one.outside.sum():,} of {len(one.clients):,}" for one in seen]
    clients = f"Clients outside their 94 % predictive intervals: {'; '.join(outside)}."
    return [
        tag("p", f"{study.model}, fitted by {study.algorithm}.", class_="lead"),
        tag("div", [_card(*card) for card in cards if card], class_="cards"),
        _note(assess(study)),
        tag("p", clients) if outside else None,
    ]


def _card(large: str, small: str) -> Content:
    return tag("div", tag("b", large), tag("span", small), class_="card")


def _khat(study: Study) -> str:
    return "none" if study.khat is None else f"{study.khat:.2f}"


def _note(found: Verdict) -> Content:
    kind = "note" if found.good else "note bad"
    return tag("div", tag("b", f"{found.headline}. "), found.reasons[0], class_=kind)


def globals_(study: Study) -> Content:
    """Return the table of global variables, with densities of posterior and prior."""
    estimates = [[name, value] for name, value in study.params.items()]
    points = [tag("h3", "Parameters"), table(["parameter", "point estimate"], estimates)]
    if not study.globals:
        return points if estimates else tag("p", "The model has no global variable.")
    rows = [[one.label, density(one.density), *_numbers(one)] for one in study.globals]
    prior: Content = [tag("span", class_="swatch dashed"), " prior density. "]
    return [
        table(["", "density", "mean", "sd", "94 % interval", "MCSE"], rows, text=2),
        soft(
            [tag("span", class_="swatch"), " posterior density. "],
            prior if any(one.prior is not None for one in study.globals) else None,
            f"Highest-density intervals of {plural(study.draws, 'draw')}. "
            "MCSE: Monte Carlo standard error of the mean.",
            f" {plural(study.more_globals, 'more number is', 'more numbers are')} not shown."
            if study.more_globals
            else "",
        ),
        points if estimates else None,
    ]


def _numbers(one: Global) -> list[str]:
    return [*format_row([one.mean, one.sd], one.sd), _interval(one), f"{one.mcse:.1g}"]


def _interval(one: Global) -> str:
    return "{} to {}".format(*format_row(one.interval, one.sd))


def clients(study: Study) -> Content:
    """Return a figure of each local variable."""
    if not study.locals:
        return tag("p", f"Not shown: {plural(study.more_locals, 'number')} of each client.")
    note = "Dots: means. Thick and thin lines: 50 % and 94 % intervals. Vertical line: the mean over the clients."
    more = f"Not shown: {plural(study.more_locals, 'more number')} of each client."
    figures = [_titled(one.label, one) for one in study.locals]
    return [figures, soft(note, f" {more}" if study.more_locals else "")]


def _titled(title: str, one: ByClient) -> Content:
    return [tag("h3", title), by_client(one)]


def checks(study: Study) -> Content:
    """Return the predictive checks by client, and what leaving out each client says."""
    what = (
        "For each client, a statistic of its outcomes (diamond) beside the same statistic of outcomes that the model "
        "predicts for it (dot, 50 % and 94 % intervals). Under a model that describes the clients, about 6 % of the "
        "diamonds are outside, and fewer for a statistic that a client's own variables follow closely, as its mean: "
        "the rows were used in the fit. Of classes it is the share of rows that are predicted right."
    )
    figures = [_titled(f"{one.label[0].upper()}{one.label[1:]}", one) for one in study.checks]
    return [tag("p", what), figures, _left_out(study.left_out)]


def _left_out(effect: Effect | None) -> Content:
    """Return the table of clients that are left out in turn."""
    if effect is None:
        return None
    meaning = (
        "elpd: log density of the client's rows according to all others, with its Monte Carlo error. moves, shift: the "
        "global variable that moves most without the client, and by how many standard deviations. conflict: the "
        "two-sided p-value of its mean outcome among those that the others predict; 5 % of clients are below 0.05 by "
        "chance."
    )
    return [_effect(effect), soft(meaning)]


def convergence(study: Study) -> Content:
    """Return the verdict with all its reasons, and the ELBO by round."""
    found = assess(study)
    rest = [tag("p", reason) for reason in found.reasons[1:]]
    return [_note(found), rest, elbo_curve(study.elbo)]


def program(study: Study) -> Content:
    """Return the source of the program."""
    if not study.program:
        return tag("p", "The source of the program was not available.")
    source, lines = tag("pre", tag("code", study.program)), study.program.count("\n")
    folded = tag("details", tag("summary", f"The source, {lines} lines"), source)
    return folded if lines > LONG else source


def priors(study: Study) -> Content:
    """Return priors beside posteriors, with their sensitivity in words."""
    shown = [one for one in study.globals if one.prior is not None]
    sensitive = any(one.sensitivity is not None for one in shown)
    head = ["", "prior median", "prior 94 % interval", "posterior 94 % interval"]
    head += ["prior sensitivity", "likelihood sensitivity", ""] * sensitive
    meaning = (
        "Sensitivity: how much the posterior changes if the prior, or the likelihood, is raised to a power near 1 "
        f"(Kallioinen et al. 2024). Above {INFORMATIVE} it is noticeable."
    )
    none = tag("p", "There are no draws from the prior to show beside the posterior.")
    return [
        table(head, [_prior(one)[: len(head)] for one in shown]) if shown else none,
        soft(meaning) if sensitive else None,
        [
            _titled(f"Prior predictive check: {c.label}, over all clients", c)
            for c in study.prior_checks
        ],
    ]


def _prior(one: Global) -> list[str]:
    assert one.prior is not None
    prior, sensitivity = one.prior, one.sensitivity or (math.nan, math.nan)
    median, lower, upper = format_row(prior, (prior[2] - prior[1]) / 4)
    row = [one.label, median, f"{lower} to {upper}", _interval(one)]
    return [*row, *(f"{value:.2f}" for value in sensitivity), sensitivity_in_words(*sensitivity)]


def sensitivity_in_words(prior: float, likelihood: float) -> str:
    """Return the meaning of sensitivities to power-scaling of prior and likelihood.

    Example:
        >>> from bayesfed.report.sections import sensitivity_in_words
        >>> sensitivity_in_words(0.01, 0.2), sensitivity_in_words(0.1, 0.01)
        ('', 'strong prior or weak likelihood')
    """
    if not prior > INFORMATIVE:
        return ""
    conflict = likelihood > INFORMATIVE
    return "possible conflict of prior and data" if conflict else "strong prior or weak likelihood"


def effects(study: Study) -> Content:
    """Return each effect as a table and, where it has intervals, a forest plot."""
    return [_effect(one) for one in study.effects]


def _effect(effect: Effect) -> Content:
    frame = effect.table
    names = [str(name) for name in frame.columns]
    first = names.index("mean") if "mean" in names else 1
    rows = [[_cell(value) for value in row] for row in frame.itertuples(index=False)]
    plot: Content = None
    ends = [name for name in names if name.endswith("%")]
    if "mean" in names and len(ends) == 2:
        numbers = frame[["mean", *ends]].to_numpy(float).tolist()
        plot = forest(
            [
                Row(", ".join(row[:first]), mean, (lower, upper))
                for row, (mean, lower, upper) in zip(rows, numbers, strict=True)
            ]
        )
    return [tag("h3", effect.estimand), soft(effect.note), plot, table(names, rows, text=first)]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return str(value)


def data(study: Study) -> Content:
    """Return what left each institution, and what privacy was spent."""
    where = "This fit ran in one process, with the rows of all clients: nothing was sent."
    if study.deployed:
        where = "The rows stayed at their institutions. Each has a log.jsonl of what left it" + (
            "." if study.sent else ", which this report was not given (bayesfed report --log)."
        )
    meaning = (
        "Numbers: the entries of the tensors of all messages; there are no rows and no local variables among them. "
        "Under secure sums they are masked, and the server can remove the masks from the sum only."
    )
    privacy = "Differential privacy: none. Uploads had no noise."
    if study.epsilon is not None:
        settings = "".join(f", {name} {value}" for name, value in study.privacy.items())
        spent = f"Differential privacy: ε = {study.epsilon:.3g} spent{settings}."
        privacy = f"{spent} Neighbouring data sets differ in one client's data."
    head = ["message", "contents", "times", "numbers", "kB"]
    tables = [
        [tag("h3", institution), table(head, [_sent(one) for one in messages], text=2)]
        for institution, messages in study.sent.items()
    ]
    return [tag("p", where), tables, soft(meaning) if study.sent else None, tag("p", privacy)]


def _sent(one: Sent) -> list[Content]:
    tensors = ", ".join(
        f"{name} {'×'.join(map(str, shape)) or '1'}" for name, shape in one.tensors.items()
    )
    details = tag("details", tag("summary", "tensors"), tensors) if tensors else None
    numbers = f"{one.count:,}", f"{one.numbers:,}", f"{one.size / 1000:,.1f}"
    meaning = tag("div", MEANING.get(one.kind, ""), class_="words")
    return [one.kind, [meaning, details], *numbers]


def reproduce(study: Study) -> Content:
    """Return settings, seed, versions and hashes."""
    rows: list[list[Content]] = [["algorithm", study.algorithm], ["seed", str(study.seed)]]
    rows += [[name, value] for name, value in study.software.items()]
    rows += [[name, tag("span", value, class_="hash")] for name, value in study.hashes.items()]
    settings = tag("pre", tag("code", study.settings))
    folded = tag("details", tag("summary", "All settings"), settings)
    return [table(["", ""], rows, text=2), folded if study.settings else None]


def items(found: list[Item], anchors: set[str], prefix: str) -> Content:
    """Return the checklist, each item with a link to its section, or marked as not done."""
    rows: list[list[Content]] = []
    for one in found:
        place = one.evidence if one.evidence == "comparison" else f"{prefix}{one.evidence}"
        there = tag("a", "✓ in this file", href=f"#{place}", class_="done")
        absent = tag("span", "not done", class_="not-done")
        status = there if one.evidence in anchors else absent
        rows.append([one.what, status, one.note, one.source])
    sources = (
        "BARG: Kruschke 2021, Bayesian Analysis Reporting Guidelines. FDA: the draft guidance of January 2026 on "
        "Bayesian methodology in clinical trials, by its summary in arXiv 2601.14701. A link shows that the file has "
        "the item, not that it is adequate."
    )
    return [table(["item", "", "evidence, or what to do", "source"], rows, text=4), soft(sources)]


def comparison(studies: list[Study], found: Comparison) -> Content:
    """Return the runs side by side: how they were fitted, leave-one-out, and the global variables that they share."""
    head = ["run", "model", "algorithm", "verdict", "rounds", "Pareto k̂"]
    rows = [
        [s.name, s.model, s.algorithm, assess(s).headline, f"{s.rounds:,}", _khat(s)]
        for s in studies
    ]
    content: list[Content] = [table(head, rows, text=4)]
    if found.table is not None:
        numbers = [
            [
                str(name),
                *(f"{row[c]:.1f}" for c in ("elpd", "se", "diff", "dse")),
                f"{row['weight']:.2f}",
            ]
            for name, row in found.table.iterrows()
        ]
        columns = ["run", "elpd", "se", "below the best", "se of this", "stacking weight"]
        content += [
            tag("h3", "Expected log predictive density, by leave-one-out"),
            table(columns, numbers),
        ]
    content.append(soft(found.why) if found.why else None)
    labels = [one.label for one in studies[0].globals]
    shared = [
        n for n in labels if all(any(n == one.label for one in s.globals) for s in studies[1:])
    ]
    for label in shared[:12]:
        same = [(s.name, next(one for one in s.globals if one.label == label)) for s in studies]
        content += [
            tag("h3", label),
            forest([Row(name, one.mean, one.interval) for name, one in same]),
        ]
    return content
