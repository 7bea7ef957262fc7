"""A replay of one arm, or a study of several: checked settings, and the result that is written after each arm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipelinerl_core.comparison.plan import digest_of
from pipelinerl_core.comparison.whatif.document import document_of, write_document
from pipelinerl_core.comparison.whatif.limit import ESS_SHARE
from pipelinerl_core.comparison.whatif.page import page
from pipelinerl_core.comparison.whatif.plan import RECORDED, PlannedArm, name_of, plan_arms, whatif_store
from pipelinerl_core.config.arm import Arm
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.context import RunContext


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Checked arms and where their comparison is written."""

    run: RunContext
    arms: tuple[PlannedArm, ...]
    recorded: PlannedArm | None
    """The arm of the recorded objective; None in a replay of one arm, which is compared with the run itself."""
    ess_share: float
    store: ObjectStore

    def write(self) -> dict[str, Any]:
        """Compare the arms that are trained so far, write whatif.json and whatif.html; returns whatif.json."""
        document = document_of(self.run, self.arms, self.ess_share, self.recorded, self.store.url)
        write_document(self.store, document, page(document))
        return document


def plan_replay(
    run: RunContext, overrides: Sequence[str], first: int | None, last: int | None, ess_share: float = ESS_SHARE
) -> WhatIf:
    """A replay with changed settings. Raises ConfigError in one line."""
    arms = plan_arms(run, [Arm(name_of(overrides), tuple(overrides))], first, last)
    return WhatIf(run=run, arms=tuple(arms), recorded=None, ess_share=_checked(ess_share), store=arms[0].store)


def plan_study(
    run: RunContext, arms: Sequence[Arm], first: int | None, last: int | None, ess_share: float = ESS_SHARE
) -> WhatIf:
    """A study: the recorded objective and the given arms. Raises ConfigError in one line."""
    if not arms:
        raise ConfigError("nothing to study: give at least one arm, for example --arm learner.lr=1e-4")
    planned = plan_arms(run, [Arm(RECORDED, ()), *arms], first, last)
    digest = digest_of([[arm.store.url.rpartition("/")[2] for arm in planned], ess_share])
    store = whatif_store(run).child(f"studies/{digest}")
    return WhatIf(run=run, arms=tuple(planned), recorded=planned[0], ess_share=_checked(ess_share), store=store)


def _checked(ess_share: float) -> float:
    if not 0 <= ess_share <= 1:
        raise ConfigError(f"--ess-share {ess_share:g}: a share lies between 0 and 1. Set --ess-share 0.3")
    return ess_share
