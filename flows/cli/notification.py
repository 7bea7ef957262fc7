"""The notification blocks of a Prefect server: made from URLs of webhooks, found in the automations, tried."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, count
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import httpx
from prefect.automations import Automation
from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block
from prefect.blocks.notifications import (
    CustomWebhookNotificationBlock,
    DiscordWebhook,
    MicrosoftTeamsWebhook,
    SlackWebhook,
)
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.events.actions import SendNotification
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventRelatedFilter
from prefect.events.schemas.events import ReceivedEvent
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from pipelinerl.tasks.notifications import ALARM, TEST_EVENT, notifying_automations
from pipelinerl.tasks.outage import check_prefect
from pipelinerl_core.errors import ConfigError, PipelineRLError

BLOCK_NAME = "pipelinerl-notify"
"""Name of the blocks that `deploy --notify URL` saves; a further URL of the same type gets a number."""
TEST_SECONDS = 20.0
"""Within which the server reports that a test message was sent."""
_POLL_SECONDS = 0.5
_CLOCKS = timedelta(hours=1)
_MAX_REPORTS = 50
_SENT, _FAILED = "prefect.automation.action.executed", "prefect.automation.action.failed"
_TEST_MESSAGE = "a test message of `pipelinerl notify --test`"

_SLUG = re.compile(r"[a-z0-9-]+/[A-Za-z0-9_-]+")
_URL = re.compile(r"https?://[^\s/]+\S*", re.IGNORECASE)
_SLACK = re.compile(r"https://hooks\.slack(-gov)?\.com/services/", re.IGNORECASE)
_SLACK_WEBHOOK = re.compile(_SLACK.pattern + r"\w+/\w+/\w+/?", re.IGNORECASE)
_DISCORD = re.compile(r"https://discord(?:app)?\.com/api/webhooks/(\d+)/([\w-]+)/?", re.IGNORECASE)
_TEAMS = re.compile(r"https://\S+/triggers/manual/paths/invoke", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Notified:
    """An automation that sends messages, as it is on the server."""

    name: str
    enabled: bool
    blocks: dict[UUID, str]
    """Document id -> "<type>/<name>" of the notification blocks of its actions."""

    @property
    def line(self) -> str:
        """Who gets its messages."""
        receivers = ", ".join(sorted(self.blocks.values())) or "nobody"
        return f"{self.name}: {receivers}{'' if self.enabled else ' (switched off)'}"


def notification_blocks(entries: Sequence[str]) -> list[NotificationBlock]:
    """The block of each entry: "<type>/<name>" of a block on the server, or an http(s) URL, whose block is not saved.

    Raises ConfigError, without the URL, which is a secret.
    """
    blocks = [_block_of_url(entry) if "://" in entry else _load(entry) for entry in dict.fromkeys(entries)]
    taken = {(block.get_block_type_slug(), block._block_document_name) for block in blocks}
    for block in blocks:
        if block._block_document_id is None:
            slug = block.get_block_type_slug()
            names = (f"{BLOCK_NAME}-{number}" for number in count(2))
            name = next(name for name in chain([BLOCK_NAME], names) if (slug, name) not in taken)
            block._block_document_name = name
            taken.add((slug, name))
    return blocks


def save_block(block: NotificationBlock) -> UUID:
    """The document id of the block, which is saved if it was made from a URL."""
    if block._block_document_id is None:
        block.save(block._block_document_name, overwrite=True)
    block_id = block._block_document_id
    assert block_id is not None
    return block_id


def _block_of_url(url: str) -> NotificationBlock:
    shown = f"--notify {url.partition('://')[0]}://..."
    try:
        has_host = bool(urlsplit(url).hostname)
    except ValueError:
        has_host = False
    if not _URL.fullmatch(url) or not has_host:
        raise ConfigError(
            f"{shown}: no http(s) URL. For mail and other services create a notification block in the Prefect UI "
            "and give its TYPE/NAME, for example sendgrid-email/team"
        )
    if _SLACK.match(url):
        if not _SLACK_WEBHOOK.fullmatch(url):
            raise ConfigError(
                f"{shown}: an incoming webhook of Slack is https://hooks.slack.com/services/T.../B.../..."
            )
        return SlackWebhook(url=url)
    if discord := _DISCORD.fullmatch(url):
        return DiscordWebhook(webhook_id=discord[1], webhook_token=discord[2])
    if _TEAMS.match(url):
        try:
            return MicrosoftTeamsWebhook(url=url)
        except ValueError:
            raise ConfigError(
                f"{shown}: no URL of a workflow of Teams; copy it again, with all after the `?`"
            ) from None
    return CustomWebhookNotificationBlock(
        name="PipelineRL",
        url="{{url}}",  # the field of a URL is no secret, the values in `secrets` are
        secrets={"url": url},
        json_data={"subject": "{{subject}}", "body": "{{body}}", "text": "{{subject}}\n{{body}}"},
    )


def _load(slug: str) -> NotificationBlock:
    if not _SLUG.fullmatch(slug):  # perhaps a URL without its scheme: a secret
        raise ConfigError("--notify: neither an http(s) URL nor TYPE/NAME of a notification block in Prefect")
    try:
        block: Any = Block.load(slug)
    except ValueError as error:
        raise ConfigError(
            f"--notify {slug}: no such block ({str(error).splitlines()[0]}). Give the http(s) URL of a webhook, or "
            "create the block in the Prefect UI"
        ) from None
    if not isinstance(block, NotificationBlock):
        raise ConfigError(f"--notify {slug}: no notification block; `prefect block type ls` lists the types")
    return block


def read_notified() -> list[Notified]:
    """The automations of the server that send messages; those that are missing are left out."""
    notified = []
    for wanted in notifying_automations(()):
        try:
            existing: Any = Automation.read(name=wanted.name)
        except ValueError:
            continue
        ids = [action.block_document_id for action in existing.actions if isinstance(action, SendNotification)]
        notified.append(Notified(wanted.name, existing.enabled, {block: _slug(block) for block in ids}))
    return notified


def _slug(block: UUID) -> str:
    with get_client(sync_client=True) as client:
        try:
            document = client.read_block_document(block, include_secrets=False)
        except ObjectNotFound:
            return f"the deleted block {block}"
    return f"{document.block_type.slug if document.block_type else '?'}/{document.name}"


def read_deployed() -> list[Notified]:
    """The automations of the server that send messages. Raises ConfigError without a server or without `deploy`."""
    url = get_current_settings().api.url
    if not url:
        raise ConfigError("notify needs a Prefect server. Set PREFECT_API_URL, for example http://127.0.0.1:4200/api")
    check_prefect(str(url))
    notified = read_notified()
    if not notified:
        raise ConfigError("the Prefect server has no automations of PipelineRL. Run `pipelinerl deploy --notify URL`")
    return notified


def send_test(notified: Sequence[Notified]) -> list[str]:
    """Let the Prefect server send a test message; returns the blocks to which it was sent.

    pipelinerl-alarm sends the message. Raises ConfigError if it notifies nobody, and PipelineRLError with the reason
    if a message was not sent.
    """
    alarm = next((each for each in notified if each.name == ALARM), None)
    if alarm is None or not alarm.blocks:
        raise ConfigError(f"{ALARM} notifies nobody. Run `pipelinerl deploy --notify URL`")
    if not alarm.enabled:
        raise ConfigError(f"{ALARM} is switched off. Switch it on in the Prefect UI (Automations)")
    events = _await_actions(_emit_test(), len(alarm.blocks))
    for event in events:
        if event.event == _FAILED:
            raise PipelineRLError(f"the Prefect server could not send the message: {_reason_of(event)}")
    slugs = sorted(alarm.blocks.values())
    if len(events) < len(alarm.blocks):
        for slug in slugs:
            _try_from_here(slug)
        raise PipelineRLError(
            f"the Prefect server has not sent the message within {TEST_SECONDS:.0f} s, but this host could send it: "
            "look at the log of the Prefect server, and whether its services run and it reaches the webhook"
        )
    return slugs


def _emit_test() -> UUID:
    event = emit_event(
        TEST_EVENT,
        resource={"prefect.resource.id": "pipelinerl.run.test", "prefect.resource.name": "test"},
        payload={"message": _TEST_MESSAGE},
    )
    assert event is not None
    return event.id


def _await_actions(event: UUID, num: int) -> list[ReceivedEvent]:
    """What the server reports of the actions that an event triggers: `num` reports, or fewer after TEST_SECONDS."""
    names, trigger = EventNameFilter(name=[_SENT, _FAILED]), EventRelatedFilter(id=[f"prefect.event.{event}"])
    deadline = time.monotonic() + TEST_SECONDS
    with get_client(sync_client=True) as client:
        while True:
            now = datetime.now(UTC)  # of this host, whose clock may differ from the server's
            occurred = EventOccurredFilter(since=now - _CLOCKS, until=now + _CLOCKS)
            wanted = EventFilter(event=names, related=trigger, occurred=occurred)
            reports = client.read_events(wanted, limit=_MAX_REPORTS).events
            events = [event for event in reports if event.payload.get("action_type") == "send-notification"]
            if len(events) >= num or time.monotonic() > deadline:
                return events
            time.sleep(_POLL_SECONDS)


def _reason_of(event: ReceivedEvent) -> str:
    """One line. Prefect puts the log of the notification, if any, beside the reason."""
    lines = str(event.payload.get("notification_log") or event.payload.get("reason", "no reason")).splitlines()
    return _without_urls(lines[-1])


def _try_from_here(slug: str) -> None:
    """Send the test message from this host, because the server reports no error of a plain webhook."""
    block: Any = _load(slug)
    try:
        with block.raise_on_failure():
            block.notify(body=_TEST_MESSAGE, subject="PipelineRL: test")
    except httpx.HTTPStatusError as error:
        answer = error.response
        raise PipelineRLError(
            f"{slug}: the webhook answers HTTP {answer.status_code} {answer.reason_phrase}"
        ) from None
    except Exception as error:  # noqa: BLE001 (whatever the service of the block raises)
        line = next(iter(str(error).splitlines()), "")
        raise PipelineRLError(f"{slug}: {type(error).__name__}: {_without_urls(line)}") from None


def _without_urls(text: str) -> str:
    return re.sub(r"(https?://[^\s/]+)/\S+", r"\1/...", text)
