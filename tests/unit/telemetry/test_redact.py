"""Nothing that looks like a secret reaches MLflow or a report."""

import pytest

from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.telemetry.redact import REDACTED, flatten, redact


@pytest.mark.parametrize(
    "key",
    [
        "hub.token",
        "s3.secret_access_key",
        "a.api_keys",
        "db.password",
        "apiKey",
        "x.api_key",
        "aws.accessKey",
        "credentials",
    ],
)
def test_secrets_by_name(key):
    assert redact({key: "hunter2"}) == {key: REDACTED}


@pytest.mark.parametrize("key", ["trainer.pack_tokens", "rollouts.max_tokens", "loss.normalization", "prompts.keys"])
def test_counts_of_tokens_are_no_secrets(key):
    assert redact({key: "64"}) == {key: "64"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("postgresql://me:hunter2@db/mlflow", f"postgresql://{REDACTED}@db/mlflow"),
        ("s3://me:hunt@er2@host/x", f"s3://{REDACTED}@host/x"),
        (f"{'x' * 99}http://me:hunter2@host", f"{'x' * 99}http://{REDACTED}@host"),
        ("https://host/x?X-Amz-Signature=abc&v=1", f"https://host/x?X-Amz-Signature={REDACTED}&v=1"),
        ("AKIAABCDEFGHIJKLMNOP", REDACTED),
        ("hf_abcdefghijklmnop", REDACTED),
        ("Bearer abcdefghijkl", REDACTED),
        ("Authorization: Basic dXNlcjpwYXNz", REDACTED),
        ("github_pat_11ABCDEFG0abcdefgh", REDACTED),
        ("https://hooks.slack.com/services/T0/B0/abc", f"https://{REDACTED}"),
        ("env AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI HOME=/root", f"env AWS_SECRET_ACCESS_KEY={REDACTED} HOME=/root"),
        ("{'api_key': 'abcdefgh12', 'n': 1}", f"{{'api_key': '{REDACTED}', 'n': 1}}"),
        ("password: hunter2hunter2", f"password: {REDACTED}"),
        ("max_tokens=12345678", "max_tokens=12345678"),
        ("JUDGE_KEY=$JUDGE_KEY", "JUDGE_KEY=$JUDGE_KEY"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("token", "token"),
    ],
)
def test_secrets_by_look(value, shown):
    assert redact({"some.value": value}) == {"some.value": shown}


def test_a_real_configuration_keeps_every_value():
    flat = flatten(RunConfig().model_dump(mode="json"))
    assert flat["trainer.pack_tokens"] == str(RunConfig().trainer.pack_tokens)
    assert flat["loss.normalization"] == RunConfig().loss.normalization
    assert redact(flat) == flat
