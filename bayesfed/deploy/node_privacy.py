"""A node's part in differential privacy: it refuses rounds that are less private than was agreed on, and adds noise."""

from bayesfed.data.plural import plural
from bayesfed.deploy.messages import Ask, MessageError, Tensors
from bayesfed.deploy.plan import DeploymentPlan


def check_privacy(plan: DeploymentPlan, message: Ask) -> None:
    """Fail on a request that is less noisy, or less secure, than was agreed on.

    Raises:
        MessageError: names what differs.
    """
    privacy = plan.privacy
    if message.noisy != plan.noisy or (message.roster is not None) != plan.secure:
        raise MessageError("a round is not as private as was agreed on")
    if privacy is None or privacy.clip is None:
        return
    if message.clip != float(privacy.first_clip()):
        raise MessageError(f"the clip is {message.clip}; {privacy.clip} was agreed on")


def add_share(plan: DeploymentPlan, message: Ask, total: Tensors, clients: int) -> Tensors:
    """Return an upload with the node's share of the noise of privacy.

    Args:
        plan: the fit that the institution has agreed to.
        message: the round's request.
        total: the upload.
        clients: the number of clients of all institutions.

    Raises:
        MessageError: the round has too few institutions for the noise to be shared out.
    """
    privacy, count = plan.privacy, len(message.roster or ())
    assert privacy is not None and plan.honest is not None and plan.rounds is not None
    if plan.honest > count:
        raise MessageError(
            f"{plural(count, 'institution is', 'institutions are')} too few: the noise is shared out among "
            f"{plan.honest}"
        )
    # the server chooses the cohorts, so they hide nobody
    multiplier = privacy.multiplier(plan.rounds, clients, clients)
    number = message.round.number
    return privacy.add_noise(total, message.clip, multiplier, number, of=plan.honest)
