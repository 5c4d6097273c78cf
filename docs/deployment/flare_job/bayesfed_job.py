"""bayesfed as a job of NVIDIA FLARE 2.9 (`pip install 'nvflare>=2.9,<2.10'`), see docs/deployment_flower.md.

    python bayesfed_job.py /path/to/admin/startup-kit /path/on/the/server/experiment.toml SITES

FLARE keeps a process at each institution, which it calls a site, for the whole job; the process forwards messages to
the institution's node. The node's address is the environment variable BAYESFED_SOCKET of the FLARE client, in which
`{site}` is replaced by the site's name.
"""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from nvflare.collab import collab

from bayesfed.deploy.sockets import call
from bayesfed.deploy.transport import Carrier, Wait

log = logging.getLogger("bayesfed")


@collab.publish
def forward(message: bytes, seconds: float) -> bytes:
    """At an institution: return the node's answer."""
    address = os.environ["BAYESFED_SOCKET"].replace("{site}", collab.site_name)
    return call(address, message, seconds)


@collab.main
def main() -> None:
    """At the server: run the experiment."""
    from bayesfed.cli.deployment import run_file

    run_file(carrier(), Path(collab.get_app_prop("experiment")))


def carrier() -> Carrier:
    """Return a carrier to the sites of this job, by their names."""

    def exchange(messages: Mapping[str, bytes], wait: Wait) -> dict[str, bytes]:
        asked = [
            collab.get_clients([site])(blocking=False, timeout=wait.seconds).forward(
                message, wait.seconds
            )
            for site, message in messages.items()
        ]
        found = {site: answer for answers in asked for site, answer in answers}
        for failed in asked:
            for site, error in failed.failures.items():
                log.warning("%s: %s", site, error)
        return found

    return Carrier(lambda: [client.name for client in collab.clients], exchange)


if __name__ == "__main__":
    import bayesfed_job
    from nvflare.collab import CollabRecipe
    from nvflare.recipe.prod_env import ProdEnv

    startup_kit, experiment, sites = sys.argv[1:]
    recipe = CollabRecipe(
        "bayesfed", server=bayesfed_job, client=bayesfed_job, min_clients=int(sites)
    )
    recipe.set_server_prop("experiment", experiment)
    print(recipe.execute(ProdEnv(startup_kit)).get_result())
