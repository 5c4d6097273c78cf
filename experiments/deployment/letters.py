"""How many letters does a fit by post need, and how long are they? Makes letters.md.

    python experiments/deployment/letters.py

Three institutions and a coordinator in this process, with the letters and answers that otherwise people carry. A
letter counts if institutions answer it. "Difference" is the largest of the global parameters and their draws between
the fit by post and the same fit by calls.
"""

from __future__ import annotations

import tempfile
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import in_process
import torch
from in_process import runner

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy.answering import draft_answer, public_key_of, sign_answer
from bayesfed.deploy.global_posterior import GlobalPosterior
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.letters import public_signing_key, read_letter
from bayesfed.deploy.messages import unpack
from bayesfed.deploy.node import Node
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.post import Post, Unanswered
from bayesfed.deploy.secure import public_key
from bayesfed.deploy.server import run_server

SCHOOLS = (models.eight_schools, datasets.eight_schools)
FIRMS = (models.varying_slope, datasets.grunfeld)
SMOKING = (models.hierarchical_logistic, datasets.china_smoking)
PLAIN = bf.SFVI(corrected=False)
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "eight schools, SFVI": (SCHOOLS, bf.SFVI(), {}),
    "eight schools, without importance weights": (SCHOOLS, PLAIN, {}),
    "eight schools, 5 rounds, without importance weights": (SCHOOLS, PLAIN, {"rounds": 5}),
    "eight schools, 5 rounds, secure sums": (SCHOOLS, PLAIN, {"rounds": 5, "secure": True}),
    "eleven firms, SFVI": (FIRMS, bf.SFVI(), {}),
    "smoking in eight cities, SFVI": (SMOKING, bf.SFVI(), {}),
    "smoking in eight cities, without importance weights": (SMOKING, PLAIN, {}),
}
NAMES = ("east", "middle", "west")


def institutions(plan: DeploymentPlan, federation: bf.Federation, folder: Path) -> dict[str, Node]:
    """Return three nodes, with each other's keys."""
    cuts = [round(i * len(federation) / len(NAMES)) for i in range(len(NAMES) + 1)]
    nodes = {
        name: Node(name, federation.select(federation.names[a:b]), plan, folder / name)
        for name, (a, b) in zip(NAMES, pairwise(cuts), strict=True)
    }
    if plan.secure:
        pinned = {name: public_key(node.identity) for name, node in nodes.items()}
        for node in nodes.values():
            node.pinned = pinned
    return nodes


def by_post(
    plan: DeploymentPlan, nodes: dict[str, Node], folder: Path
) -> tuple[GlobalPosterior, dict[str, int], int, int]:
    """Fit by letters; return the result, the letters by kind, and the sizes of the longest letter and answer."""
    keys = {name: public_key_of(Path(node.folder)) for name, node in nodes.items()}
    post, kinds, longest, answered = Post(folder / "post", NAMES, keys), dict[str, int](), 0, 0
    post.begin(folder / "experiment.toml")
    coordinator = public_signing_key(post.key)
    for _ in count():
        try:
            found = run_server(post.carrier(), plan, Patience(NAMES), folder / "run.safetensors")
            return found, kinds, longest, answered
        except Unanswered as waiting:
            post.write(waiting.requests)
        assert post.letter_path is not None
        letter = post.letter_path.read_bytes()
        kind = unpack(read_letter(letter).messages[-1])[0].kind
        kinds[kind] = kinds.get(kind, 0) + 1
        longest = max(longest, len(letter))
        for node in nodes.values():
            answer = sign_answer(node, draft_answer(node, letter, coordinator))
            answered = max(answered, len(answer))
            post.take(answer)
    raise AssertionError


def measure(case: str) -> list[str]:
    """Fit by post and by calls."""
    (model, data), algorithm, options = CASES[case]
    plan, federation = DeploymentPlan(model, algorithm, **options), data()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        nodes = institutions(plan, federation, folder)
        found, kinds, longest, answered = by_post(plan, nodes, folder)
        calls = folder / "calls"
        others = institutions(plan, federation, calls)
        expected = run_server(
            in_process.Carrier(
                lambda: list(NAMES),
                lambda messages, wait: {n: others[n].handle(p) for n, p in messages.items()},
            ),
            plan,
            Patience(NAMES),
            calls / "run.safetensors",
        )
    pairs = [(found.params[n], v) for n, v in expected.params.items()]
    draws = found.sample(1000)
    pairs += [(draws[n], v) for n, v in expected.sample(1000).items()]
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    assert all(torch.isfinite(a).all() for a, _ in pairs)
    rounds = len(found.posterior.history["elbo"])
    after = kinds.get("evaluate", 0)
    total = sum(kinds.values())
    sizes = [f"{longest / 1000:.1f}", f"{answered / 1000:.1f}"]
    return [str(rounds), str(after), str(total), *sizes, f"{difference:g}"]


def main() -> None:
    """Fit all cases."""
    given = runner.arguments(__doc__)
    columns = (
        "fit | rounds | letters for weights | letters answered | kB of the longest letter | "
        "kB of the longest answer | difference"
    )
    runner.table(columns, list(CASES), measure, given)


if __name__ == "__main__":
    main()
