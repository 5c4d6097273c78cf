"""The sections of a report, each a function of the facts of one fit."""

from __future__ import annotations

import math

from bayesfed.report.checklist import Item
from bayesfed.report.facts import ByClient, Comparison, Effect, Global, Sent, Study
from bayesfed.report.figures import Row, by_client, density, elbo_curve, forest
from bayesfed.report.html import Content, table, tag
from bayesfed.report.numbers import format_row
from bayesfed.report.verdict import assess

MEANING = {
    "schema": "names, shapes and types of the fields, names of the clients and their number of rows",
    "digest": "values of the model's densities at fixed places, by which the model is recognised",
    "reply": "sums over the institution's clients of what the algorithm uploads in a round",
    "seal": "the key of the institution's own mask, once the masked uploads of all are there",
    "log_densities": "sums over the clients of log densities at draws of θ",
    "averages": "sums over rows for an effect that was agreed on",
    "done": "that a request was carried out",
    "refusal": "the reason for a refusal",
}
"""The contents of each kind of message."""
INFORMATIVE = 0.05
"""Sensitivity above which power-scaling calls a prior informative (Kallioinen et al. 2024)."""
LONG = 60
"""Lines of a program's source from which it is folded."""
LARGE_GLOBALS = "{:,} more numbers of global variables are not shown."


def summary(study: Study) -> Content:
    """Return cards with the main numbers, and the verdict in a sentence."""
    found = assess(study)
    cards = [
        (f"{study.clients:,}", "clients"),
        (f"{study.rounds:,}", f"rounds, {study.seconds:,.1f} s"),
        (_khat(study), "Pareto k̂")
        if study.rhat is None
        else (f"{study.rhat:.3f}", "largest R-hat"),
    ]
    if study.rows is not None:
        cards.insert(1, (f"{study.rows:,}", "observations"))
    if study.epsilon is not None:
        cards.append((f"ε = {study.epsilon:.3g}", "differential privacy"))
    seen = [one for one in study.checks if one.observed is not None]
    outside = [f"{one.label}: {one.outside.sum():,} of {len(one.clients):,}" for one in seen]
    return [
        tag("p", f"{study.model}, fitted by {study.algorithm}.", class_="lead"),
        tag("div", [_card(*card) for card in cards], class_="cards"),
        _note(found.good is True, found.headline, found.reasons[0]),
        tag("p", f"Clients outside their 94 % predictive intervals: {'; '.join(outside)}.")
        if outside
        else None,
    ]


def _card(large: str, small: str) -> Content:
    return tag("div", tag("b", large), tag("span", small), class_="card")


def _khat(study: Study) -> str:
    return "none" if study.khat is None else f"{study.khat:.2f}"


def _note(good: bool, headline: str, text: str) -> Content:
    return tag("div", tag("b", f"{headline}. "), text, class_="note" if good else "note bad")


def globals_(study: Study) -> Content:
    """Return the table of global variables, with densities of posterior and prior."""
    points: Content = None
    if study.params:
        estimates = table(
            ["parameter", "point estimate"], [[n, v] for n, v in study.params.items()]
        )
        points = [tag("h3", "Parameters"), estimates]
    if not study.globals:
        return points or tag("p", "The model has no global variable.")
    rows = [
        [
            one.label,
            density(one.density),
            *format_row([one.mean, one.sd], one.sd),
            _interval(one),
            f"{one.mcse:.1g}",
        ]
        for one in study.globals
    ]
    key: list[Content] = [tag("span", class_="swatch"), " posterior density. "]
    if any(one.prior is not None for one in study.globals):
        key += [tag("span", class_="swatch dashed"), " prior density. "]
    more = LARGE_GLOBALS.format(study.more_globals) if study.more_globals else ""
    return [
        table(["", "density", "mean", "sd", "94 % interval", "MCSE"], rows, text=2),
        tag(
            "p",
            key,
            f"Highest-density intervals of {study.draws:,} draws. MCSE: Monte Carlo standard error of the mean. {more}",
            class_="soft",
        ),
        points,
    ]


