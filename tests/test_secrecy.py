"""What must not be told is told nowhere: neither in a run's files nor at the terminal."""

from __future__ import annotations

from rewards.judge import CRITERIA
from tests.fake_endpoint import MODEL, FakeEndpoint, error, says
from tests.small_run import SmallRun, prepare

KEY, PASSWORD = "sk-planted-4711-key", "planted-0815-password"


def talkative(body):
    """A server that quotes what it was sent: every third answer is a refusal that names key and password."""
    talkative.num_calls += 1
    if talkative.num_calls % 3 == 0:
        return error(401, f"{KEY} is no good, and neither is {PASSWORD}")
    if talkative.num_calls % 3 == 1:
        return error(500, f"out of order: {KEY} {PASSWORD}")
    if "reply" in body["response_format"]["json_schema"]["schema"]["properties"]:
        return says({"current_answer": "", "thought": "", "reply": "please say what bees want"})
    return says({name: {"reason": "so", "score": 1} for name in CRITERIA})


def test_keys_and_passwords_stay_out_of_every_file_and_off_the_terminal(tmp_path):
    talkative.num_calls = 0
    with FakeEndpoint(talkative) as server:
        config = prepare(
            tmp_path,
            server.base_url,
            rollout__user__endpoint__api_key_env="PLANTED_KEY",
            rewards__weights={"interactivity": 1.0},
            rewards__judge={"base_url": server.base_url.replace("//", f"//me:{PASSWORD}@"), "model": MODEL},
            rewards__max_failure_rate=1.0,
        )
        with SmallRun(config, PLANTED_KEY=KEY) as run:
            assert run.wait() == 0, run.output
    assert f"Bearer {KEY}" in server.keys and any(key.startswith("Basic ") for key in server.keys if key)
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    traces = "".join(path.read_text() for path in files if path.parent.name == "traces")
    assert "user: http_401: " in traces and "judge: http_401: " in traces and "***" in traces
    assert "PLANTED_KEY" in (run.folder / "config.yaml").read_text()
    for secret in (KEY, PASSWORD):
        assert secret not in run.output
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
