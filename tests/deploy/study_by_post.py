"""A study by post, in the folders of a test."""

import itertools

from bayesfed import datasets
from bayesfed.deploy.answering import draft_answer, public_key_of, sign_answer
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.letters import (
    public_signing_key,
    read_letter,
)
from bayesfed.deploy.messages import Ask, unpack
from bayesfed.deploy.node import Node
from bayesfed.deploy.post import Post, Unanswered
from bayesfed.deploy.server import run_server
from tests.deploy.in_process import nodes_of

SCHOOLS = datasets.eight_schools()


class Study:
    """A coordinator and nodes; each command is a new process, which has nothing but files.

    Nodes restart with each letter if ``restarting``; else they are resident, which is faster.
    """

    def __init__(self, nodes, plan, folder, *, restarting=False, **patience):
        self.restarting = restarting
        self.nodes = {node.name: node for node in nodes}
        self.plan, self.folder = plan, folder
        self.patience = Patience(tuple(self.nodes), **patience)
        self.result = None
        self.desk.begin(folder / "experiment.toml")

    @property
    def desk(self):
        """The coordinator's letters, as a new process sees them."""
        keys = {name: public_key_of(node.folder) for name, node in self.nodes.items()}
        return Post(self.folder / "post", tuple(self.nodes), keys)

    def at(self, name):
        """The node, as a new process sees it."""
        was = self.nodes[name]
        if not self.restarting:
            return was
        return Node(was.name, was.federation, was.plan, was.folder, was.execution, was.pinned)

    def ask(self):
        """Go on as far as the answers allow, and return the letter."""
        desk = self.desk
        if not desk.missing:
            try:
                file = self.folder / "server.safetensors"
                self.result = run_server(desk.carrier(), self.plan, self.patience, file)
                desk.write_last()
            except Unanswered as waiting:
                desk.write(waiting.requests)
        return desk.letter_path.read_bytes()

    def answer(self, name, letter):
        """What an institution sends."""
        node = self.at(name)
        coordinator = public_signing_key(self.desk.key)
        return sign_answer(node, draft_answer(node, letter, coordinator))

    def answers(self, letter):
        """What all that are asked send."""
        return [self.answer(name, letter) for name in read_letter(letter).head.requests]

    def rounds(self, count):
        """Go on until the letter of a round is there; return that letter."""
        while True:
            letter = self.ask()
            asked = unpack(read_letter(letter).messages[-1])[0]
            if isinstance(asked, Ask) and asked.round.number == count:
                return letter
            for answer in self.answers(letter):
                self.desk.take(answer)

    def finish(self):
        """Go on to the end; return the number of letters that were answered."""
        for number in itertools.count():
            letter = self.ask()
            if self.result is not None:
                for name in self.nodes:  # no answer comes of it
                    draft_answer(self.at(name), letter, public_signing_key(self.desk.key))
                return number
            for answer in self.answers(letter):
                self.desk.take(answer)


def study_of(plan, folder, **options):
    return Study(nodes_of(SCHOOLS, plan, folder), plan, folder, **options)
