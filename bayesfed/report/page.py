"""The whole page: the sections that have facts, with their links."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bayesfed.report import sections
from bayesfed.report.checklist import checklist
from bayesfed.report.facts import Comparison, Study
from bayesfed.report.html import Content, document, tag


def render(
    studies: Sequence[Study], *, title: str = "", comparison: Comparison | None = None
) -> str:
    """Return a report as the text of one HTML file, which loads nothing and runs no script.

    Args:
        studies: the facts of one fit, or of several.
        title: the heading; by default the names of the fits.
        comparison: of several fits.
    """
    title = title or " and ".join(study.name for study in studies)
    body: list[Content] = [tag("h1", title)]
    if len(studies) == 1:
        return document(title, *body, *_study(studies[0], comparison, ""))
    compared = [] if comparison is None else sections.comparison(list(studies), comparison)
    runs = [(f"run{n}-", study) for n, study in enumerate(studies, 1)]
    links = [tag("a", study.name, href=f"#{prefix}top") for prefix, study in runs]
    body += [tag("nav", links), tag("h2", "Comparison", id="comparison"), compared]
    for prefix, study in runs:
        body += [tag("h1", study.name, id=f"{prefix}top"), *_study(study, comparison, prefix)]
    return document(title, *body)


def _study(study: Study, comparison: Comparison | None, prefix: str) -> list[Content]:
    """Return the sections of one fit, in the order of a reader's questions."""
    every: list[tuple[str, str, Callable[[Study], Content], bool]] = [
        ("globals", "Global variables", sections.globals_, True),
        ("effects", "Effects", sections.effects, bool(study.effects)),
        ("clients", "Clients", sections.clients, bool(study.locals or study.more_locals)),
        ("checks", "Does the model describe each client?", sections.checks, bool(study.checks)),
        ("convergence", "Can the numbers be trusted?", sections.convergence, True),
        ("priors", "Priors", sections.priors, bool(study.globals)),
        ("program", "Program", sections.program, True),
        ("data", "Data, and what left each institution", sections.data, True),
        ("reproduce", "Reproduce this", sections.reproduce, True),
    ]
    shown = [(name, heading, section) for name, heading, section, there in every if there]
    anchors = {name for name, *_ in shown} | ({"comparison"} if comparison is not None else set())
    links = [(name, heading) for name, heading, _ in shown] + [("checklist", "Checklist")]
    return [
        tag("nav", [tag("a", heading, href=f"#{prefix}{name}") for name, heading in links]),
        sections.summary(study),
        [
            [tag("h2", heading, id=prefix + name), section(study)]
            for name, heading, section in shown
        ],
        tag("h2", "Checklist", id=f"{prefix}checklist"),
        sections.items(checklist(study, comparison), anchors, prefix),
    ]
