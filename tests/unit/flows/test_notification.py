"""Which block `deploy --notify` makes of a URL; the URL is a secret."""

from uuid import uuid4

import httpx
import pytest
from prefect.blocks.notifications import NotificationError

from pipelinerl.flows.cli import notification
from pipelinerl.flows.cli.notification import BLOCK_NAME, notification_blocks
from pipelinerl_core.errors import ConfigError, PipelineRLError

SLACK = "https://hooks.slack.com/services/T00000000/B00000000/abcdefghijklmnop"
DISCORD = "https://discord.com/api/webhooks/123456789/abc-DEF_ghi"
TEAMS = (
    "https://prod-1.westus.logic.azure.com:443/workflows/643e69f83c8944438d68119179a10a64/triggers/manual/paths/invoke"
    "?api-version=2016-06-01&sp=%2Ftriggers%2Fmanual%2Frun&sv=1.0&sig=KODuebbbGGGnaGVkfZLoPVWYKHzQsb6bGMBQpzQmDPM"
)
PLAIN = "http://127.0.0.1:8000/hook/abcdefghijklmnop?key=value"


@pytest.mark.parametrize(
    ("url", "slug"),
    [
        (SLACK, "slack-webhook"),
        (SLACK.replace("slack.com", "slack-gov.com"), "slack-webhook"),
        (DISCORD, "discord-webhook"),
        (TEAMS, "ms-teams-webhook"),
        (PLAIN, "custom-webhook"),
        ("https://mattermost.example/hooks/abcdefghijklmnop", "custom-webhook"),
    ],
)
def test_a_url_becomes_the_block_of_its_service_and_is_a_secret(url, slug):
    (block,) = notification_blocks([url])
    assert block.get_block_type_slug() == slug
    assert block._block_document_name == BLOCK_NAME
    secret = url.rpartition("/")[2]
    assert secret not in repr(block)
    assert secret not in block.model_dump_json()


def test_the_plain_webhook_posts_subject_and_body():
    (block,) = notification_blocks([PLAIN])
    request = block._build_request_args('two\nlines with "quotes"', "PipelineRL: a {{name}} is Failed")
    assert (request["method"], request["url"]) == ("POST", PLAIN)
    assert request["json"] == {
        "subject": "PipelineRL: a {{name}} is Failed",
        "body": 'two\nlines with "quotes"',
        "text": 'PipelineRL: a {{name}} is Failed\ntwo\nlines with "quotes"',
    }


def test_further_urls_of_a_service_get_names_of_their_own():
    blocks = notification_blocks([PLAIN, SLACK, PLAIN, f"{PLAIN}/2"])
    assert [block._block_document_name for block in blocks] == [BLOCK_NAME, BLOCK_NAME, f"{BLOCK_NAME}-2"]


def test_a_url_does_not_overwrite_a_block_that_is_named_beside_it(monkeypatch):
    (earlier,) = notification_blocks([SLACK])
    object.__setattr__(earlier, "_block_document_id", uuid4())
    monkeypatch.setattr(notification, "_load", lambda slug: earlier)
    named, new = notification_blocks([f"slack-webhook/{BLOCK_NAME}", f"{SLACK}2"])
    assert named is earlier
    assert new._block_document_name == f"{BLOCK_NAME}-2"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mailto://user:abcdefghijklmnop@mail.example", "sendgrid-email/team"),
        ("http://", "no http(s) URL"),
        ("https://[bad/abcdefghijklmnop", "no http(s) URL"),
        (SLACK.removeprefix("https://"), "neither an http(s) URL nor TYPE/NAME"),
        (SLACK.replace("://", ":/"), "neither an http(s) URL nor TYPE/NAME"),
        ("https://a b/abcdefghijklmnop", "no http(s) URL"),
        (SLACK.replace("B00000000/", ""), "an incoming webhook of Slack is"),
        (TEAMS.partition("?")[0], "no URL of a workflow of Teams"),
    ],
)
def test_a_wrong_url_is_refused_without_the_url(url, says):
    with pytest.raises(ConfigError) as raised:
        notification_blocks([url])
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "abcdefghijklmnop" not in str(raised.value)


def failing(error):
    """A block whose messages fail."""
    (block,) = notification_blocks([PLAIN])

    def notify(**_):
        raise error

    object.__setattr__(block, "notify", notify)
    return block


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            httpx.HTTPStatusError(f"for {PLAIN}", request=httpx.Request("POST", PLAIN), response=httpx.Response(404)),
            "custom-webhook/team: the webhook answers HTTP 404 Not Found",
        ),
        (httpx.ConnectError(f"refused: {PLAIN}"), "ConnectError: refused: http://127.0.0.1:8000/..."),
        (NotificationError(log=""), "NotificationError"),
    ],
)
def test_a_webhook_that_fails_is_one_line_without_its_url(monkeypatch, error, says):
    monkeypatch.setattr(notification, "_load", lambda slug: failing(error))
    with pytest.raises(PipelineRLError) as raised:
        notification._try_from_here("custom-webhook/team")
    assert says in str(raised.value)
    assert "abcdefghijklmnop" not in str(raised.value)
