"""What must not be told is told nowhere: neither in a run's files nor at the terminal."""

from __future__ import annotations

from rewards.judge import CRITERIA
from tests.fake_endpoint import MODEL, FakeEndpoint, error, is_check, says
from tests.small_run import SmallRun, prepare

KEY, PASSWORD = "sk-planted-4711-key", "planted-0815-password"


class Talkative:
    """A server that quotes what it was sent in two answers of three: the user's key, the judge's password."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, body):
        self.num_calls += 1
        is_user = "reply" in body["response_format"]["json_schema"]["schema"]["properties"]
        if self.num_calls % 3 and not is_check(body):
            return error((500, 401)[self.num_calls % 3 - 1], f"{KEY if is_user else PASSWORD} is no good")
        if is_user:
            return says({"current_answer": "", "thought": "", "reply": "please say what bees want"})
        return says({name: {"reason": "so", "score": 1} for name in CRITERIA})


def test_keys_and_passwords_stay_out_of_every_file_and_off_the_terminal(tmp_path):
    with FakeEndpoint(Talkative()) as server:
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
