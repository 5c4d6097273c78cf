"""Every method as a composition of four parts: globals q(θ), locals q(w_i | θ), a client's steps, and the rule.

The keywords under a method are its settings, ``bf.FedAvg(lr=0.05)``, and say which field of which part each of them
is. Two names of the literature that are one composition stand side by side: MAML is Per-FedAvg, MTL (mean-regularised
multi-task learning) is pFedMAP. Pooled is FedAvg of ``federation.pool()``, a single client with all rows; it refuses
more clients.
"""

from bayesfed.algorithms.algorithm import Algorithm
from bayesfed.algorithms.method import Method, Setting
from bayesfed.guides.flow import Flow
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.globals import Gaussian, LaplaceGaussian, OwnGuide, Particles, Point
from bayesfed.guides.locals import (
    AtPrior,
    Conditioned,
    Encoded,
    FromPrior,
    Integrated,
    Kept,
    Remade,
)
from bayesfed.guides.mean_field import MeanField
from bayesfed.rules import (
    Barycentre,
    ControlVariates,
    Mean,
    MeanAndVariance,
    MStep,
    NaturalGradient,
    NormalisedMean,
    OfOne,
    ProductOfFactors,
    ProductOfGaussians,
    Stein,
    SummedCurvature,
)
from bayesfed.settings import Rate
from bayesfed.steps import (
    Alternate,
    CavitySteps,
    Descent,
    Evidence,
    GradientsAtDraws,
    InTurn,
    LangevinEM,
    LaplaceSteps,
    NaturalDescent,
    OwnCopy,
    PenalisedDescent,
    ThroughContext,
    ThroughSteps,
    VariationalEM,
)

END = {"lr_decay": "lr_decay", "personal_steps": "locals.personal_steps"}
WEIGHTED = Setting(("rule.by",), {False: "clients", True: "rows"})

# -- point estimates of θ -----------------------------------------------------------------------------

FedAvg = Method(
    "FedAvg",
    "Federated averaging with fine-tuning (McMahan et al. 2017, Algorithm 1); slopes are cut off at 100.",
    Algorithm(
        Point(), AtPrior(), Descent("globals", lr=0.1, epochs=5, steepest=100.0), Mean(by="rows")
    ),
    lr="steps.lr",
    local_epochs="steps.epochs",
    local_steps="steps.steps",
    optimizer="steps.optimizer",
    proximal="steps.proximal",
    averaged_rounds="rule.averaged_rounds",
    **END,
)
FedProx = FedAvg.variant(
    "FedProx",
    "FedAvg with a pull towards θ as it was sent (Li et al. 2020).",
    FedAvg(proximal=0.1),
)
FedNova = FedAvg.variant(
    "FedNova",
    "FedAvg of clients that take different numbers of steps (Wang et al. 2020).",
    FedAvg().replace(rule=NormalisedMean()),
)
Scaffold = FedAvg.variant(
    "Scaffold",
    "FedAvg whose steps are corrected by control variates (Karimireddy et al. 2020, Algorithm 1).",
    FedAvg().replace(rule=ControlVariates()),
)
Pooled = FedAvg.variant(
    "Pooled",
    "Gradient descent on all rows as those of a single client, that of federation.pool().",
    FedAvg().replace(rule=OfOne()),
)
FedCurv = Method(
    "FedCurv",
    "FedAvg under the curvature of the other clients' losses (Shoham et al. 2019).",
    Algorithm(Point(), AtPrior(), PenalisedDescent(lam=1.0, lr=0.1, epochs=5), SummedCurvature()),
    lam="steps.lam",
    lr="steps.lr",
    local_epochs="steps.epochs",
    local_steps="steps.steps",
    **END,
)

# -- point estimates of θ and of w_i -------------------------------------------------------------------

