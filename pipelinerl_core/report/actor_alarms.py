"""Actors whose engines do not sample from the versions that their tokens name, in the words of status and report."""

from collections.abc import Iterable

from pipelinerl_core.run.records import Commit


def alarm_lines(commits: Iterable[Commit]) -> dict[str, str]:
    """ "<actor>/<epoch>" -> one line about its first alarm in these commits, by step."""
    alarms: dict[str, str] = {}
    for commit in commits:
        for actor, rescored in commit.rescored.items():
            if rescored.alarm and actor not in alarms:
                alarms[actor] = f"{actor} does not sample from the versions that its tokens name: {rescored.alarm}"
    return alarms


def alarm_text(commits: Iterable[Commit]) -> str | None:
    """All alarms of these commits and what to do about them; None without an alarm."""
    lines = alarm_lines(commits)
    return f"{'; '.join(lines.values())}. Restart the actor (docs/off-policy.md)" if lines else None
