"""The commands as a user calls them, against a fake server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from deploy.cli import main
from tests.fakes.openai_server import free_url

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.openai_server import FakeOpenAIServer

SMALL = ["--requests", "6", "--input-tokens", "20", "--output-tokens", "4", "--concurrency", "3"]


def metrics(path: Path) -> dict[str, float]:
    return {entry["metric"]: entry["value"] for entry in json.loads(path.read_text())}


def test_serve_prints_a_table_and_writes_results(
    server: FakeOpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    arguments = ["--url", f"{server.url}/v1", *SMALL, "--json", str(path), "--label", "peer", "--api-key", "sk-1"]
    assert main(["bench", "serve", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "time to first token" in shown
    assert "output tokens/s" in shown
    entries = json.loads(path.read_text())
    assert {(entry["benchmark"], entry["model"], entry["label"]) for entry in entries} == {
        ("serve-random", "good", "peer")
    }
    assert metrics(path)["requests"] == 6
    assert metrics(path)["failed_any"] == 0
    assert metrics(path)["output_throughput"] > 0
    assert "sk-1" not in path.read_text()
    assert len(server.bodies) == 1 + 2 + 6  # a probe, the warm-up, the load


def test_serve_open_loop(server: FakeOpenAIServer, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--requests", "10", "--rate", "200", "--burstiness", "3", "--output-tokens", "2", "--warmup", "0"]
    assert main(["bench", "serve", "--url", server.url, *load]) == 0
    assert "200 requests/s, CV 3" in capsys.readouterr().out


def test_serve_shared_prefix_sends_users(server: FakeOpenAIServer) -> None:
    shape = [
        "--apps",
        "2",
        "--users",
        "3",
        "--requests-per-user",
        "2",
        "--system-tokens",
        "30",
        "--question-tokens",
        "5",
    ]
    load = [
        "--workload",
        "shared-prefix",
        *shape,
        "--output-tokens",
        "2",
        "--warmup",
        "0",
        "--user-field",
        "cache_salt",
    ]
    assert main(["bench", "serve", "--url", server.url, *load]) == 0
    users = [body["cache_salt"] for body in server.bodies if body.get("stream")]
    assert sorted(users) == sorted(f"user-{user:05d}" for user in range(3) for _ in range(2))


def test_serve_plays_m1_and_reports_the_hit_rates_of_an_unlimited_cache(
    server: FakeOpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    shape = ["--users", "5", "--apps", "2", "--requests", "20", "--scale", "0.02", "--think-s", "0", "--seed", "3"]
    load = ["--workload", "m1", *shape, "--warmup", "0", "--json", str(path)]
    assert main(["bench", "serve", "--url", server.url, *load]) == 0
    assert "ideal hit rate within users" in capsys.readouterr().out
    found = metrics(path)
    assert found["requests"] == 20
    assert 0 < found["ideal_hits_within_users"] < 1
    assert 0 < found["ideal_hits_across_users"] < 1
    assert {body["user"] for body in server.bodies if body.get("stream")} <= {f"user-{n:06d}" for n in range(5)}


def test_serve_scales_s1_to_a_small_model(server: FakeOpenAIServer) -> None:
    load = ["--workload", "s1", "--users", "4", "--apps", "2", "--scale", "0.125", "--warmup", "0"]
    assert main(["bench", "serve", "--url", server.url, *load]) == 0
    streamed = [body for body in server.bodies if body.get("stream")]
    assert {len(body["prompt"]) for body in streamed} == {445 + 28}
    assert {body["max_tokens"] for body in streamed} == {8}


def test_serve_sharegpt_chats(server: FakeOpenAIServer, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps([{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}]))
    assert main(["bench", "serve", "--url", server.url, "--workload", "sharegpt", "--file", str(file)]) == 0
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "hi"}]


def test_serve_replays_a_trace_at_its_own_times(server: FakeOpenAIServer, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    rows = [{"timestamp": t, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]} for t in (0, 100, 100)]
    file.write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "r.json"
    load = ["--workload", "trace", "--file", str(file), "--json", str(path)]
    assert main(["bench", "serve", "--url", server.url, *load]) == 0
    assert metrics(path)["requests"] == 3
    # All of one user: the second and the third find the first in the cache.
    assert metrics(path)["cached_share"] == pytest.approx(2 / 3, abs=0.01)


def test_serve_reports_failures_by_kind(
    server: FakeOpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    load = ["--model", "overloaded", "--prompt-form", "ids", "--warmup", "0", "--json", str(path), *SMALL]
    assert main(["bench", "serve", "--url", server.url, *load]) == 1
    assert "6 × http_429: come back later" in capsys.readouterr().out
    assert metrics(path)["failed_http_429"] == 6


def test_serve_reports_when_tokens_are_counted_by_chunks(
    server: FakeOpenAIServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--url", server.url, "--model", "no-usage", *SMALL]) == 0
    assert "counted by chunks" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workload", "trace"], "--file"),
        (["--workload", "sharegpt", "--file", "/does/not/exist"], "exist"),
        (["--burstiness", "-1", "--rate", "3"], "burstiness"),
    ],
)
def test_serve_explains_invalid_combinations_of_flags(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", ["serve", "cpu"])
def test_an_unreachable_server_is_explained(benchmark: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = free_url()
    assert main(["bench", benchmark, "--url", url]) == 2
    assert url.removeprefix("http://") in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [["--concurrency", "0"], ["--concurrency", "2", "--rate", "3"], ["--extra-body", "[]"]]
)
def test_wrong_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *flags])
    assert ended.value.code == 2


def test_cpu_measures_servers_in_turn(
    server: FakeOpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cpu.json"
    urls = ["--url", f"ours={server.url}", "--url", f"peer={server.url}/v1"]
    small = ["--repeats", "2", "--streams", "2", "--single-requests", "1", "--json", str(path)]
    assert main(["bench", "cpu", *urls, *small]) == 0
    shown = capsys.readouterr().out
    assert "ours" in shown
    assert "peer" in shown
    entries = json.loads(path.read_text())
    names = ["one_stream_decode", "one_stream_ttft", "prefix_cold_ttft", "prefix_warm_ttft", "streams_2_output"]
    assert sorted((entry["label"], entry["metric"]) for entry in entries) == [
        (label, name) for label in ("ours", "peer") for name in names
    ]
    assert {entry["repeats"] for entry in entries} == {2}


def test_cpu_asks_for_its_prefix_twice_as_one_user(server: FakeOpenAIServer) -> None:
    assert main(["bench", "cpu", "--url", server.url, "--repeats", "1", "--streams", "2"]) == 0
    cold, warm = server.bodies[-2:]
    assert cold["user"] == warm["user"]
    assert cold["prompt"][:1016] == warm["prompt"][:1016]
    assert cold["prompt"][1016:] != warm["prompt"][1016:]
    others = [tuple(body["prompt"][:16]) for body in server.bodies[1:-1]]
    assert len(set(others)) == len(others)


def test_cpu_reports_no_figures_if_requests_failed(
    server: FakeOpenAIServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "cpu", "--url", server.url, "--model", "error-midway"]) == 2
    assert "the worker died" in capsys.readouterr().err
