"""What the trainer tells a hub when it registers, at whatever moment that is."""

import threading
from types import SimpleNamespace

from pipelinerl_core.config import load_config
from pipelinerl_core.messages import Reserved
from pipelinerl_core.roles.trainer.main import Trainer
from pipelinerl_core.testing.fakes import MemoryStore
from tests.builders import epoch_record, group_named


def group(group_id):
    return group_named(group_id, num_rollouts=1, num_tokens=1)


class Link:
    """Reserves group 10 for step 1, group 20 for step 2, ..."""

    def reserve(self, message):
        return Reserved(re=0, is_ready=True, groups=(group(10 * message.step),)), []


def test_a_registration_never_has_the_groups_of_another_step():
    told = set()

    class Watched(Trainer):
        """Registers after every change of an attribute, as the thread that commits may."""

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name.startswith("_reserved") and hasattr(self, "_committer"):
                register = self._registration()
                told.add((register.step, *(ref.group_id for ref in register.reservation)))

    context = SimpleNamespace(store=MemoryStore(), config=load_config("quickstart"), run_id="run", token="")
    epoch = epoch_record(1)
    trainer = Watched(context, None, epoch, link=lambda registration: Link())
    for step in (1, 2, 3):
        trainer._reserve(step, threading.Event(), ())
    trainer._committer.close()
    assert told == {(1, 10), (2, 20), (3, 30)}