FedPer = Method(
    "FedPer",
    "A body that clients share, and heads of their own, in common steps (Arivazhagan et al. 2019, Algorithm 1).",
    Algorithm(Point(), Kept("point"), Descent("all", lr=0.1, epochs=5), Mean(by="rows")),
    lr="steps.lr",
    local_epochs="steps.epochs",
    optimizer="steps.optimizer",
    **END,
)
FedRep = Method(
    "FedRep",
    "The head first, under the body that was sent; then the body (Collins et al. 2021, Algorithm 1).",
    FedPer().replace(
        steps=InTurn((Descent("locals", lr=0.1, epochs=5), Descent("body", lr=0.1, epochs=5)))
    ),
    lr=("steps.phases.0.lr", "steps.phases.1.lr"),
    head_epochs="steps.phases.0.epochs",
    local_epochs="steps.phases.1.epochs",
    optimizer=("steps.phases.0.optimizer", "steps.phases.1.optimizer"),
    **END,
)
FedBABU = FedPer.variant(
    "FedBABU",
    "The body alone, under the head with which all clients start; then fine-tuning (Oh et al. 2022, Algorithm 1).",
    FedPer().replace(locals=Remade("point"), steps=Descent("body", lr=0.1, epochs=5)),
)
Local = FedPer.variant(
    "Local",
    "Every client by itself: nothing is shared.",
    FedPer().replace(steps=Descent("locals", lr=0.1, epochs=5)),
)
Ditto = Method(
    "Ditto",
    "FedAvg, and beside it personal point estimates held near the common ones (Li et al. 2021, Algorithm 1).",
    FedPer().replace(
        steps=InTurn(
            (Descent("locals", proximal=0.1), Descent("globals", at_prior=True, steepest=100.0))
        )
    ),
    lam="steps.phases.0.proximal",
    lr=("steps.phases.0.lr", "steps.phases.1.lr"),
    local_epochs=("steps.phases.0.epochs", "steps.phases.1.epochs"),
    local_steps=("steps.phases.0.steps", "steps.phases.1.steps"),
    optimizer=("steps.phases.0.optimizer", "steps.phases.1.optimizer"),
    **END,
)
PerFedAvg = Method(
    "PerFedAvg",
    "A θ that is good after a few steps of a client's own, or MAML between clients (Fallah et al. 2020, Algorithm 1).",
    Algorithm(
        Point(), Remade("point"), ThroughSteps(inner_lr=0.1, inner_steps=1), Mean(by="clients")
    ),
    lr="steps.inner_lr",
    prior_lr="steps.lr",
    inner_steps="steps.inner_steps",
    second_order="steps.second_order",
    local_epochs="steps.epochs",
    local_steps="steps.steps",
    prior_optimizer="steps.optimizer",
    **END,
)
PFedMe = Method(
    "PFedMe",
    "Personal point estimates near θ, and θ drawn towards them: Moreau envelopes (Dinh et al. 2020, Algorithm 1).",
    Algorithm(
        Point(),
        Remade("point"),
        Alternate(
            Descent("locals", lr=0.1, proximal=2.0, clip=1.0),
            5,
            Descent("globals", lr=0.3, clip=1.0),
        ),
        Mean(by="clients"),
    ),
    lam=Setting(("steps.inner.proximal",), value_type=Rate),
    lr="steps.inner.lr",
    prior_lr="steps.outer.lr",
    inner_steps="steps.times",
    local_epochs="steps.outer.epochs",
    local_steps="steps.outer.steps",
    **END,
)
CAFeMe = Method(
    "CAFeMe",
    "Meta-learning with an encoder of the client's labelled rows (Vettoruzzo et al., Algorithms 1 and 2).",
    Algorithm(
        Point(), Encoded(), ThroughContext(inner_lr=0.3, inner_steps=5, lr=0.5), Mean(by="clients")
    ),
    inner_lr="steps.inner_lr",
    lr="steps.lr",
    optimizer="steps.optimizer",
    inner_steps="steps.inner_steps",
    second_order="steps.second_order",
    personal_fraction="steps.personal_fraction",
    support_rows="steps.support_rows",
    outer_steps="steps.steps",
    weighted=WEIGHTED,
    **END,
)

# -- point estimates of θ, Normals for w_i -------------------------------------------------------------

FedABML = Method(
    "FedABML",
    "Bayesian meta-learning: θ is the prior of each client's posterior (Liu, Lv et al. 2023, Algorithm 1).",
    Algorithm(
        Point(),
        Remade("normal"),
        Alternate(NaturalDescent("locals", lr=0.3), 5, NaturalDescent("globals", lr=0.3)),
        Mean(by="clients"),
        lr_decay=0.03,
    ),
    local_epochs="steps.outer.epochs",
    local_steps="steps.outer.steps",
    inner_steps="steps.times",
    lr="steps.inner.lr",
    prior_lr="steps.outer.lr",
    shared_lr="steps.outer.shared_lr",
    kl_weight=("steps.inner.kl_weight", "steps.outer.kl_weight"),
    draws=("steps.inner.draws", "steps.outer.draws"),
    natural=("steps.inner.natural", "steps.outer.natural"),
    weighted=WEIGHTED,
    **END,
)
PFedBayes = FedABML.variant(
    "PFedBayes",
    "FedABML with its KL weighted by ζ = 0.05, for likelihoods that depend on w_i alone (Zhang et al. 2022).",
    FedABML(kl_weight=0.05),
)
PFedVEM = Method(
    "PFedVEM",
    "Variational EM: each client's distance to the centre follows from its uncertainty (Zhu et al. 2023, eq. 5, 7).",
    Algorithm(Point(), Kept("normal", scale=0.3), VariationalEM(), MStep(), lr_decay=0.1),
    point=Setting(("locals.kind",), {False: "normal", True: "point"}),
    head_epochs="steps.epochs",
    body_epochs="steps.body_epochs",
    head_steps="steps.steps",
    body_steps="steps.body_steps",
    lr="steps.lr",
    body_lr="steps.body_lr",
    optimizer="steps.optimizer",
    kl_weight=("steps.kl_weight", "rule.kl_weight"),
    draws="steps.draws",
    init_scale="locals.scale",
    upload_fraction="rule.upload_fraction",
    **END,
)
PFedMAP = PFedVEM.variant(
    "PFedMAP",
    "Personal point estimates under N(m, ρ²), m their mean; mean-regularised multi-task learning (Zhu et al. 2023).",
    PFedVEM(point=True),
)

