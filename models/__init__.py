"""Hierarchical models, one per file, each a Pyro program a user could have written.

- :func:`eight_schools`: normal means with known standard errors (Rubin, 1981).
- :func:`varying_intercept`: linear regression, one intercept per client.
- :func:`varying_slope`: linear regression, one intercept and one vector of slopes per client.
- :func:`hierarchical_logistic`: logistic regression, one intercept and vector of slopes per client.
- :func:`hierarchical_count`: Poisson regression with exposure, one intercept per client.
- :class:`OrderedLogistic`: ordered categories, one intercept per client.
- :func:`weibull_survival`: Weibull regression of censored times, one intercept (frailty) per client.
- :class:`Cox`: Cox regression of censored times, the baseline hazard piecewise constant, one frailty per client.
- :class:`Network`: any ``torch.nn.Module``, with all or some weights local to each client; :func:`mlp` and
  :func:`cnn`, :func:`lenet` and :func:`resnet18` make common ones.
- :class:`HyperNetwork`: a network whose weights a second network makes from an embedding of the client (pFedHN).
- :class:`LabelShares`: the prior of how often a client has each label, for :class:`Network` and :class:`Modulated`;
  :func:`start_subclasses` starts the sub-classes of labels apart.
- :class:`Modulated`: a network whose hidden units are gated by a second network that reads a client's rows (CAFeMe).
- :class:`GaussianProcess`: one function per client; the mean and kernel of their prior are global (PAC-PFL).
"""

from bayesfed.models.convolutional import cnn, lenet, resnet18
from bayesfed.models.cox import Cox
from bayesfed.models.eight_schools import eight_schools
from bayesfed.models.gaussian_process import GaussianProcess
from bayesfed.models.hierarchical_count import hierarchical_count
from bayesfed.models.hierarchical_logistic import hierarchical_logistic
from bayesfed.models.hyper_network import HyperNetwork
from bayesfed.models.label_shares import LabelShares, start_subclasses
from bayesfed.models.modulated import Modulated
from bayesfed.models.network import Network, mlp
from bayesfed.models.ordered_logistic import OrderedLogistic
from bayesfed.models.varying_intercept import varying_intercept
from bayesfed.models.varying_slope import varying_slope
from bayesfed.models.weibull_survival import weibull_survival

__all__ = [
    "eight_schools",
    "varying_intercept",
    "varying_slope",
    "hierarchical_logistic",
    "hierarchical_count",
    "OrderedLogistic",
    "weibull_survival",
    "Cox",
    "Network",
    "HyperNetwork",
    "LabelShares",
    "start_subclasses",
    "Modulated",
    "GaussianProcess",
    "mlp",
    "cnn",
    "lenet",
    "resnet18",
]