def _interval(one: Global) -> str:
    return "{} to {}".format(*format_row(one.interval, one.sd))


def clients(study: Study) -> Content:
    """Return a figure of each local variable."""
    if not study.locals:
        return tag("p", f"Each client has {study.more_locals:,} numbers, which are not shown.")
    note = "Dots: means. Thick and thin lines: 50 % and 94 % intervals. Vertical line: the mean over the clients."
    more = (
        f" {study.more_locals:,} more numbers of each client are not shown."
        if study.more_locals
        else ""
    )
    return [[_titled(one) for one in study.locals], tag("p", note + more, class_="soft")]


def _titled(one: ByClient) -> Content:
    return [tag("h3", one.label), by_client(one)]


def checks(study: Study) -> Content:
    """Return the predictive checks by client."""
    found: list[Content] = [
        tag(
            "p",
            "For each client, a statistic of its outcomes (diamond) beside the same statistic of outcomes that the "
            "model predicts for it (dot, 50 % and 94 % intervals). Under a model that describes the clients, about 6 % "
            "of the diamonds are outside, and fewer for a statistic that a client's own variables follow closely, as "
            "its mean: the rows were used in the fit. Of classes it is the share of rows that are predicted right.",
        )
    ]
    for one in study.checks:
        found.append(tag("h3", f"{one.label[0].upper()}{one.label[1:]}"))
        if one.observed is not None:
            outside = f"{one.outside.sum():,} of {len(one.clients):,} clients are outside."
            found.append(tag("p", outside))
        found.append(by_client(one))
    return found


def convergence(study: Study) -> Content:
    """Return the verdict with all its reasons, and the ELBO by round."""
    found = assess(study)
    rest = [tag("p", reason) for reason in found.reasons[1:]]
    return [
        _note(found.good is True, found.headline, found.reasons[0]),
        rest,
        elbo_curve(study.elbo),
    ]


def program(study: Study) -> Content:
    """Return the source of the program."""
    if not study.program:
        return tag("p", "The source of the program was not available.")
    source = tag("pre", tag("code", study.program))
    lines = study.program.count("\n")
    if lines <= LONG:
        return source
    return tag("details", tag("summary", f"The source, {lines} lines"), source)


def priors(study: Study) -> Content:
    """Return priors beside posteriors, with their sensitivity in words."""
    shown = [one for one in study.globals if one.prior is not None]
    before = [_prior_check(one) for one in study.prior_checks]
    if not shown:
        return [
            tag("p", "There are no draws from the prior to show beside the posterior."),
            before,
        ]
    sensitive = any(one.sensitivity is not None for one in shown)
    head = ["", "prior median", "prior 94 % interval", "posterior 94 % interval"]
    rows: list[list[Content]] = []
    for one in shown:
        assert one.prior is not None
        median, lower, upper = one.prior
        numbers = format_row([median, lower, upper], (upper - lower) / 4)
        row: list[Content] = [
            one.label,
            numbers[0],
            f"{numbers[1]} to {numbers[2]}",
            _interval(one),
        ]
        if sensitive:
            values = one.sensitivity or (math.nan, math.nan)
            row += [*(f"{v:.2f}" for v in values), sensitivity_in_words(*values)]
        rows.append(row)
    found: list[Content] = [
        table([*head, *["prior sensitivity", "likelihood sensitivity", ""] * sensitive], rows)
    ]
    if sensitive:
        found.append(
            tag(
                "p",
                "Sensitivity: how much the posterior changes if the prior, or the likelihood, is raised to a power "
                f"near 1 (Kallioinen et al. 2024). Above {INFORMATIVE} it is noticeable.",
                class_="soft",
            )
        )
    return [found, before]


