"""Variational families of the clients' variables: where they start, and what a client keeps of them between rounds.

Each class builds the Pyro guide of q(w_i | θ) beside a family of the globals. *Stateful* clients keep their variables
from round to round; *stateless* clients make them from θ in every round.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.data.plural import plural
from bayesfed.elbo.build import build
from bayesfed.elbo.elbo import local_priors
from bayesfed.elbo.program import Params, Program
from bayesfed.elbo.sites import global_dimensions, sites
from bayesfed.guides.automatic import automatic_guide
from bayesfed.guides.encoders import Encoded as WithEncoder
from bayesfed.guides.encoders import contexts
from bayesfed.guides.factorised import factorised
from bayesfed.guides.fisher import prior_units
from bayesfed.guides.flow import Flow
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.globals import Gaussian, LaplaceGaussian, OwnGuide, Particles, Point
from bayesfed.guides.laplace import laplace
from bayesfed.guides.mean_field import MeanField
from bayesfed.guides.particles import from_prior
from bayesfed.settings import Times

FULL_RANK_UP_TO, MANY_WEIGHTS = 100, 1000
"""The largest number of global dimensions for which :class:`Gaussian` means full rank, and the number beyond which they
are taken for weights of a network in a warning.

Clients keep and send D × D numbers, and a round has 2 D draws: with correlated columns ten rounds have the posterior of
100 coefficients, and of 200, which take eight times as long.
"""
CONDITIONED_UP_TO = 50
"""The same for local variables that are conditioned on the globals, whose weights every client keeps."""


class Locals:
    """A family of the clients' variables.

    Attributes:
        globals: the families of the globals beside which it can be built.
        stateful: clients keep their variables between rounds.
        personal_steps: steps in which a client that took no part makes its variables from θ.
    """

    globals: ClassVar[tuple[type[Any], ...]] = (Point,)
    stateful: ClassVar[bool] = False
    personal_steps: int = 0

    def build(self, globals_: Any, model: Model, federation: Federation) -> Program:
        """Return the model with the guide of both families."""
        raise NotImplementedError

    def begin(self, program: Program, theta: Params, batch: Batch) -> Params:
        """Return the local parameters ``(K, 1, ...)`` of K clients before their first step, θ a copy each."""
        return program.init_locals(batch)


@dataclass(frozen=True)
class AtPrior(Locals):
    """Every client stands at the centre of its prior p(w_i | θ), whatever its rows; ``personalize`` is fine-tuning.

    Attributes:
        personal_steps: steps of fine-tuning, from the centre of the prior.
    """

    personal_steps: Times = 50

    def build(self, globals_: Any, model: Model, federation: Federation) -> Program:
        """Return the model with point estimates of all variables."""
        return build(model, factorised(model, federation, local_point=True), federation)

    def begin(self, program: Program, theta: Params, batch: Batch) -> Params:
        """Return the centres of the priors."""
        return prior_of_locals(program, theta, batch)


@dataclass(frozen=True)
class Kept(Locals):
    """Stateful clients: each keeps a point estimate or a mean-field Normal of its variables from round to round.

    They start at the θ that the client is sent at its first visit.

    Attributes:
        kind: ``"point"`` or ``"normal"``.
        scale: standard deviation of a Normal at the start, in the unit of its prior
            (:func:`~bayesfed.guides.fisher.prior_units`); its location starts at the centre of the prior.
        personal_steps: steps in which a client that took no part makes its variables.
    """

    kind: Literal["point", "normal"] = "point"
    scale: float = 0.3
    personal_steps: Times = 50
    stateful = True

    def build(self, globals_: Any, model: Model, federation: Federation) -> Program:
        """Return the model with a point estimate of θ and a factorised q(w_i)."""
        point = self.kind == "point"
        guide = factorised(model, federation, local_point=point, scale=self.scale)
        return build(model, guide, federation)

    def begin(self, program: Program, theta: Params, batch: Batch) -> Params:
        """Return the centres of the priors, with the first standard deviations."""
        own, scales = program.init_locals(batch), program.guide.log_scales
        found = prior_centre(program, theta | own, batch)
        own |= {n: v.detach().clone() for n, v in found.items() if n not in scales}
        for name, unit in prior_units(program).items():
            if (log_scale := f"{name.removesuffix('.loc')}.log_scale") in scales:
                own[log_scale] = own[log_scale] + unit.log()
        return own


@dataclass(frozen=True)
class Remade(Locals):
    """Stateless clients: each makes its variables again in every round, starting at the prior p(w_i | θ).

    Attributes:
        kind: ``"point"``, from the centre of the prior, or ``"normal"``, from the prior itself.
        personal_steps: steps in which a client makes its variables at the end.
    """

    kind: Literal["point", "normal"] = "normal"
    personal_steps: Times = 50

    def build(self, globals_: Any, model: Model, federation: Federation) -> Program:
        """Return the model with a point estimate of θ and a factorised q(w_i)."""
        guide = factorised(model, federation, local_point=self.kind == "point")
        return build(model, guide, federation)

    def begin(self, program: Program, theta: Params, batch: Batch) -> Params:
        """Return the priors, or their centres."""
        return prior_of_locals(program, theta, batch)


@dataclass(frozen=True)
class Encoded(Locals):
    """Stateless clients with a variable that an encoder of the model makes from their rows (CAFeMe).

    Attributes:
        personal_steps: steps on the client's other variables at the end.
    """

    personal_steps: Times = 50

    def build(self, globals_: Any, model: Model, federation: Federation) -> Program:
        """Return the model with point estimates of all variables.

        Raises:
            ValueError: no local variable has an encoder; a client has a single row.
        """
        program = build(model, factorised(model, federation, local_point=True), federation)
        if not program.contexts:
            names = ", ".join(repr(site.name) for site in program.locals) or "there are none"
            raise ValueError(
                f"CAFeMe needs a local variable that is made from the client's rows, and no local variable ({names}) "
                "has an encoder: pyro.sample(name, ..., infer={'context': encode}), as in models.Modulated. FedABML "
                "and PerFedAvg adapt the local variables of any model"
            )
        if int(federation.lengths.min()) < 2:
            name = federation.names[int(federation.lengths.argmin())]
            raise ValueError(
                f"client {name!r} has a single row; CAFeMe needs one to personalise with and one to "
                "evaluate on: leave the client out and personalise it afterwards"
            )
        params = program.init | program.init_locals(program.schema)
        contexts(program, params, program.schema)  # refuses encoders that give other shapes
        return program

    def begin(self, program: Program, theta: Params, batch: Batch) -> Params:
        """Return the clients' variables except the encoded ones, at the centres of their priors."""
        start = program.init_locals(batch)
        with WithEncoder(batch):  # a prior may depend on the encoded variable
            priors = local_priors(program, theta | start, batch)
        encoded = {site.name: priors.pop(site.name) for site in program.contexts}
        own = start | program.guide.at(priors)
        return {name: own[name] for name in own if name not in program.guide.at(encoded)}


