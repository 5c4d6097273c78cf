"""A fit by post from the command line: the coordinator's letters, institutions' answers, and everybody's keys."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import typer
from rich.console import Console

from bayesfed.cli.deployment import local_posteriors, make_node, make_plan, run_on
from bayesfed.cli.errors import RunError
from bayesfed.cli.experiment import Experiment, NodeFile, read_experiment
from bayesfed.data.plural import plural
from bayesfed.deploy.answering import decline, draft_answer, public_key_of, sign_answer
from bayesfed.deploy.letters import Letter, read_letter
from bayesfed.deploy.masking import load_or_make_key
from bayesfed.deploy.messages import Ask, MessageError, unpack
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.post import Post, Unanswered, coordinator_public_key, file_name
from bayesfed.deploy.secure import public_key
from bayesfed.engine.files import atomically, lock
from bayesfed.settings import SettingsError

_SUFFIX, _STUDY = ".post", "study.json"
_PROPOSALS = 9
"""The most requests for log densities after the rounds: one at draws of q(θ), two of their noise, six proposals."""


# -- the coordinator ------------------------------------------------------------------------------


def ask(experiment: Path, folder: Path, output: Path | None, without: Sequence[str]) -> None:
    """Write the next letter to ``output``, or to the standard output.

    Args:
        experiment: the experiment file.
        folder: of the results; the letters are beside it.
        output: the letter's file.
        without: institutions for whose answers a round does not wait any longer.
    """
    config, screen = read_experiment(experiment), _screen()
    post = _open(config, experiment, folder)
    with lock(post.folder / ".lock", f"the letters in {post.folder}"):
        post.begin(experiment)
        post.go_on_without(without)
        letter = post.letter
        if not (post.missing or (letter is not None and _is_final(letter.head))):
            _advance(post, config, experiment, folder, screen)
        path, missing = post.letter_path, post.missing
    assert path is not None
    if output is None:
        sys.stdout.buffer.write(path.read_bytes())
        sys.stdout.flush()
    else:
        with atomically(output) as file:
            file.write_bytes(path.read_bytes())
    own = config.deployment
    counts = count_letters(
        make_plan(config, experiment.parent), waits=own is None or own.enough is None
    )
    _say_what_is_next(path, missing, folder, counts, screen)


def take(files: Sequence[Path], experiment: Path | None) -> None:
    """Check institutions' answers and store them; go on with the run if the last one has come.

    Raises:
        RunError: some files were refused; the others were taken.
    """
    screen, refused = _screen(), 0
    studies = _studies() if experiment is None else [_study_of(experiment)]
    touched: dict[Path, Post] = {}
    for path in files:
        try:
            data = path.read_bytes()
            study = read_letter(data).head.study
            place = next((p for p in studies if _about(p)["study"] == study), None)
            if place is None:
                raise MessageError(
                    "it is of another study than those whose letters are here: call `bayesfed take` in the folder "
                    "where `bayesfed ask` was called"
                )
            if place not in touched:
                named = Path(_about(place)["experiment"])
                touched[place] = _open(read_experiment(named), named, _results(place))
            with lock(place / ".lock", f"the letters in {place}"):
                screen.print(f"{path}: taken, of institution {touched[place].take(data)!r}")
        except MessageError as error:
            refused += 1
            screen.print(f"{path}: refused: {error}")
    for place, post in touched.items():
        _go_on(place, post, screen)
    if refused:
        raise RunError(f"{refused} of {plural(len(files), 'file')} were refused")


def _go_on(place: Path, post: Post, screen: Console) -> None:
    """Go on with the run of a study if all answers are there; say what is next."""
    named = Path(_about(place)["experiment"])
    with lock(place / ".lock", f"the letters in {place}"):
        missing = post.missing
        letter = post.letter
        if not missing and letter is not None and not _is_final(letter.head):
            _advance(post, read_experiment(named), named, _results(place), screen)
    letter = post.letter
    if missing:
        screen.print(f"answers that have not come: {', '.join(missing)}")
    elif letter is not None and _is_final(letter.head):
        screen.print(f"the study is done; its last letter: bayesfed ask {named.name}")
    else:
        screen.print(f"all answers are here; the next letter: bayesfed ask {named.name}")


def _advance(
    post: Post, config: Experiment, experiment: Path, folder: Path, screen: Console
) -> None:
    """Run the server until it has requests without a reply, and write the letter with these."""
    try:
        with warnings.catch_warnings():
            # each command resumes the run; what an earlier one has drawn and not used has left nobody
            warnings.filterwarnings("ignore", "the run is resumed")
            wire = post.carrier()
            run_on(wire, config, experiment, folder, resume=True, console=screen, progress=False)
    except Unanswered as waiting:
        post.write(waiting.requests)
    except MessageError as error:
        number = post.letter.head.number if post.letter is not None else 0
        post.reopen()
        raise RunError(
            f"{error}. The answers to letter {number} are put away: once this is mended, take new ones"
        ) from error
    else:
        post.write_last()


def _open(config: Experiment, experiment: Path, folder: Path) -> Post:
    """Return the letters of a study.

    Raises:
        SettingsError: the experiment's settings are not for letters.
    """
    own = config.deployment
    if own is None:
        raise SettingsError("deployment is missing: letters need the names of the institutions")
    for name in ("expected", "max_staleness"):
        if getattr(own, name):
            raise SettingsError(
                f"deployment.{name} is for runs over a network: by post a round may go on --without an institution, "
                "which is asked again in the next one"
            )
    if own.chains:
        raise SettingsError(
            "deployment.chains is for runs over a network: each of hundreds of leapfrog steps would be a letter"
        )
    if config.leave_one_out is not None and config.leave_one_out.compare:
        raise SettingsError(
            "leave_one_out.compare is for runs over a network: stacking asks for one sum after another, and each would "
            "be a letter"
        )
    return Post(_letters(folder), tuple(own.institutions), own.keys)


def _say_what_is_next(
    path: Path, missing: Sequence[str], folder: Path, counts: str, screen: Console
) -> None:
    file = read_letter(path.read_bytes())
    head = file.head
    assert isinstance(head, Letter)
    to = ", ".join(head.requests)
    if head.final:
        screen.print(
            f"The study is done: results in {folder}. Letter {head.number} is the last, to {to}: it has the final "
            "θ for the institutions' own posteriors, and needs no answer."
        )
        return
    last = unpack(file.messages[-1])[0]
    what = {
        "hello": "asks for descriptions of the data",
        "describe": "asks for the kinds and levels of the formula's columns",
        "add": "asks for sums from which the formula's coding follows",
        "code": "has the formula's coding, on which all have agreed",
        "begin": "begins the run",
        "reveal": "asks for counts, means and covariances of each client",
        "open": "asks for the seals of secure sums",
        "evaluate": "asks for log densities, which correct q(θ)",
        "average": "asks for sums of effects",
        "leave_out": "asks for sums of leave-one-out",
    }.get(last.kind, "")
    kinds = {unpack(one)[0].kind for one in file.messages}
    if {"average", "leave_out"} <= kinds:
        what = "asks for sums of effects and leave-one-out"
    if isinstance(last, Ask):
        what = f"{'begins the run and ' if 'begin' in kinds else ''}asks for round {last.round.number + 1}"
    screen.print(f"Letter {head.number} {what}; it is for {to}.")
    if len(missing) < len(head.requests):
        screen.print(f"Answers that have not come: {', '.join(missing)}.")
    screen.print(f"At each institution: bayesfed answer FILE --node NODE.toml. {counts}")


def count_letters(plan: DeploymentPlan, *, waits: bool = True) -> str:
    """Return in words how many letters a study needs that institutions answer.

    Args:
        plan: the fit.
        waits: a round waits for the answers of all, so that the run begins in the letter of the first.
    """
    times, each = (2, ", two for each with secure sums") if plan.secure else (1, "")
    rounds = (
        "one a round until q(θ) has converged (500 at most)"
        if plan.rounds is None
        else f"{times * plan.rounds} for {plural(plan.rounds, 'round')}"
    )
    after = []
    if plan.algorithm.corrected and not plan.noisy:
        after.append(f"most often 2 to {times * _PROPOSALS} for importance weights")
    sums = [("effects", len(plan.effects)), ("leave-one-out", int(plan.leave_one_out is not None))]
    asked = [(name, count) for name, count in sums if count]
    if plan.secure:
        after += [f"{2 * count} for {name}" for name, count in asked]
    elif asked:
        after.append(f"1 for {' and '.join(name for name, _ in asked)}")
    coding = [] if plan.formula is None else [f"{2 + times} or more for the formula's coding"]
    begin = "2 to begin" if plan.secure or not waits else "1 to begin"
    parts = [begin, *coding, rounds, *after]
    if plan.reveal is not None:
        parts = ["1 for descriptions of the data", *coding, "1 for the moments"]
    return f"Letters that need an answer, in all: {', '.join(parts)}{each}."


def _is_final(head: object) -> bool:
    return isinstance(head, Letter) and head.final


def _letters(folder: Path) -> Path:
    return folder.with_name(folder.name + _SUFFIX)


def _results(place: Path) -> Path:
    return place.with_name(place.name.removesuffix(_SUFFIX))


def _studies() -> list[Path]:
    """Return where the letters of studies in ``runs`` of the working directory are."""
    return sorted(path.parent for path in Path("runs").glob(f"*{_SUFFIX}/{_STUDY}"))


def _study_of(experiment: Path) -> Path:
    """Return where the letters of an experiment are.

    Raises:
        SettingsError: no letter was written.
    """
    place = _letters(results_folder(read_experiment(experiment), experiment))
    if not (place / _STUDY).exists():
        raise SettingsError(f"{experiment}: no letter was written in this folder: bayesfed ask")
    return place


def results_folder(config: Experiment, experiment: Path) -> Path:
    """Return where the results of an experiment go."""
    return Path(config.output.folder or Path("runs") / experiment.stem)


def _about(place: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((place / _STUDY).read_text(encoding="utf-8"))
    return found


def _screen() -> Console:
    """Return a console on the standard error, since a letter may go to the standard output."""
    return Console(stderr=True, highlight=False, soft_wrap=True, markup=False, force_jupyter=False)


# -- an institution -------------------------------------------------------------------------------


def answer(
    letter: Path,
    node: NodeFile,
    config: Experiment,
    rows: pd.DataFrame | None,
    here: Path,
    base: Path,
    output: Path | None,
    *,
    yes: bool,
) -> None:
    """Show what would leave an institution in answer to a letter, and write the answer once somebody has agreed.

    Args:
        letter: the file.
        node: the node file.
        config: the experiment.
        rows: the institution's.
        here: the folder of the node file.
        base: the folder of the experiment file.
        output: where the answer goes; by default ``<institution>-<letter>.answer``.
        yes: somebody has agreed beforehand.

    Raises:
        SettingsError: the node file does not have the coordinator's key.
        RunError: nobody has agreed.
    """
    if node.coordinator is None:
        raise SettingsError(
            "coordinator is missing: the key with which the coordinator signs, as `bayesfed key` prints it there; "
            "compare it by telephone"
        )
    screen = _screen()
    local = local_posteriors(node, config, rows, here, base)
    resident = make_node(node, local)
    with lock(local.folder / ".node.lock", f"the folder of institution {node.name!r}"):
        try:
            draft = draft_answer(resident, letter.read_bytes(), node.coordinator)
        except MessageError as error:
            raise RunError(f"{letter}: {error}") from error
        head = draft.letter.head
        screen.print(f"Letter {head.number} of study {head.study[:8]}, signed by the coordinator.")
        if draft.final:
            screen.print(
                f"It is the last one, and needs no answer. The posterior is in {local.folder}; predictions: "
                "bayesfed predict"
            )
            return
        screen.print(f"From institution {node.name!r} to the coordinator would go:")
        for line in draft.lines:
            screen.print(f"  {line}")
        screen.print("No row and no client's local variable is in it.")
        if not yes and not typer.confirm("Write the answer?", err=True):
            decline(resident, draft)
            raise RunError("no answer was written")
        path = output or Path(f"{file_name(node.name)}-{letter.stem}.answer")
        data = sign_answer(resident, draft)
        with atomically(path) as file:
            file.write_bytes(data)
    screen.print(
        f"{path} is written: send it to the coordinator. {local.folder / 'log.jsonl'} lists it."
    )


# -- keys -----------------------------------------------------------------------------------------


def show_institution_key(node: NodeFile, config: Experiment, here: Path) -> None:
    """Print the line of an institution's key for the experiment file, and that of its identity for secure sums."""
    folder = here / (node.folder or node.name)
    name = json.dumps(node.name)
    print(f"[deployment.keys]\n{name} = {json.dumps(public_key_of(folder))}")
    if config.deployment is not None and config.deployment.secure:
        identity = public_key(load_or_make_key(folder / "identity.key")).hex()
        print(f"[identities]\n{name} = {json.dumps(identity)}")


def show_coordinator_key(config: Experiment, experiment: Path) -> None:
    """Print the line of the coordinator's key for the institutions' node files."""
    folder = _letters(results_folder(config, experiment))
    print(f"coordinator = {json.dumps(coordinator_public_key(folder))}")
