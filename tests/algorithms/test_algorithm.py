"""Algorithms as compositions of four parts: which fit, how others are refused, and the form of their uploads."""

import itertools
from dataclasses import dataclass, replace

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models, rules, steps
from bayesfed.algorithms import METHODS
from bayesfed.algorithms.algorithm import draws_at_once, subclasses
from bayesfed.algorithms.registry import parts_by_name
from bayesfed.elbo import noise
from bayesfed.engine.batches import batches
from bayesfed.engine.parts import flat, nested
from bayesfed.engine.program import build_program
from bayesfed.guides.globals import (
    Gaussian,
    LaplaceGaussian,
    OwnGuide,
    Particles,
    Point,
)
from bayesfed.guides.locals import (
    AtPrior,
    Conditioned,
    Encoded,
    FromPrior,
    Integrated,
    Kept,
    Locals,
    Remade,
)
from bayesfed.rules import Mean, MStep, NormalisedMean, Rule, Turn
from bayesfed.steps import Alternate, Descent, InTurn, Steps
from bayesfed.steps.job import Job
from tests.scenarios import summed

SCHOOLS = datasets.eight_schools()
QUIET = {"progress": False, "execution": bf.Execution(compile=False)}


def no_guide(federation):
    """Not a guide of eight schools: it has no variables."""


def of_the_package(base):
    return [cls for cls in subclasses(base) if cls.__module__.startswith("bayesfed.")]


GLOBALS = [
    Point(),
    Gaussian(),
    bf.MeanField(),
    bf.FullRank(),
    bf.Flow(),
    Particles(),
    LaplaceGaussian(),
    OwnGuide(no_guide),
]
LOCALS = [
    AtPrior(),
    Kept(),
    Kept("normal"),
    Remade(),
    Remade("point"),
    Encoded(),
    Integrated(),
    FromPrior(),
    Conditioned(),
]
PHASES = (Descent("locals"), Descent("globals", at_prior=True))
STEPS = [
    *(Descent(moves) for moves in ("globals", "body", "locals", "all")),
    InTurn(PHASES),
    Alternate(),
    *(cls() for cls in of_the_package(Steps) if cls not in (Descent, InTurn, Alternate)),
]
RULES = [cls() for cls in of_the_package(Rule)]


# -- what fits ----------------------------------------------------------------------------------------


def test_the_lists_here_have_every_part_of_the_package():
    listed = {type(part).__name__ for part in [*GLOBALS, *LOCALS, *STEPS, *RULES]}
    phases = {"NaturalDescent"}  # of Alternate
    assert listed == set(parts_by_name()) - phases


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(bf.FedABML().replace(rule=MStep()), id="FedABML with an M-step"),
        pytest.param(bf.FedABML().replace(locals=Kept("normal")), id="stateful FedABML"),
        pytest.param(bf.Ditto().replace(rule=NormalisedMean()), id="Ditto normalised"),
        pytest.param(bf.Ditto().replace(rule=rules.ControlVariates()), id="Ditto with variates"),
        pytest.param(
            bf.FedPer().replace(steps=Descent("globals"), rule=Mean("clients")), id="own points"
        ),
    ],
)
def test_a_combination_that_no_paper_has_runs(algorithm):
    posterior = bf.fit(models.eight_schools, SCHOOLS, algorithm, rounds=2, **QUIET)
    start = posterior.program.init
    assert all(value.isfinite().all() for value in posterior.params.values())
    assert any((posterior.params[name] != value).any() for name, value in start.items())
    assert posterior.sample(3)["theta"].shape == (3, 8)


def test_a_composition_is_the_method_that_has_its_parts():
    """FedProx put together by hand: the same numbers."""
    algorithm = bf.Algorithm(
        Point(), AtPrior(), Descent("globals", lr=0.1, epochs=5, proximal=0.1), Mean("rows")
    )
    pair = algorithm, METHODS["FedProx"]()
    one, other = (bf.fit(models.eight_schools, SCHOOLS, a, rounds=3, **QUIET) for a in pair)
    assert one.params.keys() == other.params.keys()
    assert all(torch.equal(one.params[name], other.params[name]) for name in one.params)


def test_a_composition_has_no_name_but_its_parts():
    assert str(bf.FedAvg()) == "FedAvg"
    assert str(bf.FedAvg().replace(rule=NormalisedMean())) == (
        "Point · AtPrior · Descent · NormalisedMean"
    )
    assert str(bf.FedAvg().replace(rule=Mean(), name="mine")) == "mine"