@dataclass(frozen=True)
class Integrated(Locals):
    """Local variables that Laplace's method integrates out where they are few; many stand at the centre of the prior.

    Attributes:
        personal_steps: steps in which clients with many variables make them at the end.
    """

    personal_steps: Times = 50
    globals = (LaplaceGaussian,)

    def build(self, globals_: LaplaceGaussian, model: Model, federation: Federation) -> Program:
        """Return the model, its parameters as random variables, with a Gaussian over its globals."""
        guide = laplace(model, federation, globals_.gamma, globals_.covariance)
        return build(guide.model, guide, federation)


@dataclass(frozen=True)
class FromPrior(Locals):
    """Local variables drawn from their prior, or from Laplace approximations; draws count by their weights (PAC-PFL).

    Attributes:
        draws: L, draws from the prior for a client's marginal likelihood; models without local random variables need
            none.
        beta: β, by default n_i: how many rows those of a client count for.
        integrated: Laplace's method gives the marginal likelihood of clients with at most 20 variables, and the
            proposals of their draws, instead.
    """

    draws: int = 10
    beta: float | None = None
    integrated: bool = True
    globals = (Particles,)

    def build(self, globals_: Particles, model: Model, federation: Federation) -> Program:
        """Return the model with particles of its random globals and points for its parameters.

        Raises:
            ValueError: no global is random, but there are several particles; a client has a parameter of its own;
                ``beta`` with a marginal likelihood in closed form; a local prior whose noise cannot be supplied.
        """
        guide = from_prior(
            model,
            sites(model, federation),
            federation,
            globals_.count,
            self.draws,
            self.beta,
            self.integrated,
        )
        try:
            program = build(model, guide, federation)
        except NotImplementedError as error:
            raise ValueError(
                "PACPFL draws a client's variables from their prior, with noise from outside. Give the variable "
                f"another prior, or take SFVI, whose guide is not the prior: {str(error).splitlines()[0]}"
            ) from None
        if not guide.sizes and not (globals_.count == 1 and program.direct):
            raise ValueError(
                "no global of the model is random, and so there is nothing that particles could differ in: give the "
                "globals a prior, such as Network(..., hyper_scale=0.4), or, where they are pyro.param, take PFedGP: "
                "one particle (particles=1, flat=True), all of them points"
            )
        if program.local_params:
            raise ValueError(
                f"parameter {program.local_params[0]!r} is a client's own, but PACPFL's clients take no steps: make "
                "it global, or random inside the clients plate (Network: spread='learnt' or 'fixed'); or take PFedVEM"
            )
        if self.beta is not None and not program.locals:
            raise ValueError(
                "beta is for models with local random variables; the closed form is that of β = n_i: leave it out"
            )
        return program