def _prior_check(one: ByClient) -> Content:
    """Return the prior predictive distribution of a statistic of all outcomes, and the observed one."""
    return [tag("h3", f"Prior predictive check: {one.label}, over all clients"), by_client(one)]


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
    first = names.index("mean") if "mean" in names else len(names)
    ends = [name for name in names if name.endswith("%")]
    rows = [[_cell(value) for value in row] for row in frame.itertuples(index=False)]
    plot: Content = None
    if first < len(names) and len(ends) == 2:
        plot = forest(
            [
                Row(", ".join(row[:first]), float(m), (float(a), float(b)))
                for row, m, a, b in zip(
                    rows, frame["mean"], frame[ends[0]], frame[ends[1]], strict=True
                )
            ]
        )
    return [
        tag("h3", effect.estimand),
        tag("p", f"Level: {effect.level}", class_="soft"),
        plot,
        table(names, rows, text=max(1, first)),
    ]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return str(value)


def data(study: Study) -> Content:
    """Return what left each institution, and what privacy was spent."""
    found: list[Content] = []
    if not study.deployed:
        found.append(
            tag("p", "This fit ran in one process, with the rows of all clients: nothing was sent.")
        )
    elif not study.sent:
        found.append(
            tag(
                "p",
                "The rows stayed at their institutions. Each has a log.jsonl of what left it, which this report was "
                "not given (bayesfed report --log).",
            )
        )
    for institution, messages in study.sent.items():
        head = ["message", "contents", "times", "numbers", "kB"]
        found += [
            tag("h3", institution),
            table(head, [_sent(one) for one in messages], text=2),
        ]
    if study.sent:
        found.append(
            tag(
                "p",
                "Numbers: the entries of the tensors of all messages, rows and variables of single clients not among "
                "them. Under secure sums they are masked, and the server can remove the masks from the sum only.",
                class_="soft",
            )
        )
    if study.epsilon is None:
        found.append(tag("p", "Differential privacy: none. Uploads had no noise."))
    else:
        settings = "".join(f", {name} {value}" for name, value in study.privacy.items())
        spent = f"Differential privacy: ε = {study.epsilon:.3g} spent{settings}."
        found.append(tag("p", f"{spent} Neighbouring data sets differ in one client's data."))
    return found


def _sent(one: Sent) -> list[Content]:
    tensors = ", ".join(
        f"{name} {'×'.join(map(str, shape)) or '1'}" for name, shape in one.tensors.items()
    )
    details = tag("details", tag("summary", "tensors"), tensors) if tensors else None
    numbers = f"{one.count:,}", f"{one.numbers:,}", f"{one.size / 1000:,.1f}"
    return [one.kind, [MEANING.get(one.kind, ""), details], *numbers]


def reproduce(study: Study) -> Content:
    """Return seed, versions and hashes."""
    rows: list[list[Content]] = [["algorithm", study.algorithm], ["seed", str(study.seed)]]
    rows += [[name, value] for name, value in study.software.items()]
    rows += [[name, tag("span", value, class_="hash")] for name, value in study.hashes.items()]
    return table(["", ""], rows, text=2)


def items(found: list[Item], anchors: set[str], prefix: str) -> Content:
    """Return the checklist, each item with a link to its section, or marked as not done."""
    rows: list[list[Content]] = []
    for one in found:
        done = one.evidence is not None and one.evidence in anchors
        place = one.evidence if one.evidence == "comparison" else f"{prefix}{one.evidence}"
        status = (
            tag("a", "✓ in this file", href=f"#{place}", class_="done")
            if done
            else tag("span", "not done", class_="not-done")
        )
        rows.append([one.what, status, one.note, one.source])
    return [
        table(["item", "", "evidence, or what to do", "source"], rows, text=4),
        tag(
            "p",
            "BARG: Kruschke 2021, Bayesian Analysis Reporting Guidelines. FDA: the draft guidance of January 2026 on "
            "Bayesian methodology in clinical trials, by its summary in arXiv 2601.14701. A link shows that the file "
            "has the item, not that it is adequate.",
            class_="soft",
        ),
    ]


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
    content.append(tag("p", found.why, class_="soft") if found.why else None)
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