def test_equal_compositions_are_equal_values():
    assert bf.FedAvg(lr=0.05) == replace(bf.FedAvg(), steps=Descent(lr=0.05, steepest=100.0))
    assert hash(bf.SFVI()) == hash(bf.SFVI())
    assert METHODS["FedProx"](proximal=0.0) != bf.FedAvg()  # the name differs
    with pytest.raises(AttributeError):
        bf.FedAvg().lr_decay = 0.5


# -- what does not ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            bf.FedAvg().replace(globals=Gaussian(), name="mine"),
            "mine: locals=AtPrior() does not go with globals=Gaussian(): take globals=Point()",
        ),
        (
            bf.SFVI().replace(steps=Descent(), name="mine"),
            "mine: steps=Descent() does not go with globals=Gaussian(): take globals=Point()",
        ),
        (
            bf.FedAvg().replace(rule=rules.Stein(), name="mine"),
            "mine: rule=Stein() does not go with globals=Point(): take globals=Particles()",
        ),
        (
            bf.FedAvg().replace(locals=Encoded(), name="mine"),
            "mine: steps=Descent() does not go with locals=Encoded(): take locals=AtPrior() or Kept() or Remade()",
        ),
        (
            bf.FedAvg().replace(steps=Descent("locals"), name="mine"),
            "mine: steps=Descent() does not go with locals=AtPrior(): take locals=Kept() or Remade()",
        ),
        (
            bf.FedPer().replace(locals=Kept("normal"), name="mine"),
            "mine: steps=Descent() does not go with locals=Kept('normal'): take locals=Kept('point')",
        ),
        (
            bf.PerFedAvg().replace(rule=rules.ControlVariates(), name="mine"),
            "mine: rule=ControlVariates() needs 'path', which steps=ThroughSteps() does not give: take "
            "steps=Descent()",
        ),
        (
            bf.FedAvg(optimizer="adam").replace(rule=NormalisedMean(), name="mine"),
            "mine: rule=NormalisedMean() needs 'steps', which steps=Descent() does not give: take other settings of",
        ),
        (
            bf.FedAvg(proximal=0.1).replace(rule=rules.ControlVariates(), name="mine"),
            "mine: rule=ControlVariates() needs 'path', which steps=Descent() does not give",
        ),
        (
            bf.FedCurv().replace(rule=Mean(), name="mine"),
            "mine: steps=PenalisedDescent() needs 'fisher' and 'pull', which rule=Mean() does not send: take "
            "rule=SummedCurvature(), or another steps than PenalisedDescent()",
        ),
        (
            bf.PFedVEM().replace(rule=Mean(), name="mine"),
            "mine: steps=VariationalEM() needs 'squares', which rule=Mean() does not send: take rule=MStep()",
        ),
        (
            bf.FedAvg().replace(rule=MStep(), name="mine"),
            "mine: rule=MStep() needs 'posterior', which steps=Descent() does not give: take steps=",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(algorithm, message):
    with pytest.raises(ValueError) as caught:
        bf.start(models.eight_schools, SCHOOLS, algorithm, rounds=1)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_they_are_refused_before_the_model_is_run():
    def model(federation):
        raise AssertionError("the model was run")

    with pytest.raises(ValueError, match=r"take steps="):
        bf.FedAvg().replace(rule=MStep()).program(model, SCHOOLS)


@pytest.mark.parametrize(
    ("field", "value"), [("locals", Point()), ("steps", Mean()), ("rule", Descent()), ("rule", 3)]
)
def test_a_part_in_the_place_of_another_is_refused(field, value):
    kind = {"locals": "Locals", "steps": "Steps", "rule": "Rule"}[field]
    with pytest.raises(TypeError, match=rf"^{field} is .*; it must be a {kind}$"):
        bf.FedAvg().replace(**{field: value}).check()


@pytest.mark.parametrize("family", GLOBALS, ids=lambda part: type(part).__name__)
def test_every_combination_is_a_program_or_a_message_of_one_line(family):
    """Of all families, locals, steps and rules with their default settings; the model has a body in no likelihood."""
    made = 0
    for own, work, rule in itertools.product(LOCALS, STEPS, RULES):
        algorithm = bf.Algorithm(family, own, work, rule)
        try:
            algorithm.check()
        except ValueError as error:
            assert "\n" not in str(error)
            assert " take " in str(error), error
            continue
        try:
            program = build_program(models.eight_schools, SCHOOLS, algorithm, seed=0)
        except (ValueError, NotImplementedError) as error:
            assert "\n" not in str(error), error
            continue
        made += 1
        one_round(algorithm, program)
    assert made or isinstance(family, OwnGuide)


@pytest.mark.parametrize("name", ["SFVI", "SFVIAvg", "PFedVEM", "Local"])
def test_messages_and_sums_without_a_tensor_in_some_part(name):
    """Between machines and in files only tensors are written, so that empty parts are lost."""

    def separate(federation):
        with federation.clients():
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(w, obs["sigma"]), obs=obs.get("y"))

    algorithm = METHODS[name]()
    one_round(algorithm, algorithm.program(separate, SCHOOLS))