@dataclass(frozen=True)
class Conditioned(Locals):
    """Stateful clients with a Normal q(w_i | θ) that follows θ, moved by Laplace's closed form and Adam steps (SFVI).

    Attributes:
        on_globals: condition q(w_i) on θ; None does so up to 50 global dimensions.
        personal_steps: steps in which a client that took no part makes its variables.
    """

    on_globals: bool | None = None
    personal_steps: Times = 500
    globals = (Gaussian, FullRank, MeanField, Flow, OwnGuide)
    stateful = True

    def build(self, globals_: Any, model: Model, federation: Federation) -> Program:
        """Return the model with the automatic guide, or with the user's own.

        Raises:
            ValueError: there is nothing to learn.
        """
        if isinstance(globals_, OwnGuide):
            return build(model, globals_.guide, federation)
        found = sites(model, federation)
        size = global_dimensions(found)
        family = _chosen(size) if isinstance(globals_, Gaussian) else globals_
        conditioned = size <= CONDITIONED_UP_TO if self.on_globals is None else self.on_globals
        program = build(
            model, automatic_guide(model, found, federation, family, conditioned), federation
        )
        if not (program.init or program.locals):
            raise ValueError(
                "the model has nothing to learn: variables of an observation are integrated out, and it has no other, "
                "and no pyro.param. Sample what clients share outside `with federation.clients():`, what is a "
                "client's own inside"
            )
        return program


def _chosen(size: int) -> FullRank | MeanField:
    if size <= FULL_RANK_UP_TO:
        return FullRank()
    network = "; for the weights of a network take FedAvg, FedABML or PFedVEM, which predict better"
    warnings.warn(
        f"the {size} global dimensions are taken to be independent (mean-field): where they are correlated their "
        "standard deviations come out too small. global_guide=FullRank() has the correlations, for "
        f"{size} × {plural(size, 'number')} a client; global_guide=MeanField() chooses this one"
        + network
        * (size > MANY_WEIGHTS),
        stacklevel=5,
    )
    return MeanField()


# -- the centre of the prior ------------------------------------------------------------------------


def prior_centre(program: Program, theta: Mapping[str, Tensor], batch: Batch) -> Params:
    """Return the local parameters at which K clients' q(w_i) is the prior p(w_i | θ); a point lies at its centre.

    Shape ``(K, 1, ...)``, differentiable in θ.
    """
    return program.guide.at(local_priors(program, with_model_locals(program, theta, batch), batch))


def with_model_locals(program: Program, params: Mapping[str, Tensor], batch: Batch) -> Params:
    """Add to the parameters those of K clients' own that the model has and no step moves, such as a spread of each."""
    missing = [name for name in program.resting if name not in params]
    if not missing:
        return dict(params)
    own = program.init_locals(batch)
    return {**params, **{name: own[name] for name in missing}}


def prior_of_locals(program: Program, theta: Params, batch: Batch) -> Params:
    """Return :func:`prior_centre`, apart from θ, with the first values of all other local parameters."""
    own = program.init_locals(batch)
    found = prior_centre(program, theta | own, batch)
    return own | {name: value.detach().clone() for name, value in found.items()}