FedPop = Method(
    "FedPop",
    "θ of maximum marginal likelihood, by Langevin chains on the clients' variables (Kotelevskii et al. 2022).",
    PFedVEM().replace(steps=LangevinEM(), lr_decay=0.01),
    local_steps="steps.steps",
    body_lr="steps.body_lr",
    init_scale="locals.scale",
    upload_fraction="rule.upload_fraction",
    **END,
)

# -- distributions of θ --------------------------------------------------------------------------------

FOLA = Method(
    "FOLA",
    "Federated online Laplace approximation: one Gaussian over all globals (Liu et al. 2024, eq. 11 to 24).",
    Algorithm(LaplaceGaussian(), Integrated(), LaplaceSteps(), ProductOfGaussians()),
    lr="steps.lr",
    prior_weight="rule.prior_weight",
    local_epochs="steps.epochs",
    local_steps="steps.steps",
    covariance="globals.covariance",
    fisher="steps.fisher",
    online="steps.online",
    cavity="rule.cavity",
    damping="rule.damping",
    gamma="globals.gamma",
    personal_steps="locals.personal_steps",
)
FedBE = Method(
    "FedBE",
    "FedAvg with an ensemble of draws from the Normal of the clients' copies (Chen & Chao 2021).",
    Algorithm(
        LaplaceGaussian("diagonal"),
        Integrated(),
        LaplaceSteps(lr=0.1, fisher="none"),
        MeanAndVariance(),
    ),
    lr="steps.lr",
    local_epochs="steps.epochs",
    local_steps="steps.steps",
    gamma="globals.gamma",
    **END,
)
PACPFL = Method(
    "PACPFL",
    "Particles of a hyper-posterior over priors (Boroujeni et al. 2025, Algorithm 2), moved by Stein gradients.",
    Algorithm(Particles(), FromPrior(draws=10), Evidence(), Stein(lr=0.05), lr_decay=0.1),
    particles="globals.count",
    draws="locals.draws",
    integrated="locals.integrated",
    tau="rule.tau",
    lam="rule.lam",
    beta=("locals.beta", "rule.beta"),
    new_data_clients="rule.new_data_clients",
    upsilon="rule.upsilon",
    flat="rule.flat",
    lr="rule.lr",
    optimizer="rule.optimizer",
    lr_decay="lr_decay",
)
PFedGP = PACPFL.variant(
    "PFedGP",
    "One prior for all clients, of maximum marginal likelihood: of Gaussian processes (Achituve et al. 2021) or other.",
    PACPFL(particles=1, flat=True),
)
SFVI = Method(
    "SFVI",
    "Structured federated variational inference, of any model/guide pair (Hassan, Salomone & Mengersen 2023).",
    Algorithm(
        Gaussian(),
        Conditioned(),
        GradientsAtDraws(steps=10, draws=8),
        NaturalGradient(lr=1.0),
        lr_decay=0.01,
        corrected=True,
    ),
    global_guide=Setting(("globals",), {None: Gaussian()}, (MeanField, FullRank, Flow)),
    conditioned="locals.on_globals",
    guide=Setting(("globals",), wrap=OwnGuide),
    local_steps="steps.steps",
    draws="steps.draws",
    lr="rule.lr",
    local_lr="steps.local_lr",
    corrected="corrected",
    **END,
)
SFVIAvg = Method(
    "SFVIAvg",
    "SFVI with several steps, free of drift, on clients' copies of a Gaussian q(θ); barycentre (Hassan et al. 2023).",
    Algorithm(
        Gaussian(),
        Conditioned(),
        OwnCopy(steps=10),
        Barycentre(),
        lr_decay=0.01,
        corrected=True,
    ),
    global_guide=Setting(("globals",), {None: Gaussian()}, (MeanField, FullRank)),
    conditioned="locals.on_globals",
    local_steps="steps.steps",
    draws="steps.draws",
    lr="steps.lr",
    local_lr="steps.local_lr",
    corrected="corrected",
    **END,
)
PVI = Method(
    "PVI",
    "Partitioned variational inference: one Gaussian factor of q(θ) per client (Ashman et al. 2022).",
    Algorithm(
        FullRank(),
        Conditioned(),
        CavitySteps(steps=10, draws=8),
        ProductOfFactors(),
        lr_decay=0.01,
        corrected=True,
    ),
    conditioned="locals.on_globals",
    damping="rule.damping",
    local_steps="steps.steps",
    step="steps.step_size",
    draws="steps.draws",
    local_lr="steps.local_lr",
    corrected="corrected",
    **END,
)

METHODS: dict[str, Method] = {
    method.name: method for method in list(globals().values()) if isinstance(method, Method)
} | {"MAML": PerFedAvg, "MTL": PFedMAP}
"""Methods by name."""
