"""The options of a fit: which are refused, and what is compared of them."""

import json
import math

import pytest

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy.plan import DeploymentPlan, difference
from bayesfed.engine.plan import Plan
from bayesfed.engine.privacy import NO_PRIVACY
from bayesfed.steps import GradientsAtDraws

SCHOOLS = datasets.eight_schools()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"algorithm": bf.SFVI().replace(steps=GradientsAtDraws(steps=0))},
            "steps is 0; it must be at least 1",
        ),
        ({"batch_size": 1.5}, "batch_size is 1.5; it must be a whole number"),
        ({"seed": None}, "seed is null; it must be a whole number"),
        ({"privacy": bf.Privacy(noise=1.0)}, "rounds: ε depends on the number of rounds"),
        ({"held_out": SCHOOLS, "rounds": 3}, "held_out: its rows say when the run ends"),
        (
            {"algorithm": bf.PVI(), "rounds": 3, "privacy": bf.Privacy(noise=1.0)},
            "PVI cannot be private",
        ),
    ],
)
@pytest.mark.parametrize("kind", [Plan, DeploymentPlan])
def test_options_that_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(models.eight_schools, **options)


def test_a_precision_needs_weights():
    with pytest.raises(ValueError, match="precision: FedAvg does not correct draws"):
        Plan(models.eight_schools, bf.FedAvg(), precision=0.01)
    with pytest.raises(ValueError, match="leave out precision or privacy"):
        Plan(models.eight_schools, rounds=2, precision=0.01, privacy=bf.Privacy(clip=1.0))
    assert "precision" not in Plan(models.eight_schools).description
    assert Plan(models.eight_schools, precision=0.01).description["precision"] == 0.01


def test_held_out_rows_between_machines_are_refused():
    with pytest.raises(ValueError, match="held_out: between machines give rounds"):
        DeploymentPlan(models.eight_schools, held_out=SCHOOLS)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="secure"):
        bf.start(models.eight_schools, SCHOOLS, secure=True)


def test_a_description_is_plain_data():
    plan = Plan(models.eight_schools, rounds=3, privacy=bf.Privacy(clip=1.0))
    assert json.loads(json.dumps(plan.description)) == plan.description
    other = Plan(models.eight_schools, rounds=3, privacy=bf.Privacy(clip=2.0))
    assert difference(plan.description, other.description) == (
        "privacy.clip is 1.0 here and 2.0 there"
    )


def test_the_description_depends_on_the_cohort_size_not_on_how_it_is_given():
    one, other = (
        bf.start(models.eight_schools, SCHOOLS, rounds=rounds, clients_per_round=share)
        for rounds, share in ((3, 0.5), (5, 4))
    )
    assert one.description == other.description


def test_no_privacy_changes_nothing():
    upload = {"a": 1e9 * SCHOOLS["y"][:, None]}
    clipped, factor = NO_PRIVACY.clip_uploads(upload, 1.0)
    assert clipped["a"] is upload["a"] and factor == 1
    assert (NO_PRIVACY.multiplier(3, 2, 8), NO_PRIVACY.scale("a", math.inf, 0.0)) == (0, 0)
    assert math.isfinite(NO_PRIVACY.first_clip())