def one_round(algorithm, program):
    """Take a round of all clients; return the upload and the server's next state."""
    server, keys = algorithm.start(program), noise.fold(noise.key(0), SCHOOLS.stream_ids)
    clients = algorithm.start_clients(program, server, SCHOOLS.batch())
    turn = Turn(program, noise.key(0), 8)
    message = nested(flat(algorithm.broadcast(turn, server)))
    job = Job(program, message, clients, batches(SCHOOLS, torch.arange(8), None, keys), keys)
    answer = algorithm.work(job)
    after, _ = algorithm.decode(turn, server, nested(flat(summed(answer.upload))))
    return answer, after


# -- the form of uploads ------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [bf.FedAvg(), bf.PFedVEM(), bf.FOLA(), bf.SFVI()], ids=str)
def test_uploads_are_tensors_by_name(algorithm):
    """Between machines they are written into messages, whose parts have names."""
    program = algorithm.program(models.eight_schools, SCHOOLS)
    upload = flat(one_round(algorithm, program)[0].upload)
    assert {type(name) for name in upload} == {str}
    assert {type(value) for value in upload.values()} == {torch.Tensor}
    assert {len(value) for value in upload.values()} == {8}


@pytest.mark.parametrize("name", ["FedAvg", "Scaffold", "Ditto", "SFVI", "PVI", "FOLA", "PFedVEM"])
def test_states_keep_their_names_and_shapes(name):
    """What clients and the server start with is what a round leaves: states are stored row by row."""
    algorithm = METHODS[name]()
    program = algorithm.program(models.eight_schools, SCHOOLS)
    server = algorithm.start(program)
    before = algorithm.start_clients(program, server, SCHOOLS.batch())
    answer, _ = one_round(algorithm, program)
    after = answer.clients | answer.memory
    assert {n: v.shape for n, v in flat(after).items()} == {
        n: v.shape for n, v in flat(before).items()
    }


def test_the_number_of_draws_that_a_step_takes_at_once():
    """Chunks of clients are cut by it."""
    for algorithm, draws in (
        (bf.FedAvg(), 1),
        (bf.SFVI(draws=6), 6),
        (bf.FedABML(draws=3), 3),
        (bf.PACPFL(particles=2, draws=5), 10),
    ):
        program = algorithm.program(models.eight_schools, SCHOOLS)
        assert draws_at_once(algorithm, program) == draws


# -- parts of one's own -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Half(Mean):
    """Half of FedAvg's move."""

    def decode(self, turn, server, total):
        halved = {name: value / 2 for name, value in total["theta"].items()}
        return super().decode(turn, server, total | {"theta": halved})


def test_a_rule_of_ones_own_is_a_class():
    moves = []
    for rule in (Mean(), Half()):
        algorithm = bf.FedAvg().replace(rule=rule)
        posterior = bf.fit(models.eight_schools, SCHOOLS, algorithm, rounds=1, **QUIET)
        moves.append(posterior.params["mu.loc"] - posterior.program.init["mu.loc"])
    torch.testing.assert_close(moves[1], moves[0] / 2)
    assert moves[0] != 0


def test_a_rule_need_not_say_anything_but_encode_and_decode():
    """By default it remembers nothing, sends θ, reports no progress, and drops stale updates."""
    rule = Rule()
    assert rule.no_noise == ""
    assert rule.stale({}, {}, 1) == {}
    assert rule.progress(None, {}) is None
    assert rule.broadcast(None, {"theta": {"a": 1}}) == {"theta": {"a": 1}}
    with pytest.raises(NotImplementedError):
        rule.encode(None, None)


def test_steps_need_not_say_anything_but_run_and_adapt():
    plain = steps.Steps()
    assert (plain.gives, plain.needs) == ({"theta"}, set())
    with pytest.raises(NotImplementedError):
        plain.run(None, None)


def test_locals_must_say_how_they_are_built():
    with pytest.raises(NotImplementedError):
        Locals().build(Point(), models.eight_schools, SCHOOLS)
